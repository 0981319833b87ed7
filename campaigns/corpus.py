"""Keeps inputs of the fuzz campaign that reached new code, as text in corpus/.

Usage: python -m campaigns.corpus TARGET DIRECTORY

The command adds the inputs that libFuzzer has left in DIRECTORY (see fuzz_atheris.py).
A file has the inputs of one target, one input per line: a JSON string with a character
for each byte. test_fuzz.py reads all inputs, and the campaign changes the inputs at
random, like the seeds of the target.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
MOST = 16  # inputs of a target
LARGEST = 1200  # bytes of an input


def path_of(target: str) -> Path:
    """Returns the path of the inputs of a target."""
    return CORPUS / (re.sub(r"[^a-z0-9]+", "-", target.lower()).strip("-") + ".jsonl")


def load(target: str) -> list[bytes]:
    """Returns the inputs of a target; no inputs if the file is missing."""
    path = path_of(target)
    lines = path.read_text("ascii").splitlines() if path.exists() else []
    return [json.loads(line).encode("latin-1") for line in lines]


def add(target: str, inputs: Iterable[bytes]) -> int:
    """Adds the smallest new inputs; returns the number of inputs of the target."""
    known = {*load(target), *(each for each in inputs if 0 < len(each) <= LARGEST)}
    kept = sorted(known, key=lambda each: (len(each), each))[:MOST]
    if kept:
        CORPUS.mkdir(exist_ok=True)
        lines = [json.dumps(each.decode("latin-1")) + "\n" for each in kept]
        path_of(target).write_text("".join(lines), "ascii")
    return len(kept)


if __name__ == "__main__":
    _, name, found = sys.argv
    print(add(name, (each.read_bytes() for each in sorted(Path(found).iterdir()))))
