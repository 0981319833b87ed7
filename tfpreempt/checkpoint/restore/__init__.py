"""Opens a directory: finds, verifies and restores a commit, and saves a new commit.

checkpoint_directory  Directory: finds, restores and deletes the commits of a directory
external_checkpoints  finds checkpoints that were written without tfpreempt
handle                Checkpoint: a reference to one checkpoint, for users
inspection            the tables of `tfpreempt inspect` and `tfpreempt verify`
opening               opens a Directory for the checkpoint or manager of a program
reshard               restores a commit that another number of workers wrote
restore               finds the newest commit that is intact
save                  Save: writes a commit, on each worker, in four phases; AsyncSave
state_loader          loads one State from the newest commit, or from a separate file
verification          compares the files of a commit with its manifest

Imported by cli, handler, keras, states, tfpreempt.
"""
