"""`tfpreempt doctor`: would a preemption lose work here?

command  `tfpreempt doctor`: would a preemption lose work here?
facts    what `tfpreempt doctor` finds out, and the lines of its verdict; values only
slurm    asks scontrol whether Slurm would start this job again
sources  asks each source of a config once whether it works here
storage  tries a save in a directory: down to the disk, timed, and removed again
verdict  what follows from what `tfpreempt doctor` has found out; no I/O
view     how the doctor's verdict looks: tables for people, one object for programs
"""
