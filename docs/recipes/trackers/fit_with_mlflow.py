"""`model.fit` that logs to MLflow; a restart continues the same run.

Usage: tfpreempt run --checkpoint-dir CHECKPOINTS -- python fit_with_mlflow.py, with
MLFLOW_TRACKING_URI as the server.
"""

import os

import keras
import mlflow
import numpy as np

import tfpreempt
from tfpreempt.states import JsonState


def newest_step(run_id):
    """Returns the newest epoch with a loss in the run; -1 without an epoch."""
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    return max((metric.step for metric in history), default=-1)


def train(directory, epochs=20, save_freq=100):
    """Trains up to an epoch, starting from the newest commit in the directory."""
    keras.utils.set_random_seed(7)
    x = np.random.rand(640, 3).astype("float32")
    y = x @ np.float32([[1.0], [2.0], [3.0]])
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")

    run = JsonState("mlflow")  # saved with each commit
    tfpreempt.load_state(run)
    with mlflow.start_run(run_id=run.value) as active:  # None: a new run
        if run.value is None:
            run.value = active.info.run_id
            tfpreempt.save_state(run, directory)  # every restart continues the same run
        logged = newest_step(run.value)

        def log(epoch, metrics):
            if epoch > logged:  # repeated steps are logged already
                mlflow.log_metrics(metrics, step=epoch)

        callback = tfpreempt.keras.PreemptionCallback(directory, save_freq=save_freq)
        logger = keras.callbacks.LambdaCallback(on_epoch_end=log)
        model.fit(
            x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=[callback, logger]
        )


if __name__ == "__main__":
    train(os.environ["TFPREEMPT_CHECKPOINT_DIR"])
