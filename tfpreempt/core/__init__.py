"""What every room stands on; it knows of no notice, no commit and no TensorFlow.

arguments   checks of arguments that several public classes take
clock       time as an argument
cluster     who the workers are, and which of them this process is
contained   opens files below a directory, and follows no link out of the directory
deadline    arithmetic of deadlines
events      the frozen values that travel the path
frameworks  the adapters of the frameworks that a program computes with
fields      what a value may be that is read from a file of others
journal     the record of what happened, one JSON object a line
life        signs of life: how a worker tells its supervisor that it gets on
loading     public names that are loaded on first use
memory      memory for snapshots, which whoever supervises a program lends
progress    a progress bar for bytes, on a terminal
python      what Python 3.10 lacks of the later versions
reach       what Python objects hold
restarts    how often this run was started again
scratch     where a run trains whose checkpoint directory is a URL
seams       every private name of TensorFlow and Keras that we take, checked once
threads     threads with an owner, jobs in many, calls with an end

Imported by checkpoint, cli, coordination, data, handler, keras, notice, platforms,
states, storage, testing, tfpreempt.
"""
