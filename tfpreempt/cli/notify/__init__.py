"""`tfpreempt notify`: fakes a notice for a running job, to rehearse a preemption.

command  the ways to give a notice: a signal, a file, a metadata server
follow   what a running job makes of a notice, read from its journal as it is written
server   a cloud's metadata server on this machine, which says what it is told to say
workers  finds the running worker of a directory, to signal it and nobody else
"""
