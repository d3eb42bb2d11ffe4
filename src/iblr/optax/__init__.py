"""Optimisers for optax that learn a Gaussian over the parameters: `ivon`, and two to compare with.

    import jax, optax
    from iblr.optax import ivon, sample_params

    optimiser = ivon(0.1, ess=num_examples)
    state = optimiser.init(params)

    @jax.jit
    def step(key, params, state, batch):
        sample, state = sample_params(key, params, state)
        gradients = jax.grad(mean_loss)(sample, batch)
        updates, state = optimiser.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

`params` are the mean. `posterior(params, state)` is the Gaussian.
"""

from iblr.optax.optimisers import ivon as ivon
from iblr.optax.optimisers import vadam as vadam
from iblr.optax.optimisers import vogn as vogn
from iblr.optax.squares import grad_and_squares as grad_and_squares
from iblr.optax.state import MeanField as MeanField
from iblr.optax.state import MeanFieldState as MeanFieldState
from iblr.optax.state import posterior as posterior
from iblr.optax.state import sample_params as sample_params
