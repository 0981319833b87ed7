"""One `model.fit`: its loop, its phases, and what a save takes of it.

epoch_end          the end of an epoch's training, held while the validation follows
fit_progress       how far a fit is, as a value, and whether a checkpoint fits a fit
fit_state          what a commit holds of a running fit: taken, and put back
frame_lookup       finds the `model.fit` that runs, on the stack of the main thread
held_values        values that variables had earlier, for a save that is made later
keras3             `model.fit` of Keras 3 with the TensorFlow backend
phases             the phases of a fit under the callback, as a table
python_attributes  plain Python values of a model that its training changes
resume_plan        how a fit begins, given the checkpoint and the fits before it
tf_keras           `model.fit` of tf_keras 2.x
traced_functions   the train and test functions of a model in a fit, and their traces
train_function     what stands in for `model.train_function`: its calls are the steps
training           one fit under the callback, from `on_train_begin` to `on_train_end`

Imported by no other package.
"""
