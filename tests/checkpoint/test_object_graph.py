"""A save with a known object graph has the keys and values of TensorFlow's own save."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tests.checkpoint.fakes import watch_searches  # noqa: E402
from tests.checkpoint.test_bundle_writer import Holder, assert_same  # noqa: E402
from tfpreempt.checkpoint.bundles import bundle_writer  # noqa: E402
from tfpreempt.checkpoint.directory.retention import RetentionPolicy  # noqa: E402
from tfpreempt.checkpoint.restore import opening  # noqa: E402
from tfpreempt.checkpoint.restore.save import Save  # noqa: E402
from tfpreempt.checkpoint.tensors import gather  # noqa: E402
from tfpreempt.checkpoint.tensors.iterator_state import keep_seeds  # noqa: E402
from tfpreempt.checkpoint.tensors.variables import attach  # noqa: E402
from tfpreempt.core import private_api  # noqa: E402
from tfpreempt.storage.files import LocalFiles  # noqa: E402


class Saves:
    """Saves of one checkpoint that share the knowledge of its object graph.

    Args:
        checkpoint: checkpoint to save.
        folder: directory of the saves.
    """

    def __init__(self, checkpoint, folder):
        self.checkpoint = checkpoint
        self.folder = folder
        self.searches = 0  # saves in which TensorFlow searched all objects

    def prepare(self):
        """Searches ahead of the first save; returns whether there was a search."""
        found = attach(self.checkpoint)
        gather.prepare(self.checkpoint, found)
        return found.graph.search is not None

    def save(self):
        """Saves, and compares all bytes with TensorFlow's files."""
        saver = self.checkpoint._saver
        find = type(saver)._gather_serialized_tensors

        def count(*args):
            self.searches += 1
            return find(saver, *args)

        graph = attach(self.checkpoint).graph
        prefix = str(self.folder / f"{len(list(self.folder.iterdir()))}")
        self.checkpoint.write(prefix + "-stock")
        large = gather.LargeTensors(small_bytes=0, worth_bytes=0)
        saver._gather_serialized_tensors = count
        with gather.reading(self.checkpoint, are_others=False, graph=graph) as read:
            read.extract = large.extract
            self.checkpoint.write(prefix)
        vars(saver).pop("_gather_serialized_tensors", None)
        bundle_writer.add(LocalFiles(), prefix, large.found, 2)
        assert_same(prefix)


def dense(*shape):
    return tf.Variable(np.random.default_rng(3).random(shape, np.float32))


def make():
    """A checkpoint with an object, a list and a variable that has two names."""
    shared = dense(5)
    part = tf.Module()
    part.kernel, part.bias, part.shared = dense(3, 4), dense(4), shared
    return tf.train.Checkpoint(part=part, blocks=[dense(2), dense(2)], shared=shared)


def assign(checkpoint):
    checkpoint.part.kernel.assign_add(tf.ones([3, 4]))
    checkpoint.blocks[1].assign([7.0, 8.0])


def add(checkpoint):
    checkpoint.part.more = dense(2, 2)


def append(checkpoint):
    checkpoint.blocks.append(dense(6))


def remove(checkpoint):
    del checkpoint.part.bias


def replace(checkpoint):
    checkpoint.part.kernel = dense(3, 4)
    checkpoint.part.kernel.assign_add(tf.ones([3, 4]))


def swap(checkpoint):
    part = checkpoint.part
    part.kernel, part.bias = part.bias, part.kernel


def name_twice(checkpoint):
    checkpoint.part.other = checkpoint.blocks[0]


def assign_rows(checkpoint):
    """From then on TensorFlow copies the variable when it is read."""
    checkpoint.part.kernel.scatter_update(tf.IndexedSlices(tf.ones([1, 4]), [1]))


def count(checkpoint):
    checkpoint.save_counter.assign_add(1)


