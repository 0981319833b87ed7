"""Writes the pages that follow one preemption and one restart through the code.

    python -m benchmarks path --route route.json
    python -m tests.docs.routes route.json

A page is made from a trace of the first of two workers (benchmarks/path.py). The page
names each function of the package once, where the function is first called, under the
station that the process is in. Neighbours on one thread and in one package are one
item.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tfpreempt"


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """A function on the route.

    Attributes:
        thread: name of the thread.
        file: path relative to the package.
        function: qualified name of the function.
    """

    thread: str
    file: str
    function: str

    @property
    def package(self) -> str:
        return self.file.rpartition("/")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Station:
    """A part of the route.

    Attributes:
        title: a heading.
        text: the events of this part.
        begins: matches the first hop of this part, as `thread file function`.
    """

    title: str
    text: str
    begins: str


@dataclasses.dataclass(frozen=True, slots=True)
class MainCall:
    """A call in the overview of a page.

    Attributes:
        file: path relative to the package.
        functions: qualified names of one or more functions of the file.
        text: the task of the functions.
        thread: name of the thread that calls the functions.
    """

    file: str
    functions: tuple[str, ...]
    text: str
    thread: str = "MainThread"


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """A page of docs/.

    Attributes:
        name: file name in docs/.
        title: heading of the page.
        traced: kind and phase of the bench's row from which the page is made.
        text: the introduction.
        stations: parts of the route, in order.
        main_calls: the overview, in the order of the calls.
        threads: task of each thread, by name.
    """

    name: str
    title: str
    traced: tuple[str, str]
    text: str
    stations: tuple[Station, ...]
    main_calls: tuple[MainCall, ...] = ()
    threads: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> Path:
        return ROOT / "docs" / self.name


HEAD = """\
# {title}

{text}

The process calls {functions} functions in {files} files, on {threads} threads. Each
function is named where it is called first. The package `core/`, which every other
package uses, is left out. An item is a thread and a package, and begins with the first
sentence of the first function's documentation. Threads run at the same time, so the
order of items can differ from run to run.

