"""The models of the matrix on JAX: one for each kind in `matrix.KINDS`."""

from __future__ import annotations

from typing import Any

import jax


def make(keras: Any, kind: str, steps: int) -> Any:
    """Returns a compiled model without variables.

    Args:
        keras: Keras 3 on JAX.
        kind: name in `matrix.KINDS`.
        steps: steps_per_execution.
    """
    layers = [
        keras.layers.Dense(4, activation="relu", use_bias=False),
        keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(center=False, scale=False),
        keras.layers.Dense(1, use_bias=False),
    ]
    policy = "mixed_float16" if kind == "float16" else "float32"
    if kind == "float16":
        for layer in layers:
            layer.dtype_policy = keras.DTypePolicy(policy)
    cls = {"own_step": OwnStep, "own_loss": OwnLoss}.get(kind, lambda k: k.Sequential)
    model = cls(keras)(layers)
    if kind == "lora":
        model.build((None, 4))
        layers[0].enable_lora(2)
    options: dict[str, Any] = {
        "ema": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 7},
        "accumulating": {"gradient_accumulation_steps": 3},
    }.get(kind, {})
    optimizer = keras.optimizers.Adam(1e-2, **options)
    if kind == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(
        optimizer,
        None if kind == "own_loss" else loss(keras),
        metrics=[mae(keras), order(keras)],
        steps_per_execution=steps,
        run_eagerly=kind == "eager",
        jit_compile=kind not in ("eager", "uncompiled"),
    )
    return model


def loss(keras: Any) -> Any:
    ops = keras.ops
    return lambda y, predicted: ops.mean(ops.square(y[:, :1] - predicted), axis=-1)


def mae(keras: Any) -> Any:
    def mae(y: Any, predicted: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y[:, :1] - predicted), axis=-1)

    return mae


def OwnStep(keras: Any) -> Any:  # noqa: N802 - returns a class
    class OwnStep(keras.Sequential):  # type: ignore[misc]
        """A train step as in Keras' guide for JAX, with clipped gradients."""

        def train_step(self, state: Any, data: Any) -> Any:
            trainable, others, optimizer, metrics = state
            x, y = data
            gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
            (value, found), gradients = gradient(
                trainable, others, metrics, x, y, None, training=True,
                optimizer_variables=optimizer,
            )  # fmt: skip
            _, predicted, others, metrics = found
            gradients = [jax.numpy.clip(each, -1.0, 1.0) for each in gradients]
            trainable, optimizer = self.optimizer.stateless_apply(
                optimizer, gradients, trainable
            )
            logs, metrics = self._update_metrics_variables(
                metrics, value, x, y, predicted, None
            )
            return logs, (trainable, others, optimizer, metrics)

    return OwnStep


def OwnLoss(keras: Any) -> Any:  # noqa: N802 - returns a class
    class OwnLoss(keras.Sequential):  # type: ignore[misc]
        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            return keras.ops.mean(keras.ops.square(y[:, :1] - y_pred))

    return OwnLoss


def order(keras: Any) -> Any:
    """A metric that hashes the indices of the samples, in their order, for ever."""
    jnp = jax.numpy

    class Order(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="order", dtype="float32")
            self.hash = self.add_variable(
                shape=(), initializer="zeros", dtype="uint32", name="order_hash"
            )

        def update_state(self, y: Any, predicted: Any, sample_weight: Any = None):
            index = jnp.asarray(y)[:, 1].astype("uint32")
            places = jnp.arange(1, index.size + 1, dtype="uint32")
            new = (index * places).sum(dtype="uint32")
            self.hash.assign(self.hash.value * jnp.uint32(31) + new)

        def result(self) -> Any:
            return (self.hash.value % jnp.uint32(1_000_003)).astype("float32")

        def reset_state(self) -> None:
            pass

    return Order()
