"""`tfpreempt inspect` and `verify`: list and check the checkpoints of a run.

command  the two commands
replay   repeats the steps between two commits, and compares the values
rows     reads and checks the checkpoints of a directory or URI, and of its mirror
view     formats checkpoints: a table for people, objects for programs

Imported by no other package.
"""
