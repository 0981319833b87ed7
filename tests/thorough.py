"""The tests of `make test-thorough`, which `make test` omits: mark `thorough`.

`make test` runs nearly all test functions, and tests each promise at least once on real
processes. `make test-thorough` runs the other cases. `tests/conftest.py` marks as
thorough:

1. the functions of `TESTS`, except the cases that are named there; 2. in `FITS`, whose
tests take seconds each, all cases of a function except the first case; 3. elsewhere,
for a function that needs TensorFlow, each case without a value of a parameter that is
new compared with the earlier cases; 4. the cases on JAX of a function that has cases on
TensorFlow.

A test that docs/reliability-tests.md or docs/campaigns.md names is thorough only if
`NAMED` has the test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import pytest

SHORT_CAMPAIGNS = "tests/campaigns/test_short.py::test_no_trial_breaks_a_promise"
"""Repeats at random the faults that other tests cause once."""

NAMED = (
    SHORT_CAMPAIGNS,
    # Two workers on JAX are in `make test`.
    "tests/campaigns/test_peers.py::"
    "test_a_killed_worker_does_not_make_jax_abort_another_worker",
)
"""Thorough tests that docs/reliability-tests.md or docs/campaigns.md names."""

TESTS: dict[str, tuple[str, ...]] = {
    # The programs of `make gpu`, on the CPU.
    "tests/benchmarks/test_gpu.py::test_every_program_runs_on_the_cpu": (),
    SHORT_CAMPAIGNS: (),
    "tests/campaigns/test_crowd.py::"
    "test_workers_that_are_preempted_again_lose_no_step": (),
    # The orders of events in small clusters are all searched by another test.
    "tests/cluster/test_explore.py::test_every_order_of_events_in_larger_clusters": (
        "three workers",
    ),
    # Orders of more operations than those that `make test` searches.
    "tests/checkpoint/test_lease_model.py::test_every_order_of_operations_of_more": (
        "a dead holder, two starts",
    ),
    # Minutes of search for a rule that has an example among the schedules.
    "tests/cluster/test_mutations.py::"
    "test_skipping_a_dropped_save_that_needs_all_workers": (),
    # Random tables; a table of each kind of block stays.
    "tests/checkpoint/test_bundle_table.py::test_written_entries_are_read_in_order": (),
    # Programs as long as a reader's; other tests make each of their calls.
    "tests/docs/test_notebooks.py::test_a_notebook_runs_top_to_bottom": (),
    "tests/docs/test_fit_pages.py::test_the_examples_run_one_after_the_other": (),
    "tests/docs/test_image_example.py::"
    "test_two_preemptions_at_random_change_no_result": (),
    "tests/docs/test_readme.py::test_the_supervisor_example_runs": (),
    "tests/docs/test_fit_pages.py::test_two_workers": (),
    "tests/docs/test_fit_pages.py::test_keras_on_jax": (),
    # tests/test_wheel.py runs the demo on TensorFlow, with a preemption of one worker;
    # tests/docs/test_jax_pages.py runs a loop on JAX under the supervisor.
    "tests/cli/test_demo.py::test_nothing_is_lost": (),
    "tests/cli/test_demo.py::test_nothing_is_lost_on_jax": (),
    # There is a test of two workers with one device each.
    "tests/keras/test_multi_worker.py::test_two_devices_in_each_worker_come_close": (),
    # A loop that loads compiled functions; a fit stays.
    "tests/multiprocess/test_jax_loops.py::test_process_0_loads_compiled_functions": (),
    # Each kind of data and each line of Keras once.
    "tests/keras/test_matrix.py::test_equals_a_run_without_interruption": (
        "keras-sequence-2-1-validation-plain",
        "tf_keras-tfdata-2-4-middle-plain",
        "jax-arrays-1-1-random-uncompiled",
        "jax-generator-1-1-random-float16",
    ),
    # Each kind of data and each interruption has a test of one process.
    "tests/multiprocess/test_fit.py::test_two_workers": ("keras-tfdata-three",),
    "tests/multiprocess/test_fit.py::test_one_process": ("tf_keras-generator-twice",),
    "tests/multiprocess/test_fit.py::test_each_kind_of_data": (
        "index-twice",
        "loader-ended",
    ),
    # Both directions; each kind of data has tests on one backend.
    "tests/multiprocess/test_either_backend.py::"
    "test_variables_and_position_are_equal": ("arrays",),
    "tests/multiprocess/test_either_backend.py::"
    "test_without_tensorflow_a_new_order_is_named": (),
    "tests/multiprocess/test_snapshots.py::test_so_does_a_killed_fit": ("keras",),
    # Each strategy, form and style.
    "tests/multiprocess/test_exact_resume.py::test_one_process": (
        "one_device-checkpoint-run",
        "mirrored-manager-save",
        "mwms-checkpoint-save",
    ),
    # A fit on JAX in two processes; loops show the loss of a process.
    "tests/multiprocess/test_jax_fit.py::test_a_distributed_fit_resumes_exactly": (
        "arrays",
    ),
    "tests/multiprocess/test_jax_fit.py::"
    "test_a_peer_of_a_fit_that_is_killed_under_a_notice_costs_no_hang": (),
    "tests/multiprocess/test_jax_fit.py::"
    "test_divided_variables_are_restored_on_other_meshes": (),
    "tests/multiprocess/test_jax_fit.py::"
    "test_processes_that_cannot_save_one_state_are_an_error": (),
    "tests/docs/test_fit_pages.py::test_keras_on_jax_in_two_processes": (),
    # Clusters of several forms; another test restarts each form, too.
    "tests/multiprocess/test_exact_resume.py::test_real_clusters": (
        "2-checkpoint-run-nothing",
        "4-manager-run-handler",
    ),
    "tests/multiprocess/test_snapshots.py::"
    "test_a_killed_worker_loses_the_steps_after_the_snapshot": ("2-tensorflow",),
    "tests/multiprocess/test_remote.py::test_trains_until_the_worker_exits": ("more0",),
    # Other tests notify all workers.
    "tests/multiprocess/test_lifecycle.py::test_a_long_grace_period_has_two_commits": (
        "victims1",
    ),
    # Two workers; other tests have a single worker.
    "tests/multiprocess/test_urls.py::test_machines_that_are_lost": ("mwms-2-more1",),
    "tests/multiprocess/test_lease.py::"
    "test_a_cluster_that_lost_its_lease_commits_nothing_and_leaves_as_lost": (
        "mwms-2",
    ),
    # With arrays of both kinds: equal in all processes, and divided.
    "tests/multiprocess/test_jax_loops.py::test_two_processes_resume_exactly": (
        "sharded",
    ),
    "tests/multiprocess/test_cached_data.py::"
    "test_a_run_killed_in_its_first_epoch_is_started_again": (
        "keras-kills0",
        "loop-kills2",
    ),
    # The newest form; another test compares the files of each kind.
    "tests/checkpoint/test_kept.py::"
    "test_so_is_one_of_two_workers_of_states_alone_and_of_a_mirror": (
        "08-2026-11-26-states",
    ),
    # Fewer steps of more batches.
    "tests/keras/test_many_fits.py::test_interrupted_at_every_step_of_many_batches": (
        "20-begins1-keras",
    ),
    "tests/data/test_distribute.py::"
    "test_every_replica_gets_its_batches_and_resumes_at_a_position": ("mirrored-2-1",),
    # Each kind of pipeline; those that need rules of their own stay.
    "tests/checkpoint/test_shuffle_seeds.py::test_a_state_of_any_step_is_exact": (
        "repeated before the batch",
        "batches over the end",
        "two shuffles",
        "files",
        "cached",
        "concatenated",
        "sampled",
        "random numbers",
        "by keys",
        "not reshuffled",
    ),
    "tests/data/test_elastic.py::"
    "test_a_position_in_other_units_is_not_one_in_global_batches": (
        "loop-auto-first1-second1",
    ),
    "tests/data/test_elastic.py::"
    "test_replicas_that_cannot_share_a_batch_equally_are_refused": (),
    "tests/data/test_elastic.py::"
    "test_the_global_batches_are_those_of_the_undisturbed_run": (
        "loop-index",
        "fit-sequence",
    ),
}
"""Functions that take minutes, with the cases that `make test` runs all the same."""

FITS = "tests/keras/"


def thorough(items: Sequence[pytest.Item], named: Collection[str]) -> Iterator[str]:
    """Yields the node ids of the thorough tests.

    Args:
        items: tests that were collected.
        named: node ids of tests that docs/reliability-tests.md names, with or without
            case.
    """
    seen: dict[str, set[tuple[str, int | str]]] = defaultdict(set)
    # The named cases first: the values that they contain need no further case.
    for item in sorted(items, key=lambda item: item.nodeid not in named):
        function, _, case = item.nodeid.removesuffix("]").partition("[")
        # In FITS all cases count as one.
        parameters = {} if function.startswith(FITS) else parameters_of(item)
        values: set[tuple[str, int | str]] = {("", function), *parameters.items()}
        is_repeated = needs_tensorflow(item) and values <= seen[function]
        seen[function] |= values
        listed = TESTS.get(function)
        is_left_out = is_repeated if listed is None else case not in listed
        is_left_out |= runs_on_jax_too(item)
        if is_left_out and (item.nodeid not in named or function in NAMED):
            yield item.nodeid


def parameters_of(item: pytest.Item) -> dict[str, int]:
    """Returns an identity for each value of a case, by name of the parameter."""
    case = getattr(item, "callspec", None)
    return {} if case is None else {k: identity(v) for k, v in case.params.items()}


def runs_on_jax_too(item: pytest.Item) -> bool:
    """Returns whether a test is the case on JAX of a test of both frameworks."""
    case = getattr(item, "callspec", None)
    return case is not None and case.params.get("framework") == "jax"


def identity(value: object) -> int:
    """Returns a number that is the same for equal values, if these have a hash."""
    try:
        return hash((type(value), value))
    except TypeError:
        return id(value)


def needs_tensorflow(item: pytest.Item) -> bool:
    """Returns whether a test is slow; `make test` runs all cases of other tests."""
    return not {"tensorflow", "multiprocess"}.isdisjoint(item.keywords)
