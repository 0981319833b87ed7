"""The other callbacks of a fit: what they remember, kept and given back.

files   the file of a CSVLogger: its whole text is kept, and written back on restore
known   what the callbacks of Keras 3 and tf_keras remember, class by class
others  the other callbacks: checked before the training begins, held back at times
state   the state of the other callbacks of a fit: captured at a commit

Imported by keras/data, keras/fit.
"""
