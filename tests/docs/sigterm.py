"""Writes docs/follow-one-sigterm.md from a trace of a real preemption.

    python -m tests.bench path --route route.json
    python -m tests.docs.sigterm route.json

The trace is of the first of two workers of a custom loop, from the signal to the end of
its process (tests/bench/path.py). The page has each function once, where it is first
called, under the station that the process is in; neighbours in one room, on one
thread, are one item.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfpreempt"
PAGE = ROOT / "docs/follow-one-sigterm.md"

HEAD = """\
# Follow one SIGTERM

Two workers train in a custom loop, as in the [quick start](quick-start.md). The first,
which is the chief and hosts the store of keys, gets SIGTERM in the midst of a step,
while the other waits for its part in it. This is what it calls until its process ends:
{functions} functions in {files} files, on {threads} threads, each named where it is
called first; `core/`, on which all rooms stand, is left out. An item is a thread and a
room, and begins with what its first function says of itself.

The page is made from a trace, by `python -m tests.docs.sigterm`.
[The map](architecture.md) says what the rooms are, [the agreement](agreement.md) what
the workers say to each other. Threads run at once, so items can come in another order.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """One function on the way.

    Attributes:
        thread: the name of the thread.
        file: relative to the package.
        function: its qualified name.
    """

    thread: str
    file: str
    function: str

    @property
    def room(self) -> str:
        return self.file.rpartition("/")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Station:
    """A part of the way.

    Attributes:
        title: a heading.
        text: what happens in it.
        begins: matches the first hop of it, as `thread file function`.
    """

    title: str
    text: str
    begins: str


STATIONS = (
    Station(
        "The signal is recorded",
        "Python runs the handler between two bytecodes of the main thread. It records "
        "the signal, and the step goes on. A thread reads the record, asks how long "
        "the grace is, and tells the session.",
        r"MainThread notice/",
    ),
    Station(
        "The workers agree on a boundary",
        "The notice becomes a key in the store. Each worker's watch reads it, raises "
        "the flag, reads the counter and inserts the count. The host gathers the "
        "counts and inserts the largest as the decision.",
        r"\S+ coordination/",
    ),
    Station(
        "The step ends, main stands at the boundary",
        "The next `run()` sees the flag and starts nothing. It waits for the decision: "
        "to save here.",
        r"MainThread handler/handler.py ",
    ),
    Station(
        "This worker's part is staged",
        "TensorFlow's files, the named States and this worker's shard are written to "
        "a staging directory, which others leave alone while its writer lives.",
        r"MainThread checkpoint/saver.py \w+\.capture$",
    ),
    Station(
        "The commit",
        "The other worker's part is there too. Files are synced and checksummed, the "
        "manifest is written, the directory gets its name, and the marker makes it a "
        "checkpoint. Only then is it said to all.",
        r"MainThread checkpoint/saver.py \w+\.commit$",
    ),
    Station(
        "The exit",
        "The host stays until the other worker has said that it needs the store no "
        "more. The journal says how it ended, and the process leaves with the code "
        "that makes its platform start it again.",
        r"MainThread handler/exit.py ",
    ),
)


def hops(route: Sequence[str]) -> list[Hop]:
    """The route of a row of the bench, as values, without what all rooms stand on."""
    found = (re.fullmatch(r"(.+?)  (\S+):\d+ (.+)", line) for line in route)
    all_hops = [Hop(*match.groups()) for match in found if match]
    return [hop for hop in all_hops if hop.room != "core"]


def stations(way: Sequence[Hop]) -> Iterator[tuple[Station, list[Hop]]]:
    """The hops of each station.

    Raises:
        ValueError: one that the trace does not come to: `STATIONS` must be mended.
    """
    begins, at = [], 0
    for station in STATIONS:
        lines = enumerate(f"{h.thread} {h.file} {h.function}" for h in way)
        later = (n for n, line in lines if n >= at and re.match(station.begins, line))
        at = next(later, -1)
        if at < 0:
            raise ValueError(
                f"no call matches {station.begins!r}, with which {station.title!r} "
                "begins; mend STATIONS in tests/docs/sigterm.py"
            )
        begins.append(at)
    for station, (start, end) in zip(
        STATIONS, itertools.pairwise([*begins, len(way)]), strict=True
    ):
        yield station, list(way[start:end])


def item(part: Sequence[Hop]) -> str:
    """Neighbours in one room, on one thread."""
    first, places = part[0], []
    for file, of_file in itertools.groupby(part, key=lambda hop: hop.file):
        names = ", ".join(f"`{hop.function}`" for hop in of_file)
        places.append(f"[{Path(file).name}](../tfpreempt/{file}) {names}")
    said = summaries(first.file).get(first.function, "")
    sentence = f" {said}" if said else ""
    return f"- **{first.thread}, {first.room}/**{sentence} {'; '.join(places)}"


@functools.cache
def summaries(file: str) -> dict[str, str]:
    """The first sentence of each function of a file, by its qualified name."""
    found: dict[str, str] = {}

    def look(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                look(child, f"{outer}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                text = (ast.get_docstring(child) or "").partition("\n\n")[0]
                sentence = re.split(r"(?<=[.;:])\s", " ".join(text.split()))[0]
                found[f"{outer}{child.name}"] = sentence.rstrip(".;:") + "." * bool(
                    text
                )
                look(child, f"{outer}{child.name}.<locals>.")
            else:
                look(child, outer)

    look(ast.parse((PACKAGE / file).read_text("utf-8")), "")
    return found


def page(way: Sequence[Hop]) -> str:
    """The whole page."""
    parts = [
        HEAD.format(
            functions=len(way),
            files=len({hop.file for hop in way}),
            threads=len({hop.thread for hop in way}),
        )
    ]
    for number, (station, of_station) in enumerate(stations(way), 1):
        groups = itertools.groupby(of_station, key=lambda hop: (hop.thread, hop.room))
        items = "\n".join(item(list(group)) for _, group in groups)
        parts.append(f"## {number}. {station.title}\n\n{station.text}\n\n{items}\n")
    return "\n".join(parts)


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    (route,) = (
        row["route"]
        for row in rows
        if (row["kind"], row["phase"]) == ("loop", "preemption")
    )
    PAGE.write_text(page(hops(route)), encoding="utf-8")


if __name__ == "__main__":
    main()
