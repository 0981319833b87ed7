"""Commits on their way to an object store and back."""
