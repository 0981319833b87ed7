"""Measurements of tfpreempt, mostly beside TensorFlow's handler and Keras' callback.

`python -m benchmarks` runs the benches. Each module is a bench, or a program that a
bench starts. The tests of the benches are in `tests/benchmarks/`.
"""
