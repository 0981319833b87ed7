"""Trains on a partition where jobs are preempted; resumes after a restart."""

import hashlib
import os

import keras
import numpy as np
import tensorflow as tf

import tfpreempt

keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()
rng = np.random.default_rng(1)
x = rng.normal(size=(4096, 8)).astype("float32")
y = x @ rng.normal(size=(8, 1)).astype("float32")

model = keras.Sequential(
    [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
)
model.compile(optimizer="adam", loss="mse")

config = tfpreempt.SlurmTerminationConfig(
    grace_period=0,  # commit and exit at once: the other job waits
    max_restarts=100,
)
print("start", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=40,
    verbose=2,
    callbacks=[tfpreempt.keras.PreemptionCallback("ckpt", termination_config=config)],
)
weights = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
print(
    "weights",
    hashlib.sha256(weights).hexdigest(),
    "epochs",
    len(history.epoch),
    flush=True,
)
