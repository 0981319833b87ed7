"""`tfpreempt status`, and what it has in common with the live view of `tfpreempt run`.

command  the command
follow   reads a run's journals as they grow, and what its workers say of themselves
metrics  a picture as metrics for Prometheus: scraped, or in a file
picture  what a run is at, from all that was read; no file, no clock
text     a picture for people, in a table or in one line; and as JSON
"""
