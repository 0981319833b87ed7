"""Opens a directory: finds, verifies and restores a commit, and saves a new commit.

checkpoint_directory  Directory: the commits that exist and stay, and new commits
external_checkpoints  checkpoints of other programs among the commits
handle                Checkpoint: a reference to one checkpoint, for users
inspection            the tables of `tfpreempt inspect` and `tfpreempt verify`
opening               opens a Directory with the contents that a program saves
reshard               restores the parts of another number of workers
restore               finds the newest commit that is intact
save                  Save: one worker's part of one save, in four phases; AsyncSave
state_loader          loads one State from the newest commit, or from a separate file
verification          compares the files of a commit with its manifest

Imported by cli, handler, keras, states, tfpreempt.
"""
