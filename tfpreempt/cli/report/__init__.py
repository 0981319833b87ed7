"""`tfpreempt report`: summarizes a run from its journals.

command        the command
goodput        divides the time of a run into the categories of Google's goodput
page           formats the report as an HTML page: a single file, without a script
plots          draws the plots of the HTML page, as SVG
process_spans  divides the time of every process into phases, on a shared clock
run_report     builds the report: interruptions, commits, restores, metrics
scalars        reads curves from TensorBoard's event files
view           formats the report: tables for people, an object for programs

Imported by cli/run, cli/status, tfpreempt.
"""
