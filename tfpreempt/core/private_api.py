"""The private names of TensorFlow, Keras and JAX, by the feature that needs them.

TensorFlow and JAX have no public access to their coordination services. TensorFlow has
no public access to the order in which a checkpoint is saved, or to an iterator's
position in its data; Keras has none to the loop of `fit`. Private names may disappear
with any release. So:

- Private modules are attributes of this module, such as `private_api.eager_context`.
  `MODULES` has the names; a module is imported on first access.
- `FEATURES` lists the private names that tfpreempt uses, for every feature.
- Code that needs a feature calls `check_available` before training. So a missing name
  is reported before training, with the name in the message, and not during a save.
- There is no upper bound on versions: any release with the names is used. If the minor
  version is missing in `SEEN`, a log line says so.
  tests/contracts/test_private_api.py checks every name, in every cell of `make matrix`.

Private attributes of the callbacks of Keras are not here, but in
`keras/callbacks/builtin_callbacks.py`, which skips a name missing in a version.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any

from tfpreempt import errors
from tfpreempt.core import object_graph

log = logging.getLogger(__name__)

SEEN = {
    "tensorflow": (
        *("2.16.2", "2.17.1", "2.18.1", "2.19.1"),
        *("2.20.0", "2.21.0", "2.22.0rc0"),
    ),
    "keras": (
        *("3.7.0", "3.8.0", "3.9.2", "3.10.0", "3.11.3", "3.12.4", "3.13.2", "3.14.1"),
        *("3.15.1", "3.16.0.dev2026102704"),
    ),
    "tf_keras": ("2.16.0", "2.17.0", "2.18.0", "2.19.0", "2.20.1", "2.21.0"),
    "jax": ("0.6.2", "0.10.2", "0.12.0.1"),
}
"""Versions with which the compatibility matrix or all tests passed."""

_TF, _KERAS, _OLD = "tensorflow.python.", "keras.src.", "tf_keras.src."

MODULES = {
    "cache_op": _TF + "data.ops.cache_op",
    "checkpoint": _TF + "checkpoint.checkpoint",
    "checkpoint_context": _TF + "checkpoint.checkpoint_context",
    "checkpoint_management": _TF + "checkpoint.checkpoint_management",
    "checkpoint_restore": _TF + "checkpoint.restore",
    "concatenate_op": _TF + "data.ops.concatenate_op",
    "data_distribute": _TF + "data.experimental.ops.distribute",
    "data_structures": _TF + "trackable.data_structures",
    "dataset_ops": _TF + "data.ops.dataset_ops",
    "dataset_pb2": "tensorflow.core.framework.dataset_pb2",
    "distribute_values": _TF + "distribute.values",
    "directed_interleave_op": _TF + "data.ops.directed_interleave_op",
    "eager_context": _TF + "eager.context",
    "eager_execute": _TF + "eager.execute",
    "functional_saver": _TF + "checkpoint.functional_saver",
    "gen_dataset_ops": _TF + "ops.gen_dataset_ops",
    "graph_view": _TF + "checkpoint.graph_view",
    "input_lib": _TF + "distribute.input_lib",
    "io_ops": _TF + "ops.io_ops",
    "iterator_ops": _TF + "data.ops.iterator_ops",
    "moving_averages": _TF + "training.moving_averages",
    "multi_device_iterator_ops": _TF + "data.ops.multi_device_iterator_ops",
    "object_identity": _TF + "util.object_identity",
    "polymorphic_function": _TF + "eager.polymorphic_function.polymorphic_function",
    "random_op": _TF + "data.ops.random_op",
    "range_op": _TF + "data.ops.range_op",
    "registration": _TF + "saved_model.registration",
    "resource_variable_ops": _TF + "ops.resource_variable_ops",
    "saveable_compat": _TF + "checkpoint.saveable_compat",
    "saveable_object": _TF + "training.saving.saveable_object",
    "saveable_object_util": _TF + "training.saving.saveable_object_util",
    "shuffle_op": _TF + "data.ops.shuffle_op",
    "skip_op": _TF + "data.ops.skip_op",
    "stateful_random_ops": _TF + "ops.stateful_random_ops",
    "tensor_pb2": "tensorflow.core.framework.tensor_pb2",
    "trackable_base": _TF + "trackable.base",
    "trackable_utils": _TF + "trackable.trackable_utils",
    "jax_client": "jaxlib._jax",
    "jax_distributed": "jax._src.distributed",
    "jax_lax": "jax._src.lax.lax",
    "keras_data": _KERAS + "trainers.data_adapters.data_adapter_utils",
    "keras_distribution": _KERAS + "distribution.distribution_lib",
    "keras_jax_trainer": _KERAS + "backend.jax.trainer",
    "keras_rng": _KERAS + "utils.rng_utils",
    "keras_array_adapter": _KERAS + "trainers.data_adapters.array_data_adapter",
    "keras_callback_list": _KERAS + "callbacks.callback_list",
    "keras_generator_adapter": _KERAS + "trainers.data_adapters.generator_data_adapter",
    "keras_layer": _KERAS + "layers.layer",
    "keras_py_dataset_adapter": _KERAS + "trainers.data_adapters.py_dataset_adapter",
    "keras_seeds": _KERAS + "random.seed_generator",
    "keras_tf_dataset": _KERAS + "trainers.data_adapters.tf_dataset_adapter",
    "keras_trainer": _KERAS + "backend.tensorflow.trainer",
    "keras_variables": _KERAS + "backend.common.variables",
    "tf_keras_backend": _OLD + "backend",
    "tf_keras_data": _OLD + "engine.data_adapter",
    "tf_keras_training": _OLD + "engine.training",
}
"""The import path of every private module, by the module's short name."""

