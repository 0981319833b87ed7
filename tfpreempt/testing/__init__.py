"""Public fakes for tests of programs that use tfpreempt.

clock      a clock that stands still until a test moves it
notice     a source of notices that says what a test tells it to say
store      a key-value store that fails, or takes its time, where the test says
metadata/  the clouds' metadata servers
_server    what all fake servers are: requests, replies, and failures on demand

Imported by cli, testing/metadata.
"""
