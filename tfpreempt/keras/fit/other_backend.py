"""Resumes a fit of Keras 3 on JAX from a commit of TensorFlow, and the other way round.

Keras gives a variable the same path on both backends. A commit of JAX has the variables
under names with these paths; a commit of TensorFlow has a table with the key of each
name. So the arrays of the commit are read without the other framework, and assigned by
name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tfpreempt import errors
from tfpreempt.checkpoint.state import array_contents
from tfpreempt.checkpoint.state.random_state import GlobalRngState
from tfpreempt.core import frameworks
from tfpreempt.handler.run import Run
from tfpreempt.keras.fit.fit_progress import BACKENDS, Progress
from tfpreempt.keras.fit_protocol import Fit, FitVariables
from tfpreempt.keras.fit_record import EncodedValue

log = logging.getLogger(__name__)

KEYS = "keys"
"""Name of the value with the table, in the values that are equal on every worker."""

_COUNTERS = {"checkpointed_runs", "save_counter"}


def crosses(progress: Progress, fit: Fit) -> bool:
    """Returns whether the commit with a `Progress` is of the other backend."""
    saved = progress.made_of.get("keras")
    return saved != fit.line and {saved, fit.line} <= BACKENDS.keys()


class OtherBackend:
    """The commit of a run, if the other backend of Keras 3 has written the commit.

    Args:
        fit: the fit that resumes.
        run: run of the fit.
        shared: values in the commit that are equal on every worker.
        own: values of this worker; None if the commit has no such values.

    Attributes:
        ignores_tensorflow: whether the generators of TensorFlow are not restored.

    Raises:
        CheckpointMismatchError: this fit cannot resume from the commit.
    """

    def __init__(
        self,
        fit: Fit,
        run: Run,
        shared: Mapping[str, EncodedValue],
        own: Mapping[str, EncodedValue] | None,
    ) -> None:
        assert run.candidate is not None
        assert run.candidate.manifest is not None
        self._fit = fit
        self._commit = run.candidate
        self._here = BACKENDS[fit.line]
        self._there = next(each for each in BACKENDS.values() if each != self._here)
        # A program on JAX that has not imported TensorFlow does not use TensorFlow's
        # generators.
        self.ignores_tensorflow = not frameworks.is_imported("tensorflow")
        if isinstance(generators := run.source.random_state, GlobalRngState):
            generators.ignores_tensorflow = self.ignores_tensorflow
        workers = run.candidate.manifest.world_size, run.directory.cluster.num_workers
        is_single = own is not None and max(own["replicas"].value(), default=0) < 2
        if workers != (1, 1) or not is_single:
            raise self._refusal(
                "it was written by several processes or devices, or this fit uses "
                "several; expected a single process with a single device"
            )
        self._keys: Mapping[str, str]
        if self._there == "JAX":
            self._keys = {name: name for name, _ in shared["variables"].value()}
        elif KEYS in shared:
            self._keys = shared[KEYS].value()
        else:
            raise self._refusal(
                "it was written by an earlier version of tfpreempt, without the names "
                "of the variables. First resume on TensorFlow until the next commit"
            )

    def _refusal(self, why: str) -> errors.CheckpointMismatchError:
        return errors.CheckpointMismatchError(
            f"{self._commit.path!r} was written by Keras on {self._there}, and Keras "
            f"runs on {self._here} here. The commit cannot be restored here: {why}. "
            f"Set KERAS_BACKEND={self._there.lower()}, or use another checkpoint "
            "directory."
        )

    def assign(self, prefix: str, variables: FitVariables) -> None:
        """Assigns the variables of the commit, and logs a warning that names the values
        which are not restored.

        Args:
            prefix: path prefix of the commit's files.
            variables: the variables of the fit.

        Raises:
            CheckpointMismatchError: the commit is of another model, or this fit uses
                several devices; nothing was assigned.
            CheckpointCorruptedError: the files cannot be read.
        """
        if any(len(each.parts) > 1 for each in variables.of_worker()):
            raise self._refusal("this fit uses several devices; expected one device")
        arrays = {
            **array_contents.read(prefix)[0],
            **array_contents.read_worker_values(self._commit),
        }
        variables.assign_named(
            list(self._keys),
            {name: arrays[key] for name, key in self._keys.items() if key in arrays},
        )
        unknown = arrays.keys() - self._keys.values()
        self._warn({key.partition("/.ATTRIBUTES/")[0] for key in unknown} - _COUNTERS)

    def _warn(self, unknown: set[str]) -> None:
        left = ["random numbers: the seeds are restored, but give other numbers here"]
        if self._fit.array_way is not None and self._fit.arguments["shuffle"]:
            left.append("the order of the samples in later epochs")
        if self.ignores_tensorflow:
            left.append("the random generators of TensorFlow")
        if unknown:
            left.append(f"variables unknown to Keras: {', '.join(sorted(unknown))}")
        log.warning(
            "%s was written by Keras on %s, and this run continues on %s. Weights, "
            "optimizer, metrics, seeds and position are restored; from here on, "
            "results differ from a run on a single backend in rounding. Not carried "
            "over: %s.",
            self._commit.path,
            self._there,
            self._here,
            "; ".join(left),
        )
