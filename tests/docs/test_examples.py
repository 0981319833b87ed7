"""Examples of pages that no other test runs; every example is run by a test."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from tests.docs.pages import (
    DOCS,
    PAGES,
    ROOT,
    blocks,
    every_block,
    read,
    unlabelled_blocks,
)
from tests.multiprocess.harness import Cluster, Place, Zygote
from tests.ports import free_ports
from tfpreempt.cli import main

pytestmark = pytest.mark.slow  # reads all docs, starts shells

TEXTS = {page: read(page) for page in PAGES} | {
    "README.md": (ROOT / "README.md").read_text(encoding="utf-8")
}
SHELL = {"&", "&&", "|", ";", ">", "2>"}
# Tests that run the Python code of each page.
RUN_BY = {
    "checkpoints/asynchronous-saves.md": "test_checkpoint_pages",
    "checkpoints/handles.md": "test_checkpoint_pages",
    "checkpoints/index.md": "test_checkpoint_pages",
    "checkpoints/mirror.md": "test_checkpoint_pages",
    "checkpoints/retention.md": "test_checkpoint_pages",
    "checkpoints/states.md": "test_checkpoint_pages",
    "checkpoints/without-a-cloud.md": "test_checkpoint_pages",
    "data.md": "test_examples",
    "fit/bad-steps.md": "test_fit_pages",
    "fit/callbacks.md": "test_fit_pages",
    "fit/data.md": "test_fit_pages",
    "fit/example.md": "test_image_example",
    "fit/index.md": "test_fit_pages",
    "fit/jax.md": "test_fit_pages",
    "fit/many-workers.md": "test_fit_pages",
    "fit/restored-state.md": "test_fit_pages",
    "fit/several-fits.md": "test_fit_pages",
    "index.md": "test_fit_pages",
    "loops-on-jax.md": "test_jax_pages",
    "loops.md": "test_examples",
    "migrating/backup-and-restore.md": "test_fit_pages",
    "migrating/tensorflow-handler.md": "test_examples",
    "platforms/index.md": "test_docs",
    "platforms/others.md": "test_docs",
    "platforms/outside-of-training.md": "test_examples",
    "platforms/slurm.md": "test_docs",
    "quick-start.md": "test_readme",
    "tpu.md": "test_examples",
    "troubleshooting.md": "test_examples",
    "which-checkpoint.md": "test_checkpoint_pages",
}
BEFORE_PROTECT = """
import tfpreempt
config = tfpreempt.GenericTerminationConfig()
"""
BEFORE_CHECK = """
v, evaluated, iterator = tf.Variable(0.0), [], None
validation, evaluate = range(2), evaluated.append
def train_step(iterator):
    v.assign_add(1.0)
