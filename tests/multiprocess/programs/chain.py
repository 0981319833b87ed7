"""Training without TensorFlow: a named State, each step of which hangs on the last.

Usage: chain.py CHECKPOINT_DIR STEPS. Under a handler, with all that it does; with
TFPREEMPT_CHECKPOINT_DIR set, as `tfpreempt run` does, by `save_all_states` alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from typing import IO

import tfpreempt

PAUSE = 0.01
NOTED_EACH = 8
TIMES = 1000
"""How often the state holds its digest."""


def say(word: str, value: object) -> None:
    print(f"{word} {value}\n", end="", flush=True)


class Chain(tfpreempt.State):
    """The number of steps, and a digest of all of them."""

    steps, digest = 0, b""

    def step(self) -> None:
        time.sleep(PAUSE)
        self.steps += 1
        self.digest = hashlib.sha256(self.digest).digest()

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(b"%d\n" % self.steps + TIMES * self.digest)

    def load(self, fileobj: IO[bytes]) -> None:
        steps, digests = fileobj.read().split(b"\n", 1)
        self.steps, self.digest = int(steps), digests[: len(digests) // TIMES]
        assert digests == TIMES * self.digest


def main() -> None:
    directory, last = sys.argv[1], int(sys.argv[2])
    logging.basicConfig(level=logging.INFO)
    chain = Chain("chain")
    if "TFPREEMPT_CHECKPOINT_DIR" in os.environ:
        tfpreempt.load_state(chain)
        say("restored", chain.steps)
        while chain.steps < last:
            chain.step()
            tfpreempt.save_all_states()
            say("committed", chain.steps)
    else:
        handler = tfpreempt.PreemptionCheckpointHandler(
            None, None, directory, save_every=3
        )
        say("restored", chain.steps)
        with handler:
            while chain.steps < last:
                handler.run(chain.step)
                if chain.steps % NOTED_EACH == 0:
                    committed = handler.save()
                    say("committed", committed.step)
                    committed.set_metadata({"step": committed.step})
                    say("noted", committed.step)
    say("result", json.dumps({"steps": chain.steps, "digest": chain.digest.hex()}))


main()
