"""The base of every package; independent of notices, commits and TensorFlow.

arguments          checks of arguments that several public classes take
clock              time as an argument
cluster            the workers, and the index of this process among the workers
compat             features of later Python versions for Python 3.10
contained          opens files inside a directory, and refuses symbolic links, pipes
                   and devices there
deadline           arithmetic of deadlines
error_causes       causes of an error in a step: lost workers, failed data
events             the events of a run: notice, decision, commit, exit, restore
frameworks         the adapters of the frameworks that a program computes with
heartbeat          heartbeats: a worker reports its progress to its supervisor
journal            the record of events, one JSON object per line
lazy_import        public names that are loaded on first use
log_output         the log lines on stderr in programs that do not configure logging
object_graph       visits the objects reachable from Python objects
private_api        the private names of TensorFlow and Keras in use, checked once
progress_bar       a progress bar for bytes, on a terminal
reachable_values   the values that functions of the program can reach
record_validation  validation of values read from files of other users
replay             repeats steps of a run in a copy of the checkpoint directory
restarts           the number of restarts of this run
scratch            the local directory of a run whose checkpoint directory is a URL
snapshot_memory    memory for snapshots, which the supervisor provides for a program
source_code        the values that functions update, by their source code
threads            threads with an owner, jobs in many threads, calls with a timeout

Imported by checkpoint, cli, coordination, data, handler, jax, keras, notice, platforms,
states, storage, testing, tfpreempt.
"""
