"""One `model.fit`: its loop, its phases, and what a save takes of it.

attributes      plain Python values of a model that its training changes: counts
capture         what a save takes of a running fit: its progress, its variables
fit_handler     the handler inside `model.fit`: it restores when the fit is ready for it
keras3          `model.fit` of Keras 3 with the TensorFlow backend
lookup          finds the `model.fit` that runs, on the stack of the main thread
plan            what a fit has to do, given the checkpoint and the fits before it
progress        how far a fit is, as a frozen value, and whether a checkpoint fits a fit
rounds          which fit of a program this is
schedule        when to commit without a notice: `save_freq` in terms of train steps
settings        what the user of the callback asked for, checked
snapshot        the state of a fit as two named States: what all workers share
tally           counts of one fit: batches of the epoch and of the iterator
tf_keras        `model.fit` of tf_keras 2.x
train_function  what stands in for `model.train_function`
training        one fit under the callback, from `on_train_begin` to `on_train_end`
variables       variables that a tf.train.Checkpoint of the model does not hold
"""