@pytest.mark.parametrize(
    ("change", "searches"),
    [
        (assign, 1),
        (assign_rows, 1),
        (count, 1),
        (add, 2),
        (append, 2),
        (remove, 2),
        (replace, 2),
        (swap, 2),
        (name_twice, 2),
    ],
)
@pytest.mark.parametrize("is_prepared", [False, True])
def test_only_a_changed_graph_is_searched_again(
    change, searches, is_prepared, tmp_path
):
    """Whether a save has searched before, or a preparation."""
    checkpoint = make()
    _ = checkpoint.save_counter
    saves = Saves(checkpoint, tmp_path)
    if is_prepared:
        assert saves.prepare()
        searches -= 1
    else:
        saves.save()
    change(checkpoint)
    saves.save()
    assert saves.searches == searches
    saves.save()
    assert saves.searches == searches


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_variable_of_which_rows_were_assigned_is_saved_as_it_is_now(
    is_copied, tmp_path, monkeypatch
):
    monkeypatch.setattr(gather, "_UNCOPIED_BYTES", 1000 if is_copied else 0)
    checkpoint = make()
    saves = Saves(checkpoint, tmp_path)
    saves.save()
    for _ in range(2):
        assign_rows(checkpoint)
        saves.save()
        assign(checkpoint)
        saves.save()


def test_more_variables_than_an_operation_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "_READ_AT_ONCE", 3)
    checkpoint = tf.train.Checkpoint(
        floats=[dense(2) for _ in range(7)],
        numbers=[tf.Variable(number) for number in range(6)],
        empty=tf.Variable(tf.zeros([0, 3])),
        scalar=tf.Variable(2.5, dtype=tf.bfloat16),
    )
    saves = Saves(checkpoint, tmp_path)
    saves.save()
    for number, variable in enumerate([*checkpoint.floats, *checkpoint.numbers]):
        variable.assign_add(tf.cast(tf.fill(variable.shape, number), variable.dtype))
    saves.save()
    assert saves.searches == 1


@pytest.mark.parametrize("search", ["prepare", "save"])
def test_the_memory_of_a_dropped_object_is_not_kept(search, tmp_path):
    checkpoint = make()
    saves = Saves(checkpoint, tmp_path)
    getattr(saves, search)()
    dropped = weakref.ref(checkpoint.part.kernel)
    checkpoint.part.kernel = dense(1)
    gc.collect()
    assert dropped() is None
    saves.save()


def test_an_iterator_and_an_object_that_saves_itself(tmp_path):
    iterator = iter(tf.data.Dataset.range(50).shuffle(9, seed=1).batch(2))
    holder = Holder({"a": tf.constant([1.0, 2.0]), "b/c": tf.constant("text")})
    checkpoint = tf.train.Checkpoint(data=iterator, holder=holder, v=dense(3))
    saves = Saves(checkpoint, tmp_path)
    saves.save()
    next(iterator)
    holder.tensors = {"a": tf.constant([3.0]), "b/c": tf.constant("another")}
    saves.save()
    assert saves.searches == 1
    holder.tensors = {"a": tf.constant([3.0]), "d": tf.constant(4)}
    saves.save()
    assert saves.searches == 2


class Watched(Holder):
    """Counts how often its values are asked for."""

    asked = 0

    def _serialize_to_tensors(self):
        self.asked += 1
        return super()._serialize_to_tensors()


def test_a_preparation_calls_no_code_of_the_program(tmp_path):
    watched = Watched({"a": tf.constant([1.0, 2.0])})
    saves = Saves(tf.train.Checkpoint(watched=watched, v=dense(3)), tmp_path)
    assert not saves.prepare()
    assert watched.asked == 0
    saves.save()
    assert saves.searches == 1


