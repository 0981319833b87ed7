"""Two real workers: sums of ON_READ variables in the chief's save, parts restored.

Variables that each worker sets separately: each worker's own value is restored, but
weights and large variables have the chief's values. A warning names them.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

pytestmark = pytest.mark.multiprocess
_WORKER = pathlib.Path(__file__).with_name("on_read_worker.py")


def run_workers(here, out, form):
    arguments = ["--form", form, "--out", out]
    workers = here.start(str(_WORKER), *arguments, world=2)
    workers.expect(0, 0)
    text = "variables had other values on this worker than on worker 0 in the"
    text += " interrupted run: bias, large."
    found = [text in worker.output for worker in workers]
    assert found == [False, True]
    return [json.loads((out / f"report-{i}.json").read_text()) for i in range(2)]


def value(hexed):
    return np.frombuffer(bytes.fromhex(hexed), np.float32)


@pytest.mark.parametrize("form", ["own", "threads", "manager"])
def test_reduced_values_are_saved_and_the_parts_are_restored_bit_for_bit(
    here, tmp_path, form
):
    chief, other = run_workers(here, tmp_path, form)
    assert chief["needs_peers"]
    assert chief["counter"] == other["counter"] == 2
    for report in (chief, other):
        assert report["restored_step"] == 4
        expected = report["parts"] | {"bias": chief["parts"]["bias"]}
        assert report["restored_parts"] == expected
        assert report["restored_next"] == report["next"]
        assert report["weights"] == [1.0, 2.0, 3.0]
        assert report["restored_local"] == report["local"]
        assert (report["large"], report["text"]) == (np.float32(1 / 7), str(1 / 7))
    assert chief["parts"]["bias"] != other["parts"]["bias"]
    assert chief["parts"]["total"] != other["parts"]["total"]
    assert chief["local"] != other["local"]
    assert chief["next"] != other["next"]
    assert chief["reduced"] == other["reduced"] | {"first": chief["reduced"]["first"]}
    stock = read_with_stock_tensorflow(tmp_path / "checkpoints")
    first = [value(r["parts"]["total"][0]) for r in (chief, other)]
    np.testing.assert_array_equal(stock["total"], first[0] + first[1])
    first = [value(r["parts"]["average"][0]) for r in (chief, other)]
    np.testing.assert_array_equal(stock["average"], (first[0] + first[1]) / 2)
    np.testing.assert_array_equal(stock["first"], value(chief["parts"]["first"][0]))
    first = [value(r["parts"]["keras_total"][0])[0] for r in (chief, other)]
    assert stock["keras_total"] == first[0] + first[1]
    written = [
        path.name
        for path in tmp_path.rglob("*")
        if path.is_file() and ".data-" in path.name and "elsewhere" in str(path)
    ]
    assert written == []  # the non-chief writes no payload
    data = list((tmp_path / "checkpoints").glob("4/ckpt.data-*"))
    assert (len(data) > 1) == (form == "threads")


def read_with_stock_tensorflow(directory):
    import tensorflow as tf

    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(directory)))
    return {
        name: reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")
        for name in ("total", "average", "first", "keras_total", "weights")
    }
