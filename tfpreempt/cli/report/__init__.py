"""`tfpreempt report`: what happened to a run, from its journals.

command        the command
goodput        the use of time, in the classes of Google's ml-goodput-measurement
page           the report as an HTML page: a single file, without a script
plots          plots of the report, as SVG in the colours of the page
process_spans  lifetimes of processes and their phases, on a shared clock
run_report     the whole run: interruptions, commits, restores, metrics
scalars        curves from TensorBoard's event files
view           formats the report: tables for people, an object for programs

Imported by no other package.
"""
