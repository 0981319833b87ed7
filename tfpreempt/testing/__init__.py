"""Public fakes for tests of programs that use tfpreempt."""
