"""4. One process's life: the only room where notice, agreement and commit meet.

handler          PreemptionCheckpointHandler: what a custom training loop holds
admission        how a handler, or a fit, becomes a member of the session
start            what all workers agree on first: one storage, one commit to restore
member           one handler, or fit: its steps, its journal
commits          what a member saves, restores and has copied
members          the open ones of a process
session          the process's part in the agreement, which all its members share
round_save       the save of a round: stage, and on the chief the marker
saving           saves without a notice, to which all workers come at the same place
exit             every way out: commit, loss, error, deadline, the interpreter's end
process_end      the end of a process with its code, whatever holds it up
step_errors      an error in a step: a preemption, or one that peers are told of
data_errors      whether an error comes of data that could not be read
interrupts       Ctrl-C waits for the save that is under way
watching         what is listened to: the config's sources, and TensorFlow's own key
remote_cluster   single-client clusters: this process alone runs the program
"""
