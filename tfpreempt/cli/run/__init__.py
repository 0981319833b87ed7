"""`tfpreempt run`: supervises training, and restarts it after preemptions.

command              the command: parses and checks the options
console              console output in threads, so that a slow console delays nothing
exec_with_pdeathsig  starts a worker's command, and makes the kernel send SIGTERM to the
                     worker if the supervisor ends
hang_detector        detects workers without progress, from their heartbeats
live_view            shows the state of the run on the terminal and as metrics
logs                 the workers' log files: one per worker over all restarts
options              the options of `tfpreempt run`, and the environment of the workers
orphan_reaper        ends the workers if the supervisor is killed
reporter             writes the supervisor's events to the journal and the console
restart_policy       decides the supervisor's next action, without executing actions
snapshot_space       reserves memory for the workers' snapshots during the run
supervisor           the supervisor: starts all workers, waits, restarts them
tf_config            chooses free ports, and makes the TF_CONFIG of local workers
worker_group         starts and ends the worker processes

Imported by cli/journals, cli/report, cli/status.
"""
