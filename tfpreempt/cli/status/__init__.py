"""`tfpreempt status`, and what it has in common with the live view of `tfpreempt run`.

command      the command
metrics      the state of a run as metrics for Prometheus: scraped, or in a file
read_status  reads the state of a run from its journals and status files
run_status   the state of a run, made of all that was read; no file, no clock
text         the state of a run for people, in a table or in one line; and as JSON

Imported by cli/report, cli/run.
"""
