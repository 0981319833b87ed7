"""One `model.fit`: its loop, its phases, and what a save takes of it.

attributes      plain Python values of a model that its training changes
counter         the batches of one fit, in the epoch and from the iterator
earlier_fits    the fits of this process that came to their end, by directory
fit_handler     the handler inside `model.fit`: it restores when the fit is ready for it
keras3          `model.fit` of Keras 3 with the TensorFlow backend
lookup          finds the `model.fit` that runs, on the stack of the main thread
once            a method of one object that is another one for the next call
options         what the user of the callback asked for, checked
phases          the phases of a fit under the callback, as a table
plan            how a fit begins, given the checkpoint and the fits before it
progress        how far a fit is, as a frozen value, and whether a checkpoint fits a fit
schedule        when to commit without a notice: `save_freq` in terms of train steps
snapshot        the state of a fit as two named States, as they are written
state           what a commit holds of a running fit: taken, and put back
tf_keras        `model.fit` of tf_keras 2.x
train_function  what stands in for `model.train_function`
training        one fit under the callback, from `on_train_begin` to `on_train_end`
variables       variables that a tf.train.Checkpoint of the model does not hold
"""
