"""Tests of the Keras integration."""
