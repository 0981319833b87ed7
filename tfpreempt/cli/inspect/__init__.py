"""`tfpreempt inspect` and `verify`: which checkpoints are intact?

command  the two commands
rows     reads and checks the checkpoints of a directory or URI, and of its mirror
view     formats checkpoints: a table for people, objects for programs

Imported by no other package.
"""
