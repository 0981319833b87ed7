"""`tfpreempt run`: training under supervision, through preemptions.

cluster     the cluster of the workers of one machine: free ports, and TF_CONFIG
command     the options on the command line, read and checked
console     what goes to the console, by threads that hold up nobody else
guard       ends the workers that a supervisor leaves behind when it is killed itself
hangs       whether the workers get on, by their signs of life
launch      becomes a worker's command
live        the live view: a line on the terminal, and metrics
logs        the workers' log files: one per worker over all restarts
memory      memory for the workers' snapshots: lent for a run
options     what `tfpreempt run` was asked to do, and what the workers are told of it
policy      what a supervisor does next, decided from what it has seen; no process
processes   worker processes: started in groups of their own, seen to end
reporter    what a supervisor tells: its journal, and its lines on the console
supervisor  the supervisor: one incarnation of the workers after the other

Imported by cli/journals, cli/status.
"""
