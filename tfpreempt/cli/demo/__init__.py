"""`tfpreempt demo`: a small model survives real preemptions.

command       `tfpreempt demo`
data          the demo's data: scikit-learn's handwritten digits, batched by step number
job           one training job of the demo: the supervisor as a process
keras_worker  the program that `tfpreempt demo --keras` trains with: `model.fit`
plan          when the demo strikes, and whom: drawn from a seed before anything runs
result        what the demo's two jobs left behind, counted and compared
view          what the demo shows: a progress bar while it trains, a table at the end
worker        the program that the demo trains with: an ordinary custom loop
"""
