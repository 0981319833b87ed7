"""Station 4 of the path: one process's life, where notice, agreement and commit meet.

commits          what a handler's user sees of its commits, here and in the object store
exit             the way out of the process: by a commit, a loss, an error, a deadline
handler          preemptionCheckpointHandler: what a custom training loop holds
interrupts       ctrl-C waits for the save that is under way
member           what one handler keeps: its checkpoint, its step, its journal
participant      what the session needs of a handler
process_end      the end of a process: with its code, whatever holds it up
raised           an error leaves a step or the loop: peers are told
reading          whether an error comes of data that could not be read
remote_cluster   single-client clusters: this process alone runs the program
saving           saves that need no agreement
session          one process's part in the agreement, shared by all handlers in it
start            how a handler starts: one storage, one commit to restore
tensorflow_side  what the handler needs of TensorFlow beside the checkpoint
watching         what a handler listens to: the config's sources
"""