handler = tfpreempt.PreemptionCheckpointHandler(None, tf.train.Checkpoint(v=v), "ckpt")
"""


def test_every_python_block_has_its_test() -> None:
    """Each test takes all blocks of its page, so no block is skipped."""
    assert {page for page in PAGES if blocks(page)} == set(RUN_BY)
    for page, module in RUN_BY.items():
        source = (ROOT / f"tests/docs/{module}.py").read_text(encoding="utf-8")
        assert f'"{page}"' in source or 'START = "quick-start.md"' in source, page


def run(zygote: Zygote, directory: Path, *parts: str) -> str:
    """Runs a program to its end; returns its output."""
    directory.mkdir(exist_ok=True)
    program = directory / "program.py"
    program.write_text("\n".join(parts), encoding="utf-8")
    done = zygote.run(program, directory=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.tensorflow
def test_a_loop_is_committed_at_its_end(zygote: Zygote, here: Place) -> None:
    program, _ = blocks("loops.md")
    shown = "print(handler.run_calls, float(loss) if handler.run_calls else 'none')"
    runs, loss = run(zygote, here.path, program, shown).split()
    assert runs == "500"
    assert float(loss) < 1e-3
    assert run(zygote, here.path, program, shown) == "0 none\n"


@pytest.mark.tensorflow
def test_one_loop_over_epochs_resumes_in_an_epoch_and_in_a_validation(
    zygote: Zygote, here: Place
) -> None:
    """Each interrupted start ends with 143. All starts together print the lines of an
    uninterrupted run; a line may be repeated, but never with other numbers."""
    _, program = blocks("loops.md")
    uninterrupted = run(zygote, here.path / "a", program)
    epochs = uninterrupted.splitlines()
    assert len(epochs) < 20, "the loop did not stop early"
    stop = "        if step == {}: signal.raise_signal(signal.SIGTERM)\n"
    shown: list[str] = []
    for step, where in ((19, "handler.run("), (24, "if i == 0"), (40, "handler.run(")):
        at = f"        {where}"
        stopped = program.replace(at, stop.format(step) + at)
        script = here.path / "b" / "program.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"import signal\n{stopped}", encoding="utf-8")
        done = zygote.run(script, directory=script.parent)
        assert done.returncode == 143, done.stdout + done.stderr
        shown += done.stdout.splitlines()
    shown += run(zygote, here.path / "b", program).splitlines()
    assert list(dict.fromkeys(shown)) == epochs
    # The program that has stopped early makes no step, and validates again.
    assert run(zygote, here.path / "b", program) == f"{epochs[-1]}\n"


@pytest.mark.tensorflow
def test_both_pipelines_give_the_same_batches(zygote: Zygote, here: Place) -> None:
    pipelines, distributed, _ = blocks("data.md")
    same = """
