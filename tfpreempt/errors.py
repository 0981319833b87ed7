"""The exception classes of tfpreempt.

Every message names the value received, the value expected, and the action to take.
Errors of TensorFlow, the operating system and the standard library are translated into
these classes where the library is called, with the original error as the cause.
"""

from __future__ import annotations


class TfpreemptError(Exception):
    """Base class of every error raised by tfpreempt on purpose."""


# --- arguments and use ---------------------------------------------------------------


class ConfigurationError(TfpreemptError, ValueError):
    """An argument or environment variable has a value that cannot work."""


class UnsupportedVersionError(ConfigurationError):
    """The installed TensorFlow or Keras lacks a name needed by a feature."""


class TensorFlowMissingError(ConfigurationError, ImportError):
    """TensorFlow is not installed: the base install leaves the choice to the user."""


class UnsupportedClusterError(ConfigurationError, NotImplementedError):
    """The cluster has parameter servers, so its workers cannot stop at one step."""


class UsageError(TfpreemptError, RuntimeError):
    """A method was called at a time, or from code, where the call cannot work."""


class HandlerClosedError(UsageError):
    """A method of a closed handler was called."""


class NestedRunError(UsageError):
    """`run()` was entered inside `run()`."""


class NotMainThreadError(UsageError):
    """An object that watches signals was not created on the main thread."""


# --- coordination --------------------------------------------------------------------


class CoordinationError(TfpreemptError, RuntimeError):
    """The workers could not agree."""


class CoordinationServiceUnavailableError(CoordinationError):
    """The key-value store is unreachable, because its host process has ended."""


class KeyExistsError(CoordinationError):
    """The key was inserted before; the value of an insert-once key never changes."""


class PeerTimeoutError(CoordinationError, TimeoutError):
    """A wait for another worker reached its deadline."""


class WorkerMismatchError(CoordinationError):
    """Workers of the same incarnation differ in a value that must be equal."""


# --- checkpoints ---------------------------------------------------------------------


class CheckpointError(TfpreemptError, RuntimeError):
    """A checkpoint could not be written, found or read.

    Attributes:
        is_permanent: whether a retry is useless until a person fixes the cause, such as
            a missing bucket or a missing permission of the account.
    """

    is_permanent = False


class SaveError(CheckpointError):
    """A checkpoint could not be committed; older checkpoints are unchanged."""


class CollectiveReadError(SaveError):
    """A worker could not participate in the collective read of a save.

    The other workers are blocked in the read. The next collective of this worker would
    be taken for its part of the read, so training cannot continue.
    """


class DirectoryLockedError(CheckpointError):
    """The lease of the checkpoint directory is held by another running program."""

    is_permanent = True


class LeaseLostError(SaveError):
    """The process lost the lease of its directory, and can commit no longer."""

    is_permanent = True


class CheckpointCorruptedError(CheckpointError):
    """A file of a committed checkpoint is missing, truncated or changed (checksum)."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint belongs to another model, or to training data in another order."""


class StorageNotSharedError(CheckpointError):
    """The checkpoint directory is not the same storage for every worker."""


class DuplicateStateError(TfpreemptError, ValueError):
    """A State with this name is already registered."""


class BadStepsError(TfpreemptError, RuntimeError):
    """Training has more bad steps than `BadSteps.limit`, or cannot leave a step out."""


# --- notices -------------------------------------------------------------------------


class NoticeError(TfpreemptError, RuntimeError):
    """A notice source cannot work on this machine.

    The message never quotes a reply of a metadata server: metadata can contain
    passwords, and messages are logged.
    """
