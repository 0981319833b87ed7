"""Trains on a Spot VM of Compute Engine; resumes after a restart."""

import keras
import numpy as np

import tfpreempt

keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
x = rng.normal(size=(4096, 8)).astype("float32")
y = x @ rng.normal(size=(8, 1)).astype("float32")

model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")

config = tfpreempt.GceSpotTerminationConfig(grace_period=30)
callback = tfpreempt.keras.PreemptionCallback(
    "/srv/ckpt/train", termination_config=config
)
model.fit(x, y, batch_size=16, epochs=40, verbose=2, callbacks=[callback])