RENAMED = {
    "JAXTrainer": "Trainer",  # since Keras 3.16
    "TensorFlowTrainer": "Trainer",  # since Keras 3.16
    "_flush_futures": "_clear_futures",  # before Keras 3.12
}
"""For some names of `FEATURES`, the name that other versions have in its place."""

OPTIONAL = {
    "CheckpointPosition.has_non_trivial_reshard_callback",  # after TensorFlow 2.16
    "PyDatasetAdapter._epoch",  # since Keras 3.16
    "TensorFlowTrainer._autoconvert_optionals",  # since Keras 3.12
    "get_random_seed",  # since Keras 3.10
    "is_nnx_enabled",  # since Keras 3.11
}
"""Names that exist only in some versions; `check_available` accepts their absence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrivateApiGroup:
    """A feature of tfpreempt, and the private names needed by the feature.

    Attributes:
        what: description of the feature, for the error message.
        names: private names in each module, by the module's key in `MODULES`. The names
            are separated by spaces: "function" or "Class" of the module;
            "Class.one,two" for attributes of a class, or attributes set by its methods;
            "Class.method:one,two" for local variables of a method.
    """

    what: str
    names: dict[str, str]

    def each(self) -> Iterator[tuple[str, str]]:
        """Yields (key of the module in `MODULES`, name) for every name."""
        for module, names in self.names.items():
            for owner, last in re.findall(r"(\S+[.:])?([^\s.:]+)", names):
                for name in last.split(","):
                    yield module, owner + name


FEATURES = {
    "checkpoints": PrivateApiGroup(
        what="every handler and callback",
        names={
            "checkpoint": "object_metadata Checkpoint._saver "
            "CheckpointLoadStatus._checkpoint "
            "TrackableSaver._gather_serialized_tensors,_graph_view "
            "_CheckpointRestoreCoordinator "
            "_CheckpointRestoreCoordinator.restore_saveables",
            "checkpoint_context": "preemption_save_context",
            "checkpoint_restore": "CheckpointPosition "
            "CheckpointPosition.gather_ops_or_named_saveables,"
            "has_non_trivial_reshard_callback",
            "data_structures": "TrackableDataStructure",
            "distribute_values": "DistributedVariable",
            "eager_context": "context global_seed Context._rng,_seed,_set_global_seed,"
            "host_address_space",
            "eager_execute": "execute",
            "functional_saver": "io_ops",
            "graph_view": "ObjectGraphView.breadth_first_traversal,list_children",
            "io_ops": "restore_v2",
            "iterator_ops": "OwnedIterator",
            "moving_averages": "ExponentialMovingAverage._averages",
            "object_identity": "ObjectIdentityDictionary",
            "registration": "get_registered_saver_name",
            "resource_variable_ops": "BaseResourceVariable "
            "BaseResourceVariable._gather_saveables_for_checkpoint,"
            "_restore_from_tensors,_serialize_to_tensors",
            "saveable_compat": "get_saveable_name",
            "saveable_object": "SaveSpec SaveSpec._tensor",
            "saveable_object_util": "SaveableCompatibilityConverter "
            "saveable_objects_from_trackable trackable_has_serialize_to_tensor",
            "stateful_random_ops": "global_generator",
            "trackable_base": "Trackable Trackable._gather_saveables_for_checkpoint,"
            "_self_unconditional_checkpoint_dependencies,_serialize_to_tensors,"
            "_trackable_children,_update_uid",
            "trackable_utils": "checkpoint_key escape_local_name extract_object_name",
        },
    ),
    "traced_steps": PrivateApiGroup(
        what="naming the random ops of a step",
        names={
            "polymorphic_function": "Function._descriptor_cache,"
            "_list_all_concrete_functions",
        },
    ),
    "iterators": PrivateApiGroup(
        what="saving the position of a tf.data iterator",
        names={
            "dataset_ops": "DatasetV2._functions,_inputs,_variant_tensor",
            "dataset_pb2": "CompressedElement",
            "directed_interleave_op": "_DirectedInterleaveDataset."
            "_stop_on_empty_dataset",
            "gen_dataset_ops": "dataset_to_graph_v2 map_dataset serialize_iterator",
            "iterator_ops": "OwnedIterator._dataset,_iterator_resource,"
            "_restore_from_tensors,_serialize_to_tensors",
            "random_op": "_RandomDataset._rerandomize",
            "range_op": "_RangeDataset._start",
            "shuffle_op": "_ShuffleDataset._reshuffle_each_iteration",
            "skip_op": "_SkipDataset",
            "tensor_pb2": "TensorProto VariantTensorDataProto",
        },
    ),
    "manager": PrivateApiGroup(
        what="saving by a tf.train.CheckpointManager",
        names={
            "checkpoint_management": "CheckpointManager._last_checkpoint_step,"
            "_last_preserved_timestamp,_latest_checkpoint,_max_to_keep,_maybe_delete,"
            "_prefix,_record_state,_step_counter,_sweep",
        },
    ),
    "coordination": PrivateApiGroup(
        what="agreeing with other workers by TensorFlow's coordination service",
        names={
            "eager_context": "context Context.delete_config_key_value,"
            "get_config_key_value,get_task_states,report_error_to_cluster,"
            "set_config_key_value",
        },
    ),
    "jax_arrays": PrivateApiGroup(
        what="PyTreeState", names={"jax_lax": "_convert_element_type"}
    ),
    "jax_coordination": PrivateApiGroup(
        what="agreeing with other processes by JAX's coordination service",
        names={
            "jax_client": "DistributedRuntimeClient.blocking_key_value_get,"
            "key_value_delete,key_value_set",
            "jax_distributed": "State.client,num_processes,process_id global_state",
        },
    ),
    "remote_cluster": PrivateApiGroup(
        what="connect_to_cluster()",
        names={
            "eager_context": "context Context._context_handle,"
            "configure_coordination_service,delete_config_key_value,"
            "get_config_key_value",
        },
    ),
    "pipelines": PrivateApiGroup(
        what="saving the position in the data of model.fit",
        names={
            "cache_op": "CacheDataset._filename",
            "concatenate_op": "_ConcatenateDataset",
            "shuffle_op": "_ShuffleDataset._buffer_size,_reshuffle_each_iteration,"
            "_seed,_seed2",
        },
    ),
    "distributed_data": PrivateApiGroup(
        what="saving the position in the data under a strategy",
        names={
            "data_distribute": "compute_batch_size",
            "gen_dataset_ops": "make_iterator multi_device_iterator_init",
            "input_lib": "DistributedDataset._cardinality,_element_spec,"
            "_enable_get_next_as_optional,_input_context,_input_workers,"
            "_num_replicas_in_sync,_original_dataset,_replica_order,_strategy "
            "DistributedDatasetsFromFunction._datasets DistributedIterator._iterators "
            "DistributedIteratorSpec._cardinality,_component_specs,_element_spec,"
            "_enable_get_next_as_optional,_input_workers,_options,_replica_order,"
            "_strategy InputWorkers.compute_devices_for_worker,num_workers,"
            "worker_devices _SingleWorkerDatasetIteratorSpec._element_spec",
            "multi_device_iterator_ops": "OwnedMultiDeviceIterator._device_iterators,"
            "_multi_device_iterator_resource",
            "resource_variable_ops": "ResourceVariable",
            "trackable_base": "Trackable._track_trackable",
        },
    ),
    "keras_fit_data": PrivateApiGroup(
        what="PreemptionCallback in model.fit of Keras 3",
        names={
            "keras_array_adapter": "ArrayDataAdapter._get_iterator,_shuffle",
            "keras_callback_list": "CallbackList._flush_futures",
            "keras_generator_adapter": "GeneratorDataAdapter.generator",
            "keras_py_dataset_adapter": "PyDatasetAdapter._epoch,_standardize_batch,"
            "enqueuer,py_dataset,shuffle",
            "keras_seeds": "SeedGenerator backend global_state",
        },
    ),
    "keras_fit_jax": PrivateApiGroup(
        what="PreemptionCallback in model.fit of Keras 3 on JAX",
        names={
            "keras_data": "get_jax_iterator",
            "keras_distribution": "distribution",
            "keras_jax_trainer": "JAXEpochIterator JAXEpochIterator._current_iterator,"
            "_enumerate_iterator,_get_iterator,_num_batches,_steps_seen,data_adapter "
            "JAXTrainer._get_jax_state,_get_metrics_result_or_logs,_initial_epoch,"
            "_jax_state,_jax_state_synced,_should_eval,jax_state_sync "
            "JAXTrainer.fit:epoch_iterator,callbacks,epoch_logs,validation_data,x "
            "JAXTrainer.evaluate:use_cached_eval_dataset is_nnx_enabled",
            "keras_rng": "get_random_seed",
            "keras_tf_dataset": "TFDatasetAdapter TFDatasetAdapter._dataset",
        },
    ),
    "keras_fit_distribution": PrivateApiGroup(
        what="PreemptionCallback in model.fit of Keras 3 on JAX with a distribution",
        names={
            "keras_distribution": "DeviceMesh.backend_mesh Distribution.device_mesh",
            "keras_jax_trainer": "_distribute_data",
        },
    ),
    "keras_fit": PrivateApiGroup(
        what="PreemptionCallback in model.fit of Keras 3 on TensorFlow",
        names={
            "keras_layer": "Layer._flatten_layers",
            "keras_trainer": "TFEpochIterator TFEpochIterator._current_iterator,"
            "_distributed_dataset,_enumerate_iterator,_num_batches,_steps_seen,"
            "data_adapter TensorFlowTrainer._get_metrics_result_or_logs,_initial_epoch,"
            "_should_eval,_symbolic_build TensorFlowTrainer.fit:epoch_iterator,"
            "callbacks,epoch_logs,validation_data,x "
            "TensorFlowTrainer._make_function:multi_step_on_iterator "
            "TensorFlowTrainer.evaluate:use_cached_eval_dataset",
            "keras_variables": "Variable._deferred_initialize,_initializer,_value",
        },
    ),
    "keras_workers": PrivateApiGroup(
        what="enable_multi_worker()",
        names={
            "keras_trainer": "TFEpochIterator._distributed_dataset "
            "TensorFlowTrainer._autoconvert_optionals,_distribute_strategy,"
            "_make_function,_maybe_symbolic_build,_symbolic_build "
            "_collective_all_reduce_multi_worker reduce_per_replica",
        },
    ),
    "tf_keras_fit": PrivateApiGroup(
        what="PreemptionCallback in model.fit of tf_keras",
        names={
            "tf_keras_backend": "RandomGenerator._built,_maybe_init,_rng_type",
            "tf_keras_data": "CompositeTensorDataAdapter DataHandler._adapter,"
            "_current_step,_dataset,_inferred_steps,_insufficient_data,"
            "_steps_per_execution GeneratorDataAdapter._standardize_batch "
            "GenericArrayLikeDataAdapter KerasSequenceAdapter._keras_sequence,"
            "_shuffle_sequence,_standardize_batch "
            "ListsOfScalarsDataAdapter TensorLikeDataAdapter._shuffle "
            "_make_class_weight_map_fn get_data_handler unpack_x_y_sample_weight",
            "tf_keras_training": "Model._flatten_layers,"
            "_maybe_load_initial_counters_from_ckpt,_should_eval,"
            "_validate_and_get_metrics_result Model.evaluate:use_cached_eval_dataset "
            "Model.fit:callbacks,data_handler,epoch_logs,validation_data,x",
        },
    ),
}


def __getattr__(name: str) -> Any:
    """Returns a module of `MODULES`, imported on first use."""
    if name not in MODULES:
        raise AttributeError(
            f"module 'tfpreempt.core.private_api' has no attribute {name!r}"
        )
    globals()[name] = module = importlib.import_module(MODULES[name])
    return module


def keras_trainer_class() -> Any:
    """Returns the Keras 3 class that defines `fit` for the TensorFlow backend."""
    trainer, old = __getattr__("keras_trainer"), "TensorFlowTrainer"
    return getattr(trainer, old, None) or getattr(trainer, RENAMED[old])


@functools.cache
def check_available(*features: str) -> None:
    """Checks, once per process, that the private names needed by features exist.

    Args:
        *features: keys of `FEATURES`.

    Raises:
        UnsupportedVersionError: a name is missing; the message names the missing name
            and a version to install.
    """
    for feature in features:
        if absent := list(missing(feature)):
            raise errors.UnsupportedVersionError(_advice(FEATURES[feature], absent))


def missing(feature: str) -> Iterator[str]:
    """Yields each missing name of a feature, as "import.path.of.module.name".

    If the module is missing, its import path is yielded once.
    """
    unknown: set[str] = set()
    for module, name in FEATURES[feature].each():
        try:
            found: Any = importlib.import_module(MODULES[module])
        except ImportError:
            if module not in unknown:
                unknown.add(module)
                yield MODULES[module]
            continue
        renamed = (name.replace(was, other) for was, other in RENAMED.items())
        is_there = any(_is_there(found, each) for each in (name, *renamed))
        if not is_there and name not in OPTIONAL:
            yield f"{MODULES[module]}.{name}"


def _is_there(module: Any, name: str) -> bool:
    path, _, local = name.partition(":")
    owner_name, _, attribute = path.partition(".")
    if not attribute:
        return hasattr(module, owner_name)
    if (owner := getattr(module, owner_name, None)) is None:
        return False
    if not local:
        return hasattr(owner, attribute) or attribute in object_graph.set_by(owner)
    code: Any = getattr(owner, attribute, None)
    code = getattr(inspect.unwrap(code), "__code__", None) if code else None
    return code is not None and local in code.co_varnames + code.co_cellvars


def _advice(feature: PrivateApiGroup, absent: list[str]) -> str:
    library = next(each for each in SEEN if absent[0].startswith(each))
    return (
        f"{library} {version(library)} lacks {', '.join(absent)}, which tfpreempt "
        f"needs for this feature: {feature.what}. tfpreempt was tested with {library} "
        f"{', '.join(SEEN[library])}. Install a tested version, such as "
        f"{library}=={_newest_final(library)}, or a newer tfpreempt. Other features "
        "of tfpreempt are not affected."
    )


def _newest_final(library: str) -> str:
    """Returns the newest version in `SEEN` that is no release candidate or nightly."""
    return [each for each in SEEN[library] if each.replace(".", "").isdecimal()][-1]


@functools.cache
def name_if_unseen(library: str) -> None:
    """Logs a warning, once per process, if a library's minor version is not in `SEEN`.

    Args:
        library: name of the imported library, a key of `SEEN`.
    """
    if not was_seen(library):
        final = _newest_final(library)
        log.warning(
            "not yet tested with %s %s; tested with %s. A resumed run may differ "
            "from an uninterrupted run: compare the two before you rely on the "
            "resume, or install %s==%s",
            *(library, version(library), ", ".join(SEEN[library]), library, final),
        )


def was_seen(library: str, found: str | None = None) -> bool:
    """Returns whether a library's minor version is listed in `SEEN`; by default the
    version of the imported library."""
    minor = (found or version(library)).split(".")[:2]
    return minor in [each.split(".")[:2] for each in SEEN[library]]


def version(library: str) -> str:
    """Returns the version of an imported library."""
    return str(importlib.import_module(library).__version__)
