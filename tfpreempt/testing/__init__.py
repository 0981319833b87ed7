"""Public fakes for tests of programs that use tfpreempt.

_loopback          what all fake servers share: a port of the loopback interface
clock              a clock that stands still until a test moves it
gcs/               a server of Google Cloud Storage on the loopback interface
metadata/          metadata servers on the loopback interface that behave as the
notice             a source of notices that says what a test tells it to say
storage            fakes for what checkpoints are written to
store              a key-value store that fails, or takes its time, where the test says
"""
