"""4. One process: the only package that combines notice, agreement and commit.

activity            heartbeat, hang detection and step time; schedule of snapshots
collective_save     saves of all workers: in a round, or at an agreed point
current_session     the one session of a process; notices while no handler listens
error_causes        causes of an error in a step: lost workers, failed data
exit                every exit: commit, loss, error, deadline, end of the interpreter
final_vote          the keys by which all workers end with 0, or all are restarted
handler             PreemptionCheckpointHandler: the object of a custom training loop
registration        how a handler or a fit registers with the session
restore_agreement   the agreement at the start: one storage, one commit
run                 Run: one handler or fit, its counters, config and journal
session             the process's part in the agreement, shared by its runs
single_client       clusters in which this process alone runs the program
snapshots           saves into memory that outlives the process
status_file         writes the progress of a run to a file every few seconds
tensorflow_adapter  TensorFlow's errors, and its coordination service
training_end        the end: the last boundary, the final commit; an error in a step

Imported by cli, keras, states, tfpreempt.
"""