@pytest.mark.parametrize("has_seeds", [False, True])
def test_a_preparation_serializes_no_iterator(has_seeds, tmp_path, monkeypatch):
    iterator = iter(tf.data.Dataset.range(50).shuffle(9, seed=1).batch(2))
    if has_seeds:
        keep_seeds(iterator)
    serialize = iterator._serialize_to_tensors
    saves = Saves(tf.train.Checkpoint(data=iterator, v=dense(3)), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(type(iterator), "_serialize_to_tensors", None)
        assert saves.prepare()
    assert iterator._serialize_to_tensors == serialize
    next(iterator)
    saves.save()
    assert saves.searches == 0


def test_a_preparation_reads_no_variable_that_needs_all_workers(tmp_path):
    """TensorFlow's search reads an attribute, and so the variable."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        unreadable = tf.Variable(
            [1.0, 2.0],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE,
            trainable=False,
        )
    saves = Saves(tf.train.Checkpoint(v=unreadable, w=dense(3)), tmp_path)
    assert not saves.prepare()


def test_an_object_that_has_nothing_to_save_at_first(tmp_path):
    holder = Holder({})
    saves = Saves(tf.train.Checkpoint(holder=holder, v=dense(3)), tmp_path)
    saves.save()
    holder.tensors = {"a": tf.constant([3.0])}
    saves.save()


class Shifted(private_api.trackable_base.Trackable):
    """Saves another value than the value of its variable."""

    def __init__(self, attribute):
        self.attribute = attribute
        setattr(self, attribute, dense(2))

    def _serialize_to_tensors(self):
        return {"shifted": getattr(self, self.attribute) + 1.0}

    def _restore_from_tensors(self, restored):
        """Is not restored here."""


@pytest.mark.parametrize("attribute", ["_value", "_variable", "obj"])
def test_an_object_around_a_variable_saves_its_own_value(attribute, tmp_path):
    shifted = Shifted(attribute)
    inner = getattr(shifted, attribute)
    saves = Saves(tf.train.Checkpoint(v=inner, shifted=shifted), tmp_path)
    saves.save()
    inner.assign_add([1.0, 2.0])
    saves.save()


class Switching(tf.Module):
    """Gets the class `Saving` during training."""

    def __init__(self):
        super().__init__()
        self.value = tf.Variable(1.0)


class Saving(Switching):
    def _serialize_to_tensors(self):
        return {"more": tf.constant(2.0)}

    def _restore_from_tensors(self, restored):
        pass


def test_an_object_that_gets_another_class_saves_as_that_class(tmp_path):
    part = Switching()
    saves = Saves(tf.train.Checkpoint(part=part), tmp_path)
    saves.save()
    part.__class__ = Saving
    saves.save()
    assert saves.searches == 2


def test_a_save_reads_the_variable_that_a_property_returns_now(tmp_path):
    keras = pytest.importorskip("keras")

    class Moving(keras.Variable):
        number = 0

        @property
        def _value(self):
            return self.__dict__["all"][self.number]

        @_value.setter
        def _value(self, value):
            self.__dict__.setdefault("all", []).append(value)

    moving = Moving([1.0, 2.0])
    moving._value = tf.Variable([3.0, 4.0])
    saves = Saves(tf.train.Checkpoint(moving=moving), tmp_path)
    saves.save()
    vars(moving)["number"] = 1
    saves.save()


def test_small_variables_are_not_divided_among_workers(tmp_path):
    """All workers find the same tensors in each save: no small tensors."""
    checkpoint = tf.train.Checkpoint(large=dense(100), small=dense(2))
    graph = attach(checkpoint).graph
    for number in range(2):
        large = gather.LargeTensors(
            small_bytes=100, worth_bytes=0, is_replicated=lambda variable: True
        )
        with gather.reading(checkpoint, are_others=False, graph=graph) as read:
            read.extract = large.extract
            checkpoint.write(str(tmp_path / f"{number}"))
        dealt = [each.name.split("/")[0] for each in large.found if each.is_replicated]
        assert dealt == ["large"]


def test_a_preparation_for_variables_that_a_strategy_keeps_equal(tmp_path):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        mirrored = dense(4, 2)
    saves = Saves(tf.train.Checkpoint(a=mirrored, c=dense(3)), tmp_path)
    assert saves.prepare()
    mirrored.assign_add(tf.ones([4, 2]))
    saves.save()
    assert saves.searches == 0


def test_variables_of_a_strategy(tmp_path):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        mirrored = dense(4, 2)
        on_read = tf.Variable(
            [1.0, 2.0],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            trainable=False,
        )
    saves = Saves(tf.train.Checkpoint(a=mirrored, b=on_read, c=dense(3)), tmp_path)
    saves.save()
    mirrored.assign_add(tf.ones([4, 2]))
    on_read.values[0].assign([5.0, 6.0])
    saves.save()
    assert saves.searches == 1


def test_a_model_that_is_compiled_again_and_changes_a_layer(tmp_path):
    keras = pytest.importorskip("keras")
    first, last = keras.layers.Dense(3), keras.layers.Dense(2)
    model = keras.Sequential([keras.Input((4,)), first, last])
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saves = Saves(checkpoint, tmp_path)
    data = np.ones((4, 4), np.float32), np.ones((4, 2), np.float32)
    model.fit(*data, verbose=0)
    saves.save()
    model.fit(*data, verbose=0)
    saves.save()
    assert saves.searches == 1
    model.compile(optimizer=keras.optimizers.SGD(momentum=0.9), loss="mse")
    checkpoint.optimizer = model.optimizer
    model.fit(*data, verbose=0)
    saves.save()
    assert saves.searches == 2
    last.kernel._value = tf.Variable(tf.zeros([3, 2]))  # as a quantization does
    saves.save()


def test_slots_of_an_old_optimizer_that_are_made_later(tmp_path):
    tf_keras = pytest.importorskip("tf_keras")
    optimizer = tf_keras.optimizers.legacy.Adam()
    variable = dense(3)
    saves = Saves(tf.train.Checkpoint(v=variable, optimizer=optimizer), tmp_path)
    assert not saves.prepare()  # a save could not use the result
    saves.save()
    optimizer.apply_gradients([(tf.ones([3]), variable)])
    saves.save()
    optimizer.apply_gradients([(tf.ones([3]), variable)])
    saves.save()


def test_a_variable_without_a_value(tmp_path):
    make = private_api.resource_variable_ops.UninitializedVariable
    variable = make(shape=[2], dtype=tf.float32)
    saves = Saves(tf.train.Checkpoint(v=variable, w=dense(3)), tmp_path)
    assert not saves.prepare()
    saves.save()
    saves.save()
    variable.assign([1.0, 2.0])
    saves.save()


@pytest.fixture
def searches(monkeypatch):
    """An item for each search of TensorFlow."""
    found = []
    watch_searches(monkeypatch, lambda: found.append(1))
    return found


def test_the_second_commit_of_a_directory_makes_no_search(tmp_path, searches):
    """The first commit makes the checkpoint's counter of saves, and knows it."""
    checkpoint = make()
    directory = opening.open_directory(
        checkpoint, tmp_path / "run", policy=RetentionPolicy(max_to_keep=None)
    )
    directory.start()
    for step in (1, 2):
        save = Save(directory, step, f"test-{step}")
        save.capture()
        save.write()
        commit = save.publish("save", [0])
        found = tf.train.load_checkpoint(f"{commit.path}/ckpt")
        assert found.get_tensor("save_counter/.ATTRIBUTES/VARIABLE_VALUE") == step
    assert len(searches) == 1


def test_two_directories_of_one_checkpoint_share_a_search(tmp_path, searches):
    """Such as the commits and the snapshots of a run."""
    checkpoint = make()
    _ = checkpoint.save_counter
    for number in range(2):
        folder = tmp_path / f"{number}"
        directory = opening.open_directory(checkpoint, folder, is_second=number == 1)
        directory.start()
        directory.contents.prepare()
        save = Save(directory, 1, f"test-{number}")
        save.capture()
        save.discard()
    assert len(searches) == 1


def test_a_save_fn_needs_no_preparation(tmp_path, searches):
    """The save_fn may save another checkpoint."""
    directory = opening.open_directory(
        make(), tmp_path / "run", save_fn=lambda: str(tmp_path / "other")
    )
    directory.contents.prepare()
    assert searches == []


def test_a_preparation_that_fails_is_a_warning(tmp_path, monkeypatch, caplog):
    checkpoint = make()
    directory = opening.open_directory(checkpoint, tmp_path / "run")

    def fail(*args):
        raise ValueError("two objects have one key")

    monkeypatch.setattr(checkpoint._saver, "_gather_serialized_tensors", fail)
    directory.contents.prepare()
    assert "two objects have one key" in caplog.text
