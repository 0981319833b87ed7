"""JAX: imported only after the program has imported JAX, and without TensorFlow.

compile_cache  adapter: the compiled functions of a run
distributed    adapter: the processes, errors and key-value store of `jax.distributed`
pytree_state   a ready-made State for a pytree of arrays
shards         the saved form of an array; a State with the shards of this process
values         adapter: the arrays that a step replaces

Imported by cli, keras, states.
"""
