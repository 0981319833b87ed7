"""What a commit holds of a running fit besides the Checkpoint: taken, and put back.

Everything is taken and put back at the same points of the program, so that what Keras
and other callbacks did on the way there is undone:

- before a train step (`TrainFunction`), where a commit usually happens;
- at the beginning of a validation, which a restart repeats from there, because notices
  must be served while it runs;
- at the end, after every other callback's `on_train_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpreempt.checkpoint import per_replica
from tfpreempt.handler.member import Member
from tfpreempt.keras.callbacks import state
from tfpreempt.keras.callbacks.others import OtherCallbacks
from tfpreempt.keras.data.position import Position
from tfpreempt.keras.data.training_data import TrainingData
from tfpreempt.keras.fit import progress, snapshot, variables
from tfpreempt.keras.fit.attributes import Attributes
from tfpreempt.keras.fit.progress import Progress
from tfpreempt.keras.interface import Fit


class FitState:
    """See above. Main thread.

    Args:
        fit: the fit.
        others: its other callbacks.
        data: its data.
        take_shared: what a save writes for all workers.
        take_own: what it writes for this one.

    Attributes:
        checkpoint: what a save writes besides.
    """

    def __init__(
        self,
        fit: Fit,
        others: OtherCallbacks,
        data: TrainingData,
        *,
        take_shared: Callable[[], snapshot.Shared],
        take_own: Callable[[], snapshot.Own],
    ) -> None:
        self._fit = fit
        self._others = others
        self._data = data
        self._attributes = Attributes(fit.model)
        self._shared = snapshot.SharedState(take_shared)
        self._own = snapshot.OwnState(take_own)
        self.checkpoint = variables.checkpoint_of(fit.model)

    @property
    def shared(self) -> snapshot.Shared | None:
        """What the commit holds that the workers agreed on."""
        return self._shared.loaded

    @property
    def own(self) -> snapshot.Own | None:
        """Its part of this worker; None also where it has none."""
        return self._own.loaded

    @property
    def saved(self) -> Progress:
        """Of a commit that is there."""
        assert self._shared.loaded is not None
        return self._shared.loaded.progress

    def close(self) -> None:
        """Nothing is saved any more."""
        self._shared.unregister()
        self._own.unregister()

    # --- what a save takes -----------------------------------------------------------

    def take_shared(self, reached: Progress) -> snapshot.Shared:
        """What all workers have in common."""
        self._fit.settle()
        return snapshot.Shared(
            progress=reached,
            variables=variables.looks(self._variables()),
            callbacks=state.capture(self._others.callbacks, leaves_out=True),
        )

    def take_own(
        self, position: Position | None, *, is_validated: bool = False
    ) -> snapshot.Own:
        """What is this worker's.

        Args:
            position: in its data.
            is_validated: whether a validation begins, which changes variables.
        """
        now = self._variables()
        kept = per_replica.read(now) if is_validated else (None, ())
        return snapshot.Own(
            random=snapshot.random_bytes(),
            files=state.capture_files(self._others.callbacks),
            attributes=self._attributes.capture(),
            replicas=variables.replicas(now),
            position=position,
            variables=kept[0],
            values=tuple(kept[1]),
        )

    # --- before the first step -------------------------------------------------------

    def build(self, iterator: Any, train_function: Any) -> None:
        """Makes all variables. What a trace does to Python values is done once."""
        if hasattr(train_function, "get_concrete_function"):  # it is traced for good
            self._attributes.traced_by(self._fit.build, iterator, train_function)
            return
        with self._attributes.put_back():
            self._fit.build(iterator, train_function)

    def first_call(self, train_function: Any, iterator: Any) -> Any:
        """Calls the train function, which may trace it."""
        return self._attributes.traced_by(train_function, iterator)

    # --- the restart -----------------------------------------------------------------

    def restore_variables(self, member: Member, directory: str) -> None:
        """Those of the Checkpoint, this worker's own, and what the model has in Python.

        Args:
            member: restores the Checkpoint.
            directory: for messages.

        Raises:
            CheckpointMismatchError: another model's; nothing was assigned.
        """
        assert self._shared.loaded is not None
        slots = variables.count_slots(self._fit.model)
        progress.check_slots(self.saved, slots, directory)
        saved, now = self._shared.loaded.variables, self._variables()
        has_metrics = len(self._fit.metrics_variables()) >= self.saved.metrics
        if not has_metrics or len(now) < len(saved):  # a validation had made them
            # A variable is made by all workers at once: all see what they share.
            self._fit.build_test(self._data.any_iterator())
            now = self._variables()
        variables.check(saved, variables.looks(now))
        if self.own is not None:  # another number of workers may have other devices
            variables.check_replicas(self.own.replicas, now)
        member.restore(named_states=False)
        if (own := self.own) is not None:
            if own.variables is not None:
                variables.write(now, own.variables, own.values)
            self._attributes.restore(own.attributes)

    def restore_callbacks(self, *, extends: bool) -> None:
        """The other callbacks and their files.

        Args:
            extends: epochs are added to a fit that was complete.
        """
        assert self._shared.loaded is not None
        self._fit.settle()
        others, remembered = self._others.callbacks, self._shared.loaded.callbacks
        state.restore(others, remembered, extends=extends)
        if self.own is not None:
            state.restore_files(others, self.own.files, extends=extends)

    def _variables(self) -> list[tuple[str, Any]]:
        return variables.of_worker(self._fit, self.checkpoint)

    def restore_random(self) -> None:
        """The random generators of this process."""
        if self.own is not None:
            snapshot.set_random(self.own.random)
