"""The other callbacks of a fit: saves and restores their state.

builtin_callbacks  the state of the callbacks of Keras 3 and tf_keras, class by class
callback_files     the file of a CSVLogger: the whole text is saved, and written back on
                   restore
callback_list      the other callbacks: checked before training begins, held back at
                   times
callback_state     the state of the other callbacks of a fit: captured at a commit

Imported by keras/data, keras/fit.
"""
