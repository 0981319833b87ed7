"""One target of the fuzz campaign by atheris, which sees what code an input reaches.

Usage: python -m campaigns.fuzz_atheris TARGET [OPTION of libFuzzer ...] [DIR]

atheris is not among the extras, as it has no wheels for some of the Pythons that are
served: `pip install atheris`. What finds a fault belongs into `fuzz.KEPT`; the inputs
that reach something new are left in DIR, from where `corpus.py` keeps the small ones:

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
    """Runs until libFuzzer ends the process: by its options, or at a fault."""
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
