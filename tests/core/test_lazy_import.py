"""Without TensorFlow, features that need it name the package; all others work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a new interpreter for each

WITHOUT = "import sys; sys.modules['tensorflow'] = None\n"


def run_without(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program where no TensorFlow can be imported."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + program], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "program",
    [
        "from tfpreempt import data",
        "import tfpreempt; tfpreempt.data.from_arrays",
        "from tfpreempt.states import TensorFlowRandomState",
    ],
)
def test_a_name_that_needs_tensorflow_names_the_install_command(program: str) -> None:
    done = run_without(program)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tfpreempt.errors.TensorFlowMissingError: tfpreempt.")
    assert sys.executable in last
    for extra in ("tensorflow", "and-cuda", "tensorflow-tpu", "tensorflow-cpu"):
        assert extra in last
    assert "libtpu==0.0.14" in last  # with pip's choice, TensorFlow's import aborts


def test_a_module_that_is_half_imported_is_not_taken_for_its_name() -> None:
    done = run_without(
        "import types, tfpreempt\n"
        "half = types.ModuleType('tfpreempt.states.api')\n"
        "sys.modules[half.__name__] = half\n"
        "tfpreempt.save_all_states\n"
    )
    assert "AttributeError" in done.stderr.splitlines()[-1]


def test_workers_of_a_cluster_are_refused_by_the_same_error(tmp_path: Path) -> None:
    done = run_without(
        "import types, tfpreempt\n"
        "spec = types.SimpleNamespace(as_dict=lambda: {'worker': ['a:1', 'b:1']})\n"
        "resolver = types.SimpleNamespace(\n"
        "    cluster_spec=lambda: spec, task_type='worker', task_id=0)\n"
        f"tfpreempt.PreemptionCheckpointHandler(resolver, None, {str(tmp_path)!r})\n"
    )
    assert "TensorFlowMissingError: tfpreempt.handler.tensorflow_adapter" in done.stderr


def test_connecting_without_tensorflow_names_the_install_command() -> None:
    done = run_without("import tfpreempt; tfpreempt.connect_to_cluster(None)")
    last = done.stderr.splitlines()[-1]
    error = "tfpreempt.errors.TensorFlowMissingError: connect_to_cluster() needs"
    assert last.startswith(error), done.stderr


def test_a_watcher_without_a_connection_is_the_callers_mistake() -> None:
    done = run_without("import tfpreempt; tfpreempt.PreemptionWatcher()")
    assert "UsageError: PreemptionWatcher() was created before" in done.stderr


def test_the_error_is_an_import_error_and_ours() -> None:
    done = run_without(
        "import tfpreempt\n"
        "for kind in ImportError, tfpreempt.TfpreemptError:\n"
        "    try: tfpreempt.data\n"
        "    except kind: print('caught')\n"
    )
    assert done.stdout == "caught\n" * 2, done.stderr


def test_names_without_tensorflow_work_without_it(tmp_path: Path) -> None:
    done = run_without(
        "import tfpreempt, tfpreempt.keras, tfpreempt.states as states\n"
        "tfpreempt.TerminationConfig(); tfpreempt.detect_platform()\n"
        "states.StepCounter('step'); tfpreempt.num_restarts()\n"
        f"tfpreempt.PreemptionCheckpointHandler(None, None, {str(tmp_path)!r}).close()"
    )
    assert done.returncode == 0, done.stderr


def test_the_demo_reports_missing_packages_before_a_worker_starts() -> None:
    done = run_without(
        "sys.modules['jax'] = None; from tfpreempt.cli import main; main(['demo'])"
    )
    assert done.returncode != 0
    assert "The demo needs TensorFlow" in done.stderr
    assert "pip install '.[tensorflow]'" in done.stderr
