"""Runs one target of the fuzz campaign with atheris, which measures code coverage.

Usage: python -m campaigns.fuzz_atheris TARGET [OPTION of libFuzzer ...] [DIR]

atheris is not in the extras, because it has no wheels for some supported versions of
Python: `pip install atheris`. Add an input that finds a fault to `fuzz.KEPT`. The
inputs that reach new code are written to DIR, and `corpus.py` keeps the small ones:

    python -m campaigns.fuzz_atheris "key: count" -max_total_time=60 /tmp/found
    python -m campaigns.corpus "key: count" /tmp/found
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tfpreempt"]):
    from campaigns import fuzz


def main() -> None:
    """Fuzzes a target until libFuzzer ends the process, by an option or a fault."""
    _, name, *options = sys.argv
    target = next(each for each in fuzz.TARGETS if each.name == name)
    place = Path(tempfile.mkdtemp())
    seeds = place / "seeds"
    seeds.mkdir()
    for number, seed in enumerate([*target.seeds, *fuzz.KNOWN[name]]):
        (seeds / f"{number}").write_bytes(seed)

    def one(data: bytes) -> None:
        with tempfile.TemporaryDirectory(dir=place) as here:
            fuzz.attempt(target, data, Path(here))

    with fuzz.measured():
        atheris.Setup([name, *options, str(seeds)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
