"""The exception tree.

Every message says what was received, what was expected, and what to do. Errors of
TensorFlow, the operating system and the standard library are translated into these at
the edge where they are met, with the original as the cause.
"""

from __future__ import annotations


class TfpreemptError(Exception):
    """Base of every error that tfpreempt raises on purpose."""


# --- arguments and use ---------------------------------------------------------------


class ConfigurationError(TfpreemptError, ValueError):
    """An argument or environment variable has a value that cannot work."""


class UnsupportedVersionError(ConfigurationError):
    """An installed TensorFlow or Keras lacks a name that a feature rests on."""


class TensorFlowMissingError(ConfigurationError, ImportError):
    """TensorFlow is not installed: the base install leaves the choice to the user."""


class UnsupportedClusterError(ConfigurationError, NotImplementedError):
    """A cluster of a kind that cannot be preempted together (parameter servers)."""


class UsageError(TfpreemptError, RuntimeError):
    """A method was called at a moment or from a place where it cannot work."""


class HandlerClosedError(UsageError):
    """The handler was closed and is asked to go on."""


class NestedRunError(UsageError):
    """`run()` was entered inside `run()`."""


class NotMainThreadError(UsageError):
    """Signals can only be watched by an object made on the main thread."""


# --- coordination --------------------------------------------------------------------


class CoordinationError(TfpreemptError, RuntimeError):
    """The workers could not agree."""


class StoreGoneError(CoordinationError):
    """The key-value store cannot be reached any more (its host has ended)."""


class KeyExistsError(CoordinationError):
    """The key was inserted before; an insert-once key never changes its value."""


class WaitTimeoutError(CoordinationError, TimeoutError):
    """A wait for another worker ended at its deadline."""


class WorkersDisagreeError(CoordinationError):
    """Workers of one incarnation differ in something that must be equal."""


# --- checkpoints ---------------------------------------------------------------------


class CheckpointError(TfpreemptError, RuntimeError):
    """A checkpoint could not be written, found or read.

    Attributes:
        is_permanent: whether trying again is of no use before somebody mends it: the
            bucket is missing, or the account may not.
    """

    is_permanent = False


class SaveError(CheckpointError):
    """A checkpoint could not be committed; nothing older was touched."""


class CollectiveReadError(SaveError):
    """A worker could not take part in the read of a save that needs all workers.

    The others are in that read, and what this worker does together with them next would
    be taken for its part: training cannot go on.
    """


class DirectoryInUseError(CheckpointError):
    """Another program holds the lease of the checkpoint directory, and lives."""

    is_permanent = True


class LeaseLostError(SaveError):
    """This process lost the lease of its directory, and commits nothing any more."""

    is_permanent = True


class CheckpointDamagedError(CheckpointError):
    """A file of a committed checkpoint is missing, short or has another checksum."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is of another model, or of training data in another order."""


class DirectoryNotSharedError(CheckpointError):
    """The checkpoint directory is not the same storage for every worker."""


class DuplicateStateError(TfpreemptError, ValueError):
    """A State with this name is registered already."""


# --- notices -------------------------------------------------------------------------


class NoticeError(TfpreemptError, RuntimeError):
    """A notice source cannot work here.

    The message quotes nothing that a metadata server answered: metadata can hold
    passwords, and messages are logged.
    """
