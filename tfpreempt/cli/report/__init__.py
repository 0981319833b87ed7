"""`tfpreempt report`: what happened to a run, by its journals.

command        the command
goodput        where the time went, in the words of Google's ml-goodput-measurement
page           the report as a page: one file, without a script
plots          plots of the report, as SVG whose colours follow the page
process_spans  lifetimes of processes and their phases, on one clock
run_report     the run as a whole: interruptions, commits, restores, metrics
scalars        curves from TensorBoard's event files
view           the report for people, in tables; and for programs, as an object

Imported by no other package.
"""
