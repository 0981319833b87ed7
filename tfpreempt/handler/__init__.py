"""The session of a process: combines the notice, the agreement and the commit.

activity            heartbeat and hang detection; schedule of snapshots
bad_steps           BadSteps; records the bad steps of a run, and ends the process
collective_save     saves that need every worker: in a round, or at a common point
current_session     the one session of a process; notices while no handler listens
exit                every exit: commit, loss, error, deadline, end of the interpreter
final_vote          the vote after which all workers end with 0, or all are restarted
handler             PreemptionCheckpointHandler: the object of a custom training loop
registration        how a handler or a fit registers with the session
restore_agreement   the agreement at the start: the same storage, the same commit
run                 Run: counters, saves and journal of one handler or fit
session             Session: lets this process participate in the agreement
single_client       clusters in which this process alone runs the program
snapshots           saves into memory that outlives the process
status_file         writes the progress of a run to a file every few seconds
tensorflow_adapter  TensorFlow's errors, and its coordination service
training_end        the end of training: after the last step, or by an error in a step

Imported by cli, keras, states, tfpreempt.
"""
