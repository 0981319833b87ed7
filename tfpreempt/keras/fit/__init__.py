"""One `model.fit`: its loop, its phases, and what a save takes of it.

attributes        plain Python values of a model that its training changes
epoch_end         the end of an epoch's training, held while the validation follows
held_values       values that variables had earlier, for a save that is made later
keras3            `model.fit` of Keras 3 with the TensorFlow backend
lookup            finds the `model.fit` that runs, on the stack of the main thread
phases            the phases of a fit under the callback, as a table
plan              how a fit begins, given the checkpoint and the fits before it
progress          how far a fit is, as a value, and whether a checkpoint fits a fit
state             what a commit holds of a running fit: taken, and put back
steps             what stands in for `model.train_function`: its calls are the steps
tf_keras          `model.fit` of tf_keras 2.x
traced_functions  the train and test functions of a model in a fit, and their traces
training          one fit under the callback, from `on_train_begin` to `on_train_end`

Imported by no other package.
"""
