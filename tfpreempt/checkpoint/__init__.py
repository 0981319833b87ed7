"""Station 3 of the path: make a step durable, and find it again.

bundle          is a TensorFlow checkpoint that has no manifest complete?
bundle_reader   large tensors in a restore, read by many threads
bundle_table    the index of a TensorFlow checkpoint, read and written
bundle_writer   large tensors beside what TensorFlow writes, by many threads
cache           copies of remote checkpoints that all processes of a machine share
cache_files     checks the files of Dataset.cache(path) before a restore
catalog         one value for each checkpoint, wherever it lies; one scan, one order
collective_read  the read that all workers take part in when they save
commit          files made durable, manifest, one rename, and the marker last
contents        what TensorFlow or a save_fn writes of a checkpoint: the interface
data_order      fingerprints of the order of training data, compared by a restore
directory       which commits exist, who may add one, which ones stay; the restore
directory_identity  is the checkpoint directory still the storage of the start?
large_tensors   the large tensors of a save, taken out of what TensorFlow writes
encoding        Python and NumPy values as JSON and raw bytes, bit for bit
fence           the lease of a directory on its disk, and what it fences
flat            commits of checkpoints that stay flat
foreign         checkpoints that somebody else wrote, among ours in a directory
handle          Checkpoint: a reference to one checkpoint, for users
head            has another run committed meanwhile? the parent of the next commit
holder          who holds a lease, and does that process live?
inspection      what `tfpreempt inspect` and `tfpreempt verify` show of the catalog
iterator_state  positions in tf.data pipelines: states of dataset iterators
layout          what lies where in a checkpoint directory
lease           one run, one directory: taken, waited for, renewed, lost
locks           one process of a machine at a time, on a file or a directory
lookup          what lies at the place that a handle names
manifest        the manifest of a commit: its files, their sizes and checksums
metadata        what users note about a checkpoint, beside its manifest
opening         opens the checkpoint directory for what a user gave to a handler
patience        how long a start waits for a lease that another process has
per_replica     variables of which each worker saves what its own replicas hold
pointer         TensorFlow's `checkpoint` state file
random_state    the random generators of a process, each worker's own
reader          what TensorFlow does in a restore, once the structure was compared
remote/         the copy of a checkpoint directory in an object store
resized         what another number of workers saved, for those that there are now
restore         which checkpoint to restore: the newest that is committed and verified
retention       deletes what is no longer wanted
save            one worker's part of one save: capture, write, publish, discard
shares          large tensors dealt out evenly, to workers and to threads
shuffle_seeds   adds to an iterator's state the seeds that its shuffles have drawn
state           a named thing that is saved with the step
state_file      one State in a file of its own, outside of any commit
state_loader    finds what one State was: in the newest commit, or in a file of its own
step_inspection  finds the objects that a step reaches and the numbers that it updates
structure       does a checkpoint fit the objects it is to be restored into?
tensor_contents  the contents of a tf.train.Checkpoint, in one of three forms
unfinished_caches  which files of an unfinished Dataset.cache(path) may be deleted
unsaved_state_check  names state that a step changes and no commit holds
tensorflow_generators   the random generators of TensorFlow and Keras
tensorflow_values       values of TensorFlow's objects that a step changes
untracked       what the objects of a Checkpoint hold, and TensorFlow does not track
variables       the variables behind a tf.train.Checkpoint, found without a read
verification    are the files of a commit what its manifest says?
worker_parts    large tensors that all workers hold: each writes a share of them
"""
