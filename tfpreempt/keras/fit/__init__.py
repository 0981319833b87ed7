"""One `model.fit`: its loop, its phases, and the contents of a save.

epoch_end          the end of an epoch's training, held during the validation
fit_progress       the progress of a fit as a value; checks of a checkpoint
fit_state          the contents of a commit of a running fit: captures and restores
frame_lookup       finds the running `model.fit` on the stack of the main thread
held_values        earlier values of variables, held for a later save
keras3             `model.fit` of Keras 3 with the TensorFlow backend
phases             the phases of a fit under the callback, as a table
python_attributes  plain Python values of a model that its training changes
resume_plan        how a fit begins, given the checkpoint and the earlier fits
tf_keras           `model.fit` of tf_keras 2.x
traced_functions   the train and test functions of a model in a fit, and their traces
train_function     the replacement of `model.train_function`: each call is a step
training           a fit under the callback, from `on_train_begin` to `on_train_end`

Imported by no other package.
"""