This page is made from a trace, by `python -m tests.docs.routes`. [The
architecture](architecture.md) describes the packages, and [the agreement](agreement.md)
describes the messages between workers.
"""

SIGTERM = Page(
    "follow-one-sigterm.md",
    "Follow one SIGTERM",
    ("loop", "preemption"),
    "Two workers train in a custom loop, as in the [quick start](quick-start.md). The "
    "first worker is the chief and hosts the key-value store. It gets SIGTERM in the "
    "middle of a step, while the other worker waits for it in a collective operation. "
    "This page lists the calls of the first worker from the signal to the end of the "
    "process.",
    (
        Station(
            "The signal is recorded",
            "Python calls the signal handler on the main thread. The handler only "
            "records the signal, and the step continues. A thread reads the record, "
            "finds out the grace period, and gives the notice to the session.",
            r"MainThread notice/",
        ),
        Station(
            "The workers agree on a boundary",
            "The notice becomes a key in the key-value store. The watch of each worker "
            "reads the key, sets the flag, reads the counter and inserts the count. "
            "The worker that hosts the store gathers the counts and inserts the "
            "largest count as the decision.",
            r"\S+ coordination/",
        ),
        Station(
            "The step ends, the main thread waits at the boundary",
            "The next `run()` sees the flag and starts no step. The main thread waits "
            "for the decision: save here.",
            r"MainThread handler/handler.py ",
        ),
        Station(
            "This worker's part is written",
            "The worker writes TensorFlow's files, the named States and its own shard "
            "to a staging directory.",
            r"MainThread checkpoint/restore/save.py \w+\.capture$",
        ),
        Station(
            "The commit",
            "The part of the other worker is written too. The chief syncs the files, "
            "computes checksums, writes the manifest, renames the directory, and "
            "writes the marker. The marker makes the directory a checkpoint. Then the "
            "chief announces the commit to all workers.",
            r"MainThread checkpoint/restore/save.py \w+\.publish$",
        ),
        Station(
            "The exit",
            "The host of the store stays until the other worker has announced that it "
            "does not need the store any more. The journal records the reason of the "
            "exit. The process exits with the code on which its platform restarts it.",
            r"MainThread handler/exit.py ",
        ),
    ),
    (
        MainCall(
            "handler/session.py",
            ("Session.on_notice",),
            "gets the notice from the signal source, and logs the notice",
            "tfpreempt-signals",
        ),
        MainCall(
            "coordination/coordinator.py",
            ("Coordinator.notice",),
            "sets the deadline, and inserts the key `notice`",
            "tfpreempt-signals",
        ),
        MainCall(
            "coordination/state_machine.py",
            ("notice_read",),
            "every worker reads the key, sets the flag and reads its counter",
            "tfpreempt-hub",
        ),
        MainCall(
            "coordination/state_machine.py",
            ("counts_read",),
            "the chief inserts the largest count as the decision",
            "tfpreempt-gather",
        ),
        MainCall(
            "handler/handler.py",
            ("PreemptionCheckpointHandler.run",),
            "sees the flag at the beginning of the next step",
        ),
        MainCall(
            "handler/session.py",
            ("Session.enter",),
            "does the work that only some boundaries need",
        ),
        MainCall(
            "handler/session.py",
            ("Session.wait_at_boundary",),
            "takes the count back, and waits until the step may start",
        ),
        MainCall(
            "handler/session.py",
            ("Session.wait_for_directive",),
            "executes the directives of the coordinator: save, write the marker, exit",
        ),
        MainCall(
            "handler/collective_save.py",
            ("RoundSave.stage",),
            "saves this worker's part of each run",
        ),
        MainCall(
            "handler/run.py",
            ("Run.capture", "Run.write"),
            "call the two functions of the next line, one after the other",
        ),
        MainCall(
            "checkpoint/restore/save.py",
            ("Save.capture", "Save.write"),
            "copy the values, and write and sync the files in the staging directory",
        ),
        MainCall(
            "handler/collective_save.py",
            ("RoundSave.mark",),
            "the chief commits, after all workers have written their parts",
        ),
        MainCall(
            "handler/run.py",
            ("Run.commit",),
            "records the commit in the journal, after the next two lines",
        ),
        MainCall(
            "checkpoint/restore/save.py",
            ("Save.publish",),
            "checks the lease and the parts, and writes missing shares",
        ),
        MainCall(
            "checkpoint/directory/commit.py",
            ("publish", "seal", "put_in_place"),
            "writes the manifest, renames the directory, and creates the marker",
        ),
        MainCall(
            "handler/exit.py",
            ("ExitController.leave",),
            "waits for uploads, records the exit, and releases the leases",
        ),
        MainCall(
            "platforms/config.py",
            ("TerminationConfig._exit",),
            "ends the process with the restart code, by raising SystemExit",
        ),
    ),
    (
        ("MainThread", "trains, saves, commits and exits"),
        ("tfpreempt-signals", "reads the numbers of signals, and passes notices on"),
        ("tfpreempt-hub", "reads the keys of the round, one after the other"),
        ("tfpreempt-writer", "inserts keys, one after the other"),
        ("tfpreempt-gather", "reads the keys of the other workers, on the chief"),
        ("tfpreempt-alarms", "calls functions at given times, such as deadlines"),
        ("tfpreempt-bounded", "makes one call for which another thread waits briefly"),
        ("tfpreempt-checksum", "computes the checksums of the files of the commit"),
        ("tfpreempt-last-exit", "ends the process if the exit takes too long"),
    ),
)

RESTART = Page(
    "follow-one-restart.md",
    "Follow one restart",
    ("fit", "restart"),
    "Two workers train with `model.fit` and [the callback](fit/index.md). Both were "
    "preempted in the middle of an epoch, and their platform has started them again. "
    "This page lists the calls of the first worker, which is the chief, from the "
    "construction of the callback to the end of the first step.",
    (
        Station(
            "The callback is made",
            "The platform is detected without a request to a server, and the callback "
            "is given to `model.fit`.",
            r"MainThread keras/callback.py \w+\.__init__$",
        ),
        Station(
            "The callback looks at the fit",
            "Keras calls `on_train_begin`. The callback finds the loop of the fit, the "
            "other callbacks, the data, and the attributes of the model that callbacks "
            "can change.",
            r"MainThread keras/callback.py \w+\.on_train_begin$",
        ),
        Station(
            "The process joins its cluster",
            "The session of the process connects to the key-value store. Termination "
            "signals are watched from here on.",
            r"MainThread handler/current_session.py find_session$",
        ),
        Station(
            "The chief takes the lease of the directory",
            "No other run may commit in the directory now. The chief removes the files "
            "of saves that were never committed.",
            r"MainThread handler/restore_agreement.py agree$",
        ),
        Station(
            "The workers agree on a commit",
            "The chief finds the newest commit and verifies its checksums. All workers "
            "restore this commit.",
            r"MainThread handler/restore_agreement.py _find_newest$",
        ),
        Station(
            "The fit is planned",
            "The record of the fit in the commit is compared with this fit: the data, "
            "its order, and the completed epochs. Keras' loop begins at the epoch of "
            "the commit, and the data at the batch of the commit.",
            r"MainThread keras/fit/training.py \w+\._begin$",
        ),
        Station(
            "The state is restored",
            "Before the first step, once all variables exist, the callback restores "
            "variables, the position in the data, the callbacks and the named States.",
            r"MainThread keras/fit/training.py \w+\._first_step$",
        ),
        Station(
            "The first step",
            "The first boundary sets the random generators to those of the commit. "
            "Then Keras' train function runs one step.",
            r"MainThread handler/session.py \w+\.enter$",
        ),
    ),
)

PAGES = (SIGTERM, RESTART)


def hops(route: Sequence[str]) -> list[Hop]:
    """The route of a row of the bench, as values, without the package `core/`."""
    found = (re.fullmatch(r"(.+?)  (\S+):\d+ (.+)", line) for line in route)
    all_hops = [Hop(*match.groups()) for match in found if match]
    return [hop for hop in all_hops if hop.package != "core"]


def split(page: Page, route: Sequence[Hop]) -> Iterator[tuple[Station, list[Hop]]]:
    """The hops of each station of a page.

    Raises:
        ValueError: the trace reaches no such station: change the page's stations.
    """
    begins, at = [], 0
    for station in page.stations:
        lines = enumerate(f"{hop.thread} {hop.file} {hop.function}" for hop in route)
        later = (n for n, line in lines if n >= at and re.match(station.begins, line))
        at = next(later, -1)
        if at < 0:
            raise ValueError(
                f"no call matches {station.begins!r}, the first call of the station "
                f"{station.title!r} of docs/{page.name}; change the stations in "
                "tests/docs/routes.py"
            )
        begins.append(at)
    for station, (start, end) in zip(
        page.stations, itertools.pairwise([*begins, len(route)]), strict=True
    ):
        yield station, list(route[start:end])


def item(part: Sequence[Hop]) -> str:
    """Returns a list item for neighboring functions of one package, on one thread."""
    first, places = part[0], []
    for file, of_file in itertools.groupby(part, key=lambda hop: hop.file):
        names = ", ".join(f"`{hop.function}`" for hop in of_file)
        places.append(f"[{Path(file).name}](../tfpreempt/{file}) {names}")
    summary = summaries(first.file).get(first.function, "")
    sentence = f" {summary}" if summary else ""
    package = first.package or "tfpreempt"
    return f"- **{first.thread}, {package}/**{sentence} {'; '.join(places)}"


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


def overview(page: Page) -> str:
    """Returns the sections in front of the stations: the main calls and the threads."""
    if not page.main_calls:
        return ""
    calls = "\n".join(
        f"{number}. **{call.thread}** "
        f"[{Path(call.file).name}](../tfpreempt/{call.file}) "
        f"{', '.join(f'`{each}`' for each in call.functions)}: {call.text}"
        for number, call in enumerate(page.main_calls, 1)
    )
    threads = "\n".join(f"| `{name}` | {task} |" for name, task in page.threads)
    return f"## The main calls\n\n{calls}\n\n| thread | task |\n|---|---|\n{threads}\n"


def text(page: Page, route: Sequence[Hop]) -> str:
    """Returns the whole page, for the route of a trace."""
    parts = [
        HEAD.format(
            title=page.title,
            text=textwrap.fill(page.text, 88),
            functions=len(route),
            files=len({hop.file for hop in route}),
            threads=len({hop.thread for hop in route}),
        )
    ]
    if page.main_calls:
        parts.append(overview(page))
    for number, (station, part) in enumerate(split(page, route), 1):
        groups = itertools.groupby(part, key=lambda hop: (hop.thread, hop.package))
        items = "\n".join(item(list(group)) for _, group in groups)
        parts.append(f"## {number}. {station.title}\n\n{station.text}\n\n{items}\n")
    return "\n".join(parts)


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    routes = {(row["kind"], row["phase"]): row["route"] for row in rows}
    for page in PAGES:
        page.path.write_text(text(page, hops(routes[page.traced])), encoding="utf-8")


if __name__ == "__main__":
    main()
