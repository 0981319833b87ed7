"""One `model.fit`: its loop, its phases, and the contents of a save.

epoch_end          the state after an epoch's last step, kept during the validation
fit_progress       the progress of a fit as a value; compares a checkpoint with a fit
fit_state          the contents of a commit of a running fit: captures and restores
frame_lookup       finds the running `model.fit` on the stack of the main thread
other_backend      restores on JAX a commit of TensorFlow, and the other way round
phases             the phases of a fit under the callback, as a table
python_attributes  attributes of a model with plain Python values that training changes
resume_plan        how a fit begins, given the checkpoint and the earlier fits
traced_functions   the train and test functions of a model in a fit, and their traces
train_function     replaces `model.train_function`, to count the steps of a fit
training           a fit under the callback, from `on_train_begin` to `on_train_end`
unsaved_state      warns of values that a fit changes and that no commit holds

Imported by no other package.
"""
