"""`tfpreempt run`: training under supervision, through preemptions.

cluster      who the workers are: the local cluster's ports and TF_CONFIG
command      `tfpreempt run`: the options, read and checked
echo         what goes to the console, by threads that hold up nobody else
guard        ends the workers that a supervisor leaves behind when it is killed itself
incarnation  one start of all workers, followed to the end of the last one
launch       becomes a worker's command
logs         the workers' log files: one per worker over all restarts
policy       what a supervisor does next, decided from what it has seen; no process
processes    worker processes: started in groups of their own, seen to end
progress     what a run has gained: the step of its newest commit
record       what a supervisor tells: its journal, its lines on the console, its summary
settings     what `tfpreempt run` was asked to do, and what the workers are told of it
signals      signals as values that a select can wait for
supervisor   the supervisor: one incarnation of the workers after the other
"""
