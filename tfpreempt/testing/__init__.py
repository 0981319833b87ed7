"""Public fakes for tests of programs that use tfpreempt.

clock      a clock that stands still until a test moves it
notice     a source of notices that says what a test tells it to say
store      a key-value store that fails, or takes its time, where the test says
storage    fakes for what checkpoints are written to
metadata/  the clouds' metadata servers, and servers that are none
gcs/       a server of Google Cloud Storage
_server    what all fake servers are: requests, replies, and failures on demand
"""
