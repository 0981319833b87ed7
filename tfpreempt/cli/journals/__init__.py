"""The only reader of the journals of a run. Every command may import this package.

locate     finds the journal of a run named by the user, here or in a mirror
processes  trainings of workers and starts by supervisors, built from the records
records    the events and fields of a journal, checked while reading
tail       reads the files of a journal directory, once or as they grow

Imported by cli/demo, cli/doctor, cli/inspect, cli/report, cli/run, cli/status.
"""
