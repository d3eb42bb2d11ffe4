"""How much of the target lies beyond the draws of a Gaussian.

The largest of a thousand importance weights say little of tails that a thousand draws hardly reach:
k-hat of a Gaussian fitted to Student's t with three degrees of freedom is anywhere from 0.3 to 1.
So the target is looked at on the sphere, in whitened coordinates, outside of which q has a share of
1e-4 of its mass. The mean of p / (Z q) over its directions, times that share, is what the target
would have outside if its tail fell as that of q does; where it falls more slowly it has more.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from scipy.special import chdtri

from iblr.compiling import quickly_compiled
from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.importance import with_all_rows
from iblr.target import Target

OUTSIDE = 1e-4
DIRECTIONS = 128  # evaluations of the target
AT_ONCE = 32


def mass_outside(
    target: Target, q: AbstractGaussian, log_evidence: float, key: Key[Array, ""]
) -> float:
    """A share of the target's mass, 1e-4 where q is right; points where it is nan are left out."""
    d = q.dim
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    directions = rng.normal(size=(DIRECTIONS, d))
    squared_radius = float(chdtri(d, OUTSIDE))
    lengths = np.linalg.norm(directions, axis=1, keepdims=True)
    noise = np.sqrt(squared_radius) * directions / lengths
    log_p = log_densities(target, q, noise, np.zeros_like(noise))
    log_q = -0.5 * (squared_radius + d * np.log(2 * np.pi) + float(q.log_det))
    log_weights = log_p - log_q - log_evidence
    known = log_weights[~np.isnan(log_weights)]
    return OUTSIDE * float(np.exp(np.minimum(known, 500.0)).mean()) if len(known) else np.nan


def log_densities(
    target: Target,
    q: AbstractGaussian,
    noise: Float[np.ndarray, "n d"],
    ways: Float[np.ndarray, "n d"],
) -> Float[np.ndarray, " n"]:
    """log p at so many (`DIRECTIONS`) noises of q, and ways off from there."""
    parts = (jnp.asarray(x, q.dtype) for x in (noise, ways))
    return np.asarray(_log_densities(with_all_rows(target), q, *parts), np.float64)


@quickly_compiled
def _log_densities(
    target: Target, q: AbstractGaussian, noise: Float[Array, "n d"], ways: Float[Array, "n d"]
) -> Float[Array, " n"]:
    log_density = target.whole(q.structure, target.data)
    return jax.lax.map(log_density, q.mean + q.colour(noise) + ways, batch_size=AT_ONCE)
