"""Station 2: which step does everyone stop at?

events       the words of the agreement: what a worker knows, what it is told
agreement    the agreement on a step, as a table: events in, actions out
coordinator  performs the agreement's actions: keys, waits, the flag
gate         what the training loop touches at a boundary: a counter and a flag, no lock
deadlines    by when all must be over: kept, only ever shortened, acted on in time
gathering    one key of many workers: blocking reads, ended by inserting
keys         names of keys, and the text that they hold
runtime      reads, inserts and alarms, by threads that nobody joins
store        the interface of the key-value store that workers agree through
memory       a store in this process: for one worker alone, and for simulation
rendezvous   before training: all workers start from the same plan

Imported by handler, testing.
"""
