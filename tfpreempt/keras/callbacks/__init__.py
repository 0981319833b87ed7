"""The user's callbacks in a fit: checks them, saves and restores their state.

builtin_callbacks  the state of the callbacks of Keras 3 and tf_keras, class by class
callback_files     the log file of a CSVLogger: saves its text, and writes the text back
callback_list      the callbacks of a fit: checks them, and can stop calling them for a
                   step trained before a restart
callback_state     captures the state of the callbacks at a commit, and restores it

Imported by keras/data, keras/fit.
"""
