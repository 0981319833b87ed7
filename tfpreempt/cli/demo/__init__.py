"""`tfpreempt demo`: a small model survives real preemptions.

command  the options, the two jobs one after the other, and the table at the end
job      a training job: `tfpreempt run` of the program, preempted as planned
result   the outcome of the two jobs, counted and compared
worker   the program that the demo trains with: a custom loop, or `model.fit`

Imported by no other package.
"""
