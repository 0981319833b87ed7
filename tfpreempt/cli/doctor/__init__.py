"""`tfpreempt doctor`: would a preemption lose work here?

command  the options, all that is found out, and how the verdict looks
slurm    asks scontrol whether Slurm would start this job again
sources  asks each source of a config once whether it works here
storage  tries a save in a directory: down to the disk, timed, and removed again
verdict  what follows from what has been found out; no I/O of its own

Imported by cli/run.
"""
