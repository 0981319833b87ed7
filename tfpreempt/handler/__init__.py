"""4. One process's life: the only room where notice, agreement and commit meet.

handler          PreemptionCheckpointHandler: what a custom training loop holds
admission        how a handler, or a fit, becomes a member: its start, its sources
start            what all workers agree on first: one storage, one commit to restore
run              a handler or a fit to the session: counters, saves, journal
now              how far a member is, told every few seconds for who looks on
protection       notices while no handler listens: before the first, after the last
this_process     the one session of a process, found; or a notice is kept for it
session          the process's part in the agreement, which all its members share
activity         what this process does, for its supervisor; how long a step takes
collective_save  saves of all workers: in a round, and at a place that all come to
async_save       one of these that is written and committed while training goes on
snapshots        a member's saves into memory that outlives the process
snapshot_scheduler  when the chief asks all for one, so that training does not notice
training_end     the end of training: the last boundary, the final commit, the close
final_vote       the keys by which all workers end with 0, or all are restarted
exit             every way out: commit, loss, error, deadline, the interpreter's end
process_end      the end of a process with its code, whatever holds it up
step_errors      an error in a step: a preemption, or one that peers are told of
tensorflow_errors  TensorFlow's errors: the end of data, the loss of a worker
lost_peers       which workers are gone, by what a collective has failed with
data_errors      whether an error comes of data that could not be read
interrupts       Ctrl-C waits for the save that is under way
remote_cluster   single-client clusters: this process alone runs the program
"""
