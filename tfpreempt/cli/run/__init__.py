"""`tfpreempt run`: training under supervision, through preemptions.

cluster     the cluster of the workers of a machine: free ports, and TF_CONFIG
command     the options on the command line, read and checked
console     console output by threads, so that a slow console delays nothing
guard       ends the remaining workers after the supervisor was killed
hangs       detects workers without progress, from their heartbeats
launch      replaces itself by a worker's command, and ties it to the supervisor
live        the live view: a line on the terminal, and metrics
logs        the workers' log files: one per worker over all restarts
memory      memory for the workers' snapshots, reserved for the run
options     the options of `tfpreempt run`, and the environment of the workers
policy      decides the supervisor's next action from its observations; no process
processes   worker processes, in groups of their own
reporter    the supervisor's journal, and its lines on the console
supervisor  the supervisor: one incarnation of the workers after the other

Imported by cli/journals, cli/status.
"""
