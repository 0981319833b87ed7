"""The agreement of all workers on the step at which they stop and save.

coordinator      executes the agreement's actions: keys, waits, the flag
deadlines        the deadline of a process: stored, only ever shortened, acted on in
                 time
in_memory_store  a store in this process, for a single worker and for simulation
key_gather       collects a key of many workers: blocking reads, ended by an insert
key_value_store  the interface of the key-value store used for the agreement
keys             names of keys, and the text stored under the keys
protocol_types   types of the agreement: state of a worker, events and actions
rendezvous       agrees on the plan of a start, before training
state_machine    the agreement as a transition table: events in, actions out
step_flag        counter and flag for the training loop at a boundary, without a lock
store_executor   executes reads, inserts and alarms in daemon threads

Imported by handler, testing.
"""
