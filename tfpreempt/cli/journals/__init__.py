"""The journals of a run: the one reader of them. May be imported by every command.

locate     finds the journal of a run that the user names, here or in a mirror
processes  processes of workers and starts by supervisors, made of the records
records    the events and fields of a journal, checked as they are read
tail       reads the files of a journal directory, once or as they grow

Imported by cli/demo, cli/doctor, cli/inspect, cli/report, cli/run, cli/status.
"""
