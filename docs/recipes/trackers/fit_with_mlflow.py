"""`model.fit` that logs to MLflow; started again, it goes on in the same run.

Usage: tfpreempt run --checkpoint-dir CHECKPOINTS -- python fit_with_mlflow.py, and
MLFLOW_TRACKING_URI says where to log.
"""

import os

import keras
import mlflow
import numpy as np

import tfpreempt
from tfpreempt.states import JsonState


def newest_step(run_id):
    """The newest epoch that the run has a loss of; -1 if none."""
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    return max((metric.step for metric in history), default=-1)


def train(directory, epochs=20, save_freq=100):
    """Trains up to an epoch, from the newest commit in the directory on."""
    keras.utils.set_random_seed(7)
    x = np.random.rand(640, 3).astype("float32")
    y = x @ np.float32([[1.0], [2.0], [3.0]])
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")

    run = JsonState("mlflow")  # what it holds goes with each commit
    tfpreempt.load_state(run)
    with mlflow.start_run(run_id=run.value) as active:  # None: a new one
        if run.value is None:
            run.value = active.info.run_id
            tfpreempt.save_state(run, directory)  # from now on each start knows it
        logged = newest_step(run.value)

        def log(epoch, metrics):
            if epoch > logged:  # what is trained again has the same numbers
                mlflow.log_metrics(metrics, step=epoch)

        callback = tfpreempt.keras.PreemptionCallback(directory, save_freq=save_freq)
        logger = keras.callbacks.LambdaCallback(on_epoch_end=log)
        model.fit(
            x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=[callback, logger]
        )


if __name__ == "__main__":
    train(os.environ["TFPREEMPT_CHECKPOINT_DIR"])