first = next(iter(small)).numpy().tolist()
assert first == next(iter(large)).numpy().tolist() != list(range(50))
"""
    of_the_next_epoch = "assert first != next(batches).numpy().tolist()"
    run(zygote, here.path, pipelines, same, distributed, of_the_next_epoch)


@pytest.mark.tensorflow
@pytest.mark.parametrize("which", [0, 1], ids=["before", "after"])
def test_moving_over_changes_one_name(zygote: Zygote, here: Place, which: int) -> None:
    *ways, program = blocks("migrating/tensorflow-handler.md")
    shown = "print(handler.total_run_calls, weights.numpy())"
    told = run(zygote, here.path, program, ways[which], shown)
    assert told == "100 [100. 100. 100.]\n"
    assert len(ways) == 2


@pytest.mark.tensorflow
def test_protected_and_checked_in_an_evaluation(zygote: Zygote, here: Place) -> None:
    protect, check = blocks("platforms/outside-of-training.md")
    shown = "handler.close(); print(len(evaluated), int(v))"
    told = run(zygote, here.path, BEFORE_PROTECT, protect, BEFORE_CHECK, check, shown)
    assert told == "20 10000\n"


def test_the_levels_of_the_log_are_those_of_the_logger() -> None:
    (program,) = blocks("troubleshooting.md")
    errors_only, no_lines = program.splitlines()[2:]
    logger = logging.getLogger("tfpreempt")
    before = logger.level
    try:
        for line, lowest in ((errors_only, logging.ERROR), (no_lines, 50)):
            exec(f"import logging\n{line}")
            assert [logger.isEnabledFor(level) for level in (lowest - 1, lowest)] == [
                False,
                True,
            ]
    finally:
        logger.setLevel(before)


@pytest.mark.multiprocess
@pytest.mark.tensorflow
def test_one_client_of_a_remote_worker(here: Place) -> None:
    program, serve = blocks("tpu.md")
    client, server = here.path / "client.py", here.path / "worker.py"
    client.write_text(
        f"{program}\nprint('runs', handler.run_calls)\n", encoding="utf-8"
    )
    server.write_text(serve, encoding="utf-8")
    cluster = {
        job: [f"127.0.0.1:{port}"]
        for job, port in zip(("worker", "coordinator"), free_ports(2), strict=True)
    }

    def start(program: Path, job: str) -> Cluster:
        task = {"cluster": cluster, "task": {"type": job, "index": 0}}
        return here.start(str(program), env={"TF_CONFIG": json.dumps(task)})

    start(server, "worker")
    started = start(client, "coordinator")
    started.expect(0)
    assert "runs 30" in started[0].output


def test_every_shell_block_is_bash() -> None:
    for page in PAGES:
        for block in blocks(page, "bash"):
            subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_every_yaml_block_can_be_read() -> None:
    for page in PAGES:
        for block in blocks(page, "yaml"):
            assert isinstance(yaml.safe_load(block), dict)


def test_every_block_names_its_language() -> None:
    assert unlabelled_blocks("- list\n\n    goes on\n\n```text\na\n```\n") == []
    assert unlabelled_blocks("Text.\n\n    $ cat\n\n```\ncat\n```\n") == [
        "$ cat\n",
        "cat\n",
    ]
    found = {page: unlabelled_blocks(text) for page, text in TEXTS.items()}
    assert {page: blocks for page, blocks in found.items() if blocks} == {}


def command_named(name: str) -> click.Command:
    """Returns a command of `tfpreempt`."""
    command = main.get_command(click.Context(main), name)
    assert command is not None, name
    return command


def test_every_command_within_a_line_has_the_options_that_are_named() -> None:
    told = [(page, words) for page, text in TEXTS.items() for words in inline(text)]
    assert len(told) > 40
    for page, (name, *words) in told:
        command = command_named(name)
        options = {option for each in command.params for option in each.opts}
        options |= {option for each in command.params for option in each.secondary_opts}
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert named - {*options, "--help"} == set(), (page, name)


def inline(text: str) -> list[list[str]]:
    """Returns the words of each `tfpreempt ...` in a line; values may be omitted."""
    found = re.findall(r"`tfpreempt +([a-z][^`]*)`", text)
    return [line.partition(" -- ")[0].split() for line in found]


def in_blocks(text: str) -> list[list[str]]:
    """Returns the words of each command line of `tfpreempt`, in any code block."""
    found = []
    for block in every_block(text):
        lines = block.replace("\\\n", " ")
        for line in re.findall(
            r"^\W*(?:(?:exec|srun) +)*tfpreempt +([a-z].*)", lines, re.MULTILINE
        ):
            words = shlex.split(line, comments=True)
            ends = [place for place, word in enumerate(words) if word in SHELL]
            found.append(words[: min(ends, default=len(words))])
    return found


def parse(name: str, *words: str) -> None:
    """Parses a command line like the command, without running the command."""
    command = command_named(name)
    command.make_parser(click.Context(command)).parse_args(list(words))


def test_every_command_line_in_a_block_is_taken_by_the_command() -> None:
    told = [(page, words) for page, text in TEXTS.items() for words in in_blocks(text)]
    assert len(told) > 15
    for page, words in told:
        try:
            parse(*words)
        except click.UsageError as error:
            pytest.fail(f"{page}: tfpreempt {shlex.join(words)}: {error.message}")


@pytest.mark.parametrize("line", ["run --metrics-prot 9464", "status --host"])
def test_a_command_line_with_a_wrong_option_is_found(line: str) -> None:
    ((*words,),) = in_blocks(f"```console\n$ tfpreempt {line} ckpt &\n```\n")
    with pytest.raises(click.UsageError, match="No such option"):
        parse(*words)


@pytest.mark.parametrize("page", sorted(p for p in PAGES if blocks(p, "diff")))
def test_the_lines_of_a_diff_are_in_the_file_beside_it(page: str) -> None:
    files = (DOCS / page).with_suffix("").rglob("*.py")
    there = {line for file in files for line in file.read_text("utf-8").splitlines()}
    lines = [line for block in blocks(page, "diff") for line in block.splitlines()]
    added = [line[1:] for line in lines if line[0] == "+"]
    assert added
    assert [line for line in added if line not in there] == []
