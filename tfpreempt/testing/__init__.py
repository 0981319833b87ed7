"""Public fakes for tests of programs that use tfpreempt.

clock      a clock that a test advances by hand
notice     a source of notices that a test fires
store      a key-value store that fails, or is slow, on request of the test
metadata/  the clouds' metadata servers
_server    base of the fake servers: requests, replies, and failures on demand

Imported by cli, testing/metadata.
"""
