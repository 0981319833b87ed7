"""`tfpreempt simulate`: simulates a preemption of a running job.

command  the ways to give a notice: a signal, a notice file, a metadata server
server   a simulated metadata server of a cloud on this machine
workers  finds the running worker of a directory, so that only it is signalled

Imported by cli/demo.
"""
