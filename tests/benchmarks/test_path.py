"""The bench of the path counts the functions of a route, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.path import ROOT, row
from benchmarks.tracer import Call, read

pytestmark = pytest.mark.slow  # starts interpreters

PACKAGE = """
import threading

class OnImport:
    field = [i for i in range(3)]

    def method(self):
        return (lambda: [self.leaf() for _ in range(2)])()

    def leaf(self):
        pass

def unseen():
    OnImport()

def top():
    def nested():
        OnImport().method()
    thread = threading.Thread(target=nested, name="worker")
    thread.start()
    thread.join()
"""

PROGRAM = """
import os, sys
from pathlib import Path
from benchmarks.tracer import Tracer

tracer = Tracer(Path(sys.argv[1], "package"), Path(sys.argv[1], "trace"))
sys.path.insert(0, sys.argv[1])
import package.part
package.part.unseen()
tracer.start()
import package.late
package.part.top()
{end}
"""


def call(function: str, *, thread: int, file: str = "a.py") -> Call:
    return Call(thread=thread, name=f"t{thread}", file=file, line=7, function=function)


def test_a_row_counts_distinct_functions_in_order_of_first_calls() -> None:
    calls = [
        call("f", thread=0),
        call("g", thread=1),  # the route changes its thread here,
        call("f", thread=0),
        call("h", thread=1, file="b.py"),
        call("f", thread=2),
        call("g", thread=2, file="core/b.py"),  # and here
    ]
    found = row("loop", "restart", calls)
    assert (found["functions"], found["files"], found["calls"]) == (4, 3, 6)
    assert (found["functions_without_core"], found["files_without_core"]) == (3, 2)
    assert (found["threads"], found["thread_changes"]) == (3, 2)
    assert found["route"] == [
        "t0  a.py:7 f",
        "t1  a.py:7 g",
        "t1  b.py:7 h",
        "t2  core/b.py:7 g",
    ]


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)"])
def test_a_trace_has_the_functions_of_all_threads_however_the_process_ends(
    tmp_path: Path, end: str
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text(PACKAGE)
    (tmp_path / "package" / "late.py").write_text("class Late: pass\n")
    command = [sys.executable, "-c", PROGRAM.format(end=end), str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 3
    assert [(c.name, c.function) for c in read(tmp_path / "trace")] == [
        ("MainThread", "top"),
        ("worker", "top.<locals>.nested"),
        ("worker", "OnImport.method"),
        ("worker", "OnImport.leaf"),
        ("worker", "OnImport.leaf"),
    ]
