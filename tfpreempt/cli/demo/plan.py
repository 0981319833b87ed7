"""When the demo strikes, and whom: drawn from a seed before anything runs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from tfpreempt.errors import ConfigurationError

STEPS = 1_000
EPOCH_STEPS = 50  # of `model.fit`
_GAP = 20  # steps between two strikes: an incarnation trains before it is struck again
_LAST = 0.8  # share of the steps after which nothing is struck: a notice needs time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """SIGTERM goes to these workers as soon as this step is trained."""

    step: int
    victims: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A line of a worker's record: this process trained this step."""

    worker: int
    step: int
    loss: float
    pid: int
    restart: int


def draw_strikes(
    *, workers: int, preemptions: int, seed: int, steps: int = STEPS
) -> tuple[Strike, ...]:
    """Draws the steps and the victims, in the order of the steps.

    Raises:
        ConfigurationError: so many preemptions do not fit into the steps.
    """
    slots = range(_GAP, int(steps * _LAST), _GAP)
    if preemptions > len(slots):
        raise ConfigurationError(
            f"--preemptions {preemptions} does not fit: at most {len(slots)} fit into "
            f"{steps} steps, {_GAP} steps apart and none after step "
            f"{int(steps * _LAST)}. Ask for fewer, or for more --steps."
        )
    rng = random.Random(seed)
    choices: list[tuple[int, ...]] = [(worker,) for worker in range(workers)]
    if workers > 1:
        choices.append(tuple(range(workers)))
    return tuple(
        Strike(step=slot + rng.randrange(_GAP // 2), victims=rng.choice(choices))
        for slot in sorted(rng.sample(slots, preemptions))
    )


class Striker:
    """Says when to strike; each incarnation is struck once at most. Does no I/O."""

    def __init__(self, strikes: tuple[Strike, ...]) -> None:
        self._pending = list(strikes)
        self._struck_restart = -1

    def due(self, latest: Mapping[int, Progress]) -> tuple[int, ...]:
        """The processes to signal now.

        Args:
            latest: the newest progress of each worker that has any.
        """
        if not self._pending or not latest:
            return ()
        restart = max(each.restart for each in latest.values())
        alive = {i: each for i, each in latest.items() if each.restart == restart}
        strike = self._pending[0]
        if (
            restart <= self._struck_restart
            or max(each.step for each in alive.values()) < strike.step
            # A victim that has no step yet has no handler yet either, perhaps.
            or not alive.keys() >= set(strike.victims)
        ):
            return ()
        del self._pending[0]
        self._struck_restart = restart
        return tuple(alive[victim].pid for victim in strike.victims)
