"""Fakes for tests of programs that use tfpreempt. Public.

notice     a notice source that a test controls
metadata/  fake metadata servers of the clouds
_server    base class of the fake servers, which a test can make fail

Imported by cli, testing/metadata.
"""
