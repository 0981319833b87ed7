"""Fakes for tests of programs that use tfpreempt. Public.

clock      a clock that a test advances by hand
notice     a source whose notices are given by the test
store      a key-value store with injected faults
metadata/  fake metadata servers of the clouds
_server    base class of the fake servers, with injected faults

Imported by cli, testing/metadata.
"""
