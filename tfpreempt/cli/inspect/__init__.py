"""`tfpreempt inspect` and `verify`: which checkpoints lie here, and are they whole?

command  the two commands
rows     reads and checks what lies at a place, and in its mirror
view     how checkpoints look: a table for people, objects for programs

Imported by no other package.
"""
