"""The agreement of all workers on the step at which they stop and save.

events       types of the agreement: state of a worker, events and actions
agreement    the agreement as a transition table: events in, actions out
coordinator  executes the agreement's actions: keys, waits, the flag
gate         counter and flag for the training loop at a boundary, without a lock
deadlines    the deadline of a process: stored, only ever shortened, acted on in time
gathering    collects a key of many workers: blocking reads, ended by an insert
keys         names of keys, and the text stored under the keys
runtime      executes reads, inserts and alarms in daemon threads
store        the interface of the key-value store used for the agreement
memory       a store in this process, for a single worker and for simulation
rendezvous   agrees on the plan of a start, before training

Imported by handler, testing.
"""
