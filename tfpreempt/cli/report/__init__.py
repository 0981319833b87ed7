"""`tfpreempt report`: the story of a run, told from its journals.

command     the command
records     what the story takes of a journal's records, checked
lives       each process's life, put in order by the clocks of its machine
spans       a life's phases: what a worker did in each moment of it
goodput     where the time went, in the words of Google's ml-goodput-measurement
story       the run as a whole: interruptions, commits, restores, metrics
scalars     curves from TensorBoard's event files
view        how a story looks: tables for people, an object for programs
plots       its plots, as SVG whose colours follow the page
page        its page: one file, without a script
"""
