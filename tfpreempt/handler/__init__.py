"""4. One process: the only package where notice, agreement and commit meet.

activity            what this process does, for its supervisor; when a snapshot is due
collective_save     saves of all workers: in a round, or where all workers save
current_session     the one session of a process; notices while no handler listens
error_causes        causes of an error in a step: lost workers, failed data
exit                every exit: commit, loss, error, deadline, end of the interpreter
final_vote          the keys by which all workers end with 0, or all are restarted
handler             PreemptionCheckpointHandler: the object of a custom training loop
registration        how a handler or a fit registers with the session
restore_agreement   what all workers agree on first: one storage, one commit
run                 Run: one handler or fit, its counters, config and journal
session             the process's part in the agreement, which all its runs share
single_client       clusters in which this process alone runs the program
snapshots           saves into memory that outlives the process
status_file         writes every few seconds how far a run is
tensorflow_adapter  TensorFlow's errors, and its coordination service
training_end        the end: the last boundary, the final commit; an error in a step

Imported by cli, keras, states, tfpreempt.
"""
