"""Measurements of tfpreempt, mostly beside TensorFlow's handler and Keras' callback.

`python -m benchmarks` runs them; each module is one bench, or a program that a bench
starts. Their tests are in `tests/benchmarks/`.
"""
