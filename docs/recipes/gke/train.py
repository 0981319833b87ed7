"""Trains in a pod, or in several pods with TF_CONFIG; resumes after a restart."""

import os

import keras
import numpy as np
import tensorflow as tf

import tfpreempt

if "TF_CONFIG" in os.environ:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tfpreempt.keras.enable_multi_worker()
else:
    strategy = tf.distribute.get_strategy()

keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
x = rng.normal(size=(4096, 8)).astype("float32")
y = x @ rng.normal(size=(8, 1)).astype("float32")
data = tfpreempt.data.from_arrays((x, y), batch_size=16, seed=7)

with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")

# The grace period and the notice file are in the pod's environment.
config = tfpreempt.KubernetesTerminationConfig()
callback = tfpreempt.keras.PreemptionCallback(
    "/srv/ckpt/train", termination_config=config
)
model.fit(data, epochs=40, verbose=2, callbacks=[callback])
