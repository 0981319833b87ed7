"""Callbacks and helpers for `model.fit` of Keras 3 and tf_keras.

The names are loaded on first use, so an import of the package imports no Keras.

bad_steps         leaves steps with a bad loss, or with crashes, out of a fit
backends/         the running `model.fit` of each Keras and backend
callback          PreemptionCallback, the callback that a program adds to `model.fit`
callbacks/        the user's callbacks of a fit: saves and restores their state
data/             the position in the training data: saves and restores it
finite_variables  checks that the variables of a fit are finite
fit/              one `model.fit`: its loop, its phases, and the contents of a save
fit_protocol      the interface to a running `model.fit` of Keras 3 or tf_keras
fit_record        values that a commit of a fit has besides the tf.train.Checkpoint
multi_worker      makes `fit` of Keras 3 work with two workers or more

Imported by cli, keras/backends, keras/callbacks, keras/data, keras/fit, tfpreempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfpreempt.core.lazy_import import loader

if TYPE_CHECKING:
    from tfpreempt.handler.bad_steps import BadSteps
    from tfpreempt.keras.callback import PreemptionCallback
    from tfpreempt.keras.multi_worker import enable_multi_worker

__all__ = ["BadSteps", "PreemptionCallback", "enable_multi_worker"]

_HOMES = {
    "BadSteps": "tfpreempt.handler.bad_steps",
    "PreemptionCallback": "tfpreempt.keras.callback",
    "enable_multi_worker": "tfpreempt.keras.multi_worker",
}
__getattr__ = loader(__name__, _HOMES)
