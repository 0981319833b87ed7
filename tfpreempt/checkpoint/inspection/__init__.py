"""What `tfpreempt inspect` and `tfpreempt verify` find out.

control_files     the marker and the manifest of whatever may be a commit
directory_survey  which checkpoints lie in a directory of this machine, whole or not
findings          what a look at checkpoints finds: one value for each
survey            which checkpoints lie somewhere, and are they whole
"""
