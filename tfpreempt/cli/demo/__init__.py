"""`tfpreempt demo`: a small model survives real preemptions.

command            the command: runs two jobs one after the other, and prints a table
job                runs a training job under `tfpreempt run`, and preempts it
result             compares the two jobs
training           the parts of the training programs that the backends share
jax_worker         the training program on JAX: a custom loop, or `model.fit`
tensorflow_worker  the training program on TensorFlow: a custom loop, or `model.fit`

Imported by no other package.
"""
