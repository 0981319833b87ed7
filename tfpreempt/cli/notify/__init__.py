"""`tfpreempt notify`: fakes a notice for a running job, to rehearse a preemption.

command  the ways to give one: a signal, a notice file, a metadata server
server   a cloud's metadata server on this machine, which says what it is told to say
workers  finds the running worker of a directory, to signal it and nobody else

Imported by cli/demo.
"""
