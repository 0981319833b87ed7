"""`tfpreempt simulate`: simulates a preemption of a running job.

command  the command: gives a notice by a signal, a file or a metadata server
server   simulates the metadata server of a cloud on this machine
workers  finds the running workers of a checkpoint directory, and signals them

Imported by cli/demo.
"""
