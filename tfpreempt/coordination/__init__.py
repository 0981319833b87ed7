"""The agreement of all workers on the step at which they stop and save.

coordinator      executes the agreement's actions: inserts keys, reads keys, sets the
                 flag
deadlines        the deadline of a process, and the actions shortly before the deadline
in_memory_store  a key-value store in this process, for a single worker and for tests
key_gather       reads one key from every of many workers, with an end for missing keys
key_value_store  the interfaces of the agreement's key-value store, and of its service
keys             names of keys, and the text stored under the keys
protocol_types   types of the agreement: state of a worker, events and actions
rendezvous       lets all workers start from the same plan, before training
state_machine    the agreement as a transition table: events in, actions out
step_flag        the flag that stops the training loop, and the loop's step counter,
                 without a lock
store_executor   executes reads, inserts and alarms in daemon threads

Imported by handler.
"""
