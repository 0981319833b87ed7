"""One target of the fuzz campaign by atheris, which sees what code an input reaches.

Usage: python -m tests.campaigns.fuzz_atheris TARGET [OPTION of libFuzzer ...]

atheris is not among the extras, as it has no wheels for some of the Pythons that are
served: `pip install atheris`. What it finds belongs into `fuzz.KEPT`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tfpreempt"]):
    from tests.campaigns import fuzz


def main() -> None:
    """Runs until libFuzzer ends the process: by its options, or at a fault."""
    _, name, *options = sys.argv
    target = next(each for each in fuzz.TARGETS if each.name == name)
    place = Path(tempfile.mkdtemp())
    seeds = place / "seeds"
    seeds.mkdir()
    for number, seed in enumerate(target.seeds):
        (seeds / f"{number}").write_bytes(seed)

    def one(data: bytes) -> None:
        with tempfile.TemporaryDirectory(dir=place) as here:
            fuzz.attempt(target, data, Path(here))

    with fuzz.measured():
        atheris.Setup([name, *options, str(seeds)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
