"""Reads the journals of a run, for all commands.

locate     finds the journal of a run, on this machine or in a mirror
processes  groups the records into worker runs and supervisor runs
records    parses and validates the records of a journal
tail       reads the files of a journal directory, once or as they grow

Imported by cli/demo, cli/doctor, cli/inspect, cli/probe, cli/report, cli/run,
cli/status, tfpreempt.
"""
