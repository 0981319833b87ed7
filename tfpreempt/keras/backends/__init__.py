"""The running `model.fit` of each Keras and backend: implementations of `Fit`.

keras3                `model.fit` of Keras 3: the part for every backend
keras3_jax            `model.fit` of Keras 3 on JAX
jax_variables         the variables of a fit on JAX, and kept earlier values
named_variables       names of variables that are equal on TensorFlow and JAX
keras3_tensorflow     `model.fit` of Keras 3 on TensorFlow
tensorflow_fit        the part of a fit that Keras 3 on TensorFlow and tf_keras share
tensorflow_variables  the variables of a fit on TensorFlow, and kept earlier values
tf_keras              `model.fit` of tf_keras 2.x

Imported by keras/fit.
"""
