"""What pages show that no other test runs; and that none of them is left out."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, blocks, read
from tests.multiprocess.harness import Place, Zygote
from tests.ports import free_ports
from tfpreempt.cli import main

# Who runs the Python of a page.
RUN_BY = {
    "checkpoints/handles.md": "test_checkpoint_pages",
    "checkpoints/index.md": "test_checkpoint_pages",
    "checkpoints/mirror.md": "test_checkpoint_pages",
    "checkpoints/states.md": "test_checkpoint_pages",
    "checkpoints/without-a-cloud.md": "test_checkpoint_pages",
    "data.md": "test_examples",
    "fit/callbacks.md": "test_fit_pages",
    "fit/data.md": "test_fit_pages",
    "fit/index.md": "test_fit_pages",
    "fit/many-workers.md": "test_fit_pages",
    "fit/several-fits.md": "test_fit_pages",
    "fit/what-comes-back.md": "test_fit_pages",
    "index.md": "test_fit_pages",
    "loops.md": "test_examples",
    "migrating/backup-and-restore.md": "test_fit_pages",
    "migrating/tensorflow-handler.md": "test_examples",
    "platforms/index.md": "test_docs",
    "platforms/others.md": "test_docs",
    "platforms/outside-of-training.md": "test_examples",
    "platforms/slurm.md": "test_docs",
    "quick-start.md": "test_readme",
    "tpu.md": "test_examples",
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
    """Each takes the blocks of a page as many as they are, so none is passed over."""
    assert {page for page in PAGES if blocks(page)} == set(RUN_BY)
    for page, module in RUN_BY.items():
        source = (ROOT / f"tests/docs/{module}.py").read_text(encoding="utf-8")
        assert f'"{page}"' in source or 'START = "quick-start.md"' in source, page


def run(zygote: Zygote, directory: Path, *parts: str) -> str:
    """Runs a program to its end; returns what it printed."""
    program = directory / "program.py"
    program.write_text("\n".join(parts), encoding="utf-8")
    done = zygote.run(program, directory=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.tensorflow
def test_a_loop_is_committed_at_its_end(zygote: Zygote, here: Place) -> None:
    (program,) = blocks("loops.md")
    shown = "print(handler.runs, float(loss) if handler.runs else 'none')"
    runs, loss = run(zygote, here.path, program, shown).split()
    assert runs == "500"
    assert float(loss) < 1e-3
    assert run(zygote, here.path, program, shown) == "0 none\n"


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
    program, *ways = blocks("migrating/tensorflow-handler.md")
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


@pytest.mark.multiprocess
@pytest.mark.tensorflow
def test_one_client_of_a_remote_worker(here: Place) -> None:
    (program,) = blocks("tpu.md")
    client = here.path / "client.py"
    client.write_text(f"{program}\nprint('runs', handler.runs)\n", encoding="utf-8")
    worker, coordinator = (f"127.0.0.1:{port}" for port in free_ports(2))
    cluster = {"worker": [worker], "coordinator": [coordinator]}
    here.start("server.py", 0, json.dumps(cluster))[0].wait_line("serving")
    task = {"cluster": cluster, "task": {"type": "coordinator", "index": 0}}
    started = here.start(str(client), env={"TF_CONFIG": json.dumps(task)})
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


def commands(page: str) -> list[list[str]]:
    """The words of each `tfpreempt ...`, in a block or within a line."""
    found = re.findall(r"`tfpreempt +([a-z][^`]*)`", read(page))
    for block in blocks(page, "(?:bash|console|)"):
        found += re.findall(r"^(?:\$ )?tfpreempt +([^\n&#]*)", block, re.MULTILINE)
    return [line.partition(" -- ")[0].split() for line in found]


def test_every_command_has_the_options_that_are_named() -> None:
    context = click.Context(main)
    told = [(page, words) for page in PAGES for words in commands(page)]
    assert len(told) > 40
    for page, (name, *words) in told:
        command = main.get_command(context, name)
        assert command is not None, (page, name)
        options = {option for each in command.params for option in each.opts}
        options |= {option for each in command.params for option in each.secondary_opts}
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert named - {*options, "--help"} == set(), (page, name)
