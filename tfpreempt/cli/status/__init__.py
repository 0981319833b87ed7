"""`tfpreempt status`, and code shared with the live view of `tfpreempt run`.

command      the command
metrics      the state of a run as metrics for Prometheus: scraped, or in a file
read_status  reads the state of a run from its journals and status files
run_status   builds the state of a run from the records; no file, no clock
text         formats the state of a run: a table, a line, or JSON

Imported by cli/report, cli/run.
"""
