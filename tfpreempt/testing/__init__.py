"""Public fakes for tests of programs that use tfpreempt.

_collectives       collectives of a simulated cluster
_loopback          what all fake servers share: a port of the loopback interface
_reports           what a simulated run says when it is over: frozen values
_simulated_store   an insert-once store with slow messages
_simulated_worker  one worker of a simulated cluster: the real coordinator
_timeline          virtual time: what happens next in a simulation
clock              a clock that stands still until a test moves it
cluster            a simulated cluster: real coordinators, virtual time
gcs/               a server of Google Cloud Storage on the loopback interface
metadata/          metadata servers on the loopback interface that behave as the
notice             a source of notices that says what a test tells it to say
storage            fakes for what checkpoints are written to
store              a key-value store that fails, or takes its time, where the test says
"""
