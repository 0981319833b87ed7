"""`tfpreempt doctor`: checks the readiness of a machine for preemptions.

command         the command: runs the checks, and prints the findings
slurm_settings  asks scontrol whether Slurm would requeue the job
sources         checks every notice source of a config once
storage_check   measures the time of a trial save in a directory
verdict         derives the findings from the results of the checks, without I/O

Imported by cli/run.
"""
