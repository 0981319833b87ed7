"""`tfpreempt status`: shows the live status of a run; `tfpreempt run` uses it, too.

command      the command
metrics      exports the state of a run as metrics for Prometheus
read_status  reads the state of a run from its journals and status files
run_status   computes the state of a run from records, without files and clocks
text         formats the state of a run: a table, a line, or JSON

Imported by cli/probe, cli/report, cli/run.
"""
