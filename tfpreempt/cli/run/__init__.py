"""`tfpreempt run`: training under supervision, through preemptions.

command              the options on the command line, read and checked
console              console output by threads, so that a slow console delays nothing
exec_with_pdeathsig  replaces itself by a worker's command, and ties it to the
                     supervisor
hang_detector        detects workers without progress, from their heartbeats
live_view            the live view: a line on the terminal, and metrics
logs                 the workers' log files: one per worker over all restarts
options              the options of `tfpreempt run`, and the environment of the workers
orphan_reaper        ends the remaining workers after the supervisor was killed
reporter             the supervisor's journal, and its lines on the console
restart_policy       decides the supervisor's next action from its observations; no
                     process
snapshot_space       memory for the workers' snapshots, reserved for the run
supervisor           the supervisor: one incarnation of the workers after the other
tf_config            the cluster of the workers of a machine: free ports, and TF_CONFIG
worker_group         worker processes, in groups of their own

Imported by cli/journals, cli/status.
"""
