"""`tfpreempt notify`: fakes a notice for a running job, to rehearse a preemption.

command  `tfpreempt notify`: fakes a notice for a running job, to rehearse a preemption
follow   what a running job makes of a notice, read from its journal as it is written
hold     a wait that ends by a signal too, so that what was put up is taken back
server   a cloud's metadata server on this machine, which says what it is told to say
workers  finds the running worker of a directory, to signal it and nobody else
"""
