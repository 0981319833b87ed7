"""`tfpreempt doctor`: checks the readiness of a machine for preemptions.

command         the options, the checks, and the output
slurm_settings  asks scontrol whether Slurm would requeue the job
sources         probes every notice source of a config once
storage_check   tries a save in a directory: synced to the disk, timed, and removed
                again
verdict         derives the findings from the measured facts; no I/O of its own

Imported by cli/run.
"""
