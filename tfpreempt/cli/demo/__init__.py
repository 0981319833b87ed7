"""`tfpreempt demo`: a small model survives real preemptions.

command  the command: runs two jobs one after the other, and prints a table
job      runs a training job under `tfpreempt run`, and preempts it
result   compares the two jobs
worker   the training program of the demo: a custom loop, or `model.fit`

Imported by no other package.
"""
