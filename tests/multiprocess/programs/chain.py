"""Trains without TensorFlow: each step of a named State depends on the step before.

Usage: chain.py CHECKPOINT_DIR STEPS [save_fn | rarely]. The program uses a handler;
with "save_fn" also a save_fn, and with "rarely" few commits, so that snapshots matter.
If TFPREEMPT_CHECKPOINT_DIR is set, as by `tfpreempt run`, `save_all_states` saves,
without a handler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import IO

import tfpreempt

PAUSE = 0.01
SAVED_EACH, NOTED_EACH = 3, 8
RARELY = 25
TIMES = 1000
"""Number of copies of the digest in the saved State."""


def say(word: str, value: object) -> None:
    print(f"{word} {value}\n", end="", flush=True)


class Chain(tfpreempt.State):
    """The number of steps, and a digest of all steps."""

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


class Own:
    """The program's own files, which a save_fn writes. Two steps are kept.

    Args:
        directory: directory of the files.
        chain: State whose steps are in the files.
    """

    def __init__(self, directory: str, chain: Chain) -> None:
        self._directory = Path(directory)
        self._chain = chain

    def save(self) -> str:
        path = self._path()
        unfinished = path.with_name("unfinished")
        unfinished.write_bytes(self._chain.digest)
        unfinished.rename(path)
        written = self._directory.glob("own-*[0-9]")
        for old in sorted(written, key=lambda each: int(each.name[4:]))[:-2]:
            old.unlink()
        return str(path)

    def check(self) -> None:
        """Checks that the restored values are the saved values."""
        assert not self._chain.steps or self._path().read_bytes() == self._chain.digest

    def _path(self) -> Path:
        return self._directory / f"own-{self._chain.steps}"


def main() -> None:
    directory, last = sys.argv[1], int(sys.argv[2])
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("tfpreempt").setLevel(logging.DEBUG)  # names snapshots
    chain = Chain("chain")
    if "TFPREEMPT_CHECKPOINT_DIR" in os.environ:
        tfpreempt.load_state(chain)
        say("restored", chain.steps)
        while chain.steps < last:
            chain.step()
            tfpreempt.save_all_states()
            say("committed", chain.steps)
    else:
        own = Own(directory, chain) if "save_fn" in sys.argv else None
        is_rare = "rarely" in sys.argv
        config = tfpreempt.TerminationConfig(save_fn=own.save if own else None)
        handler = tfpreempt.PreemptionCheckpointHandler(
            None, None, directory, config, save_freq=RARELY if is_rare else SAVED_EACH
        )
        say("restored", chain.steps)
        if own:
            own.check()
        with handler:
            while chain.steps < last:
                handler.run(chain.step)
                if chain.steps % NOTED_EACH == 0 and not is_rare:
                    *_, older = None, *handler.checkpoints()
                    committed = handler.save()
                    say("committed", committed.step)
                    committed.set_metadata({"step": committed.step})
                    say("noted", committed.step)
                    handler.wait_for_mirror()
                    if own is None and older is not None:
                        handler.delete_checkpoint(older)
    say("result", json.dumps({"steps": chain.steps, "digest": chain.digest.hex()}))


main()
