"""Station 2: which step does everyone stop at?

agreement    the agreement on a step, as a table: events in, actions out
coordinator  performs the agreement's actions: keys, waits
deadlines    the deadline of this process: kept, only ever shortened
events       the words of the agreement: what a worker knows, what it is told
gate         what the training loop touches at a boundary: a counter and a flag, no lock
gathering    collecting one key of many workers: blocking reads, ended by inserting
keys         key names and the text that keys hold
memory       a store in this process: for one worker alone, and for simulation
rendezvous   before training: all workers start from the same plan
runtime      how the coordinator's reads, writes and alarms happen: the protocol
store        the key-value store that workers agree through
tf_service   the store of TensorFlow's coordination service
"""
