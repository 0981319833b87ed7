"""The states that the benches of saves and restores use: tensors, and real models.

Real models have hundreds to thousands of tensors: weights, statistics of batches, and
two slots of Adam for each weight. So a bench of a save runs on few large tensors, on
many small tensors, and on two models of Keras with Adam, built from random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

FEW, SOME, MANY = "16 equal tensors", "512 equal tensors", "4,096 equal tensors"
TENSORS = {
    FEW: [1] * 16,
    SOME: [1] * 512,
    MANY: [1] * 4096,
    "one large tensor": [60, 1, 1, 1, 1],
}
"""Parts of the state in each tensor, by the name of the state."""

COLUMNS = 1024  # float32: a row has 4 KiB


def tensors(name: str, mebibytes: int) -> list[Any]:
    """Returns the variables of a state of random values.

    Args:
        name: name in `TENSORS`.
        mebibytes: size of the state; a tensor has at least one row of 4 KiB.
    """
    import tensorflow as tf

    rng, parts = np.random.default_rng(0), TENSORS[name]
    rows = (mebibytes << 20) // (4 * COLUMNS)
    return [
        tf.Variable(
            rng.random((max(1, rows * part // sum(parts)), COLUMNS), np.float32)
        )
        for part in parts
    ]


def resnet_50() -> Any:
    """A ResNet-50 for images of 32 x 32 pixels, with Adam: 283 MB."""
    import keras

    model = keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=1000
    )
    return _with_adam(model, "sparse_categorical_crossentropy")


def transformer(
    layers: int = 12, width: int = 768, heads: int = 12, words: int = 30_522
) -> Any:
    """An encoder of 110 million parameters, as BERT's base model has, with Adam.

    Args:
        layers: number of blocks.
        width: width of the embeddings.
        heads: number of attention heads.
        words: size of the vocabulary.
    """
    import keras

    tokens = keras.Input((None,), dtype="int32")
    values = keras.layers.Embedding(words, width)(tokens)
    for _ in range(layers):
        heard = keras.layers.MultiHeadAttention(heads, width // heads)(values, values)
        values = keras.layers.LayerNormalization()(values + heard)
        hidden = keras.layers.Dense(4 * width, activation="gelu")(values)
        hidden = keras.layers.Dense(width)(hidden)
        values = keras.layers.LayerNormalization()(values + hidden)
    pooled = keras.layers.GlobalAveragePooling1D()(values)
    model = keras.Model(tokens, keras.layers.Dense(2)(pooled))
    return _with_adam(model, "mse")


MODELS: dict[str, Callable[[], Any]] = {
    "ResNet-50": resnet_50,
    "transformer": transformer,
}


def _with_adam(model: Any, loss: str) -> Any:
    import keras

    model.compile(optimizer=keras.optimizers.Adam(1e-4), loss=loss)
    model.optimizer.build(model.trainable_variables)
    return model


def checkpoint(name: str, mebibytes: int) -> tuple[Any, list[Any]]:
    """Returns the checkpoint of a state, and its variables.

    Args:
        name: name in `TENSORS` or `MODELS`.
        mebibytes: size of a state of tensors.
    """
    import tensorflow as tf

    if name in TENSORS:
        variables = tensors(name, mebibytes)
        return tf.train.Checkpoint(variables=variables), variables
    model = MODELS[name]()
    variables = [*model.variables, *model.optimizer.variables]
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer), variables


def model_batch(name: str, samples: int = 2) -> tuple[Any, Any]:
    """Returns inputs and targets for one step of a model.

    Args:
        name: name in `MODELS`.
        samples: number of samples in the batch.
    """
    rng = np.random.default_rng(0)
    if name == "ResNet-50":
        images = rng.random((samples, 32, 32, 3), np.float32)
        return images, rng.integers(0, 1000, samples)
    return rng.integers(0, 30_522, (samples, 8)), rng.random((samples, 2), np.float32)
