"""A posterior handed on to other libraries: draws for ArviZ, a warm start for NUTS."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.families.base import AbstractFamily
from iblr.families.mixture import GaussianMixture
from iblr.families.product import Product
from iblr.families.skew_gaussian import SkewGaussian
from iblr.importance import with_all_rows
from iblr.posterior import Posterior
from iblr.target import Target, as_target

# Leapfrog steps of c d^(-1/4) are accepted alike often in every dimension d (Beskos et al. 2013);
# with this c about 80 % are on a standard normal.
STEP_SIZE = 1.5


def to_arviz(
    posterior: Posterior,
    key: Key[Array, ""],
    *,
    draws: int = 1000,
    chains: int = 4,
    corrected: bool = False,
) -> Any:
    """Draws in the container of the ArviZ that is installed (the extra `iblr[arviz]`).

    That is an xarray `DataTree` from ArviZ 1 on (or with `arviz-base` alone), an `InferenceData`
    before. Variables are named by the paths of their leaves, such as `theta` or `layer.weights`,
    one plain vector is `z`; values are those of points, on their supports. The draws are
    independent, so that chains only keep ArviZ's layout. Attributes of the group `posterior` are
    the ELBO and, after `iblr.diagnose`, `verdict`, `khat`, `log_evidence` and its standard error.

    Args:
        posterior: one run.
        key: for the draws; `posterior.to_arviz()` may leave it out where there is a verdict, and
            then derives one from the verdict's.
        draws: those of a chain.
        chains: how many chains.
        corrected: take draws of `posterior.corrected` instead of q's.
    """
    for name, count in (("draws", draws), ("chains", chains)):
        if count < 1:
            raise ValueError(f"`to_arviz({name}=...)` must be at least 1, but got {count}.")
    source = posterior.corrected if corrected else posterior
    points = source.sample(key, draws * chains)
    values = {
        jax.tree_util.keystr(path, simple=True, separator=".") or "z": jax.device_get(leaf).reshape(
            (chains, draws, *leaf.shape[1:])
        )
        for path, leaf in jax.tree.leaves_with_path(points)
    }
    attributes = {
        "inference_library": "iblr",
        "elbo": float(posterior.elbo),
        "elbo_se": float(posterior.elbo_se),
        "corrected": str(corrected),
    }
    if posterior.diagnosis is not None:
        attributes |= {
            "verdict": posterior.verdict,
            "khat": posterior.khat,
            "log_evidence": posterior.log_evidence,
            "log_evidence_se": posterior.log_evidence_se,
        }
    if importlib.util.find_spec("arviz_base") is not None:
        base = importlib.import_module("arviz_base")
        return base.from_dict({"posterior": values}, attrs={"posterior": attributes})
    if importlib.util.find_spec("arviz") is not None:
        return importlib.import_module("arviz").from_dict(values, posterior_attrs=attributes)
    raise ImportError(
        "`posterior.to_arviz` needs ArviZ, which is not installed. Install it: "
        "`pip install 'iblr[arviz]'`."
    )


class WarmStart(NamedTuple):
    """Where NUTS may start, in real coordinates.

    Attributes:
        position: the mean of q, in the containers of the parameters.
        inverse_mass_matrix: the covariance of q, in the order of `jax.flatten_util.ravel_pytree`.
        step_size: a guess for the metric above, about right if q is.
        log_density: of coordinates like `position`, with the Jacobian of the supports; None where
            no target was given.
        constrain: coordinates to points on the supports, also stacked along leading axes.
        positions: draws of q, stacked along a first axis, one a chain; None where none were asked.
    """

    position: PyTree
    inverse_mass_matrix: Float[Array, "d d"]
    step_size: float
    log_density: Callable[[PyTree], Float[Array, ""]] | None
    constrain: Callable[[PyTree], PyTree]
    positions: PyTree


def to_nuts(
    posterior: Posterior,
    target: Target | Callable | None = None,
    *,
    key: Key[Array, ""] | None = None,
    chains: int | None = None,
) -> WarmStart:
    """A warm start for NUTS, with which most of its warm-up can be left out.

    A sampler works on real coordinates. Without supports these are the parameters, and one's own
    log density will do; with supports, `log_density` is the one to sample and `constrain` maps its
    draws back.

    Args:
        posterior: one run.
        target: what it was fitted to; wanted for `log_density`, all data at every evaluation.
        key: for `positions`.
        chains: how many `positions`.

    Example:
        >>> import iblr, jax
        >>> target = lambda z: -0.5 * ((z["a"] - 1) ** 2).sum() - 2 * z["b"] ** 2
        >>> start = iblr.Gaussian.standard(like={"a": jax.numpy.zeros(2), "b": 0.0})
        >>> posterior = iblr.fit(target, start, key=jax.random.key(0), num_steps=300)
        >>> warm = posterior.to_nuts(target, key=jax.random.key(1), chains=4)
        >>> warm.positions["a"].shape, warm.inverse_mass_matrix.diagonal().round(2).tolist()
        ((4, 2), [1.0, 1.0, 0.25])
    """
    if (key is None) != (chains is None):
        raise ValueError(
            "`to_nuts(key=..., chains=...)` needs both or neither, but got only "
            f"`{'chains' if key is None else 'key'}`."
        )
    if chains is not None and chains < 1:
        raise ValueError(f"`to_nuts(chains=...)` must be at least 1, but got {chains}.")
    family, structure = posterior.family, posterior.family.structure
    if not _is_over_reals(family):
        raise ValueError(
            f"`to_nuts` needs a family over real coordinates, in which NUTS moves, but got a "
            f"{family.name}. Fit a `Gaussian` with `support=`."
        )
    coordinates = structure.coordinates
    flat = lambda position: coordinates.ravel(position, "to_nuts")  # noqa: E731
    log_density = None
    if target is not None:
        known = with_all_rows(as_target(target, "to_nuts"))
        whole = known.whole(structure, known.data)
        log_density = lambda position: whole(flat(position))  # noqa: E731
    positions = None
    if key is not None and chains is not None:
        positions = coordinates.unravel(family.draw(key, chains).rows)
    return WarmStart(
        position=coordinates.unravel(jnp.asarray(family.mean)),
        inverse_mass_matrix=family.covariance,
        step_size=STEP_SIZE * family.dim**-0.25,
        log_density=log_density,
        constrain=lambda position: structure.unravel(flat(position)),
        positions=positions,
    )


def _is_over_reals(family: AbstractFamily) -> bool:
    if isinstance(family, Product):
        return all(_is_over_reals(part) for part in family.parts.values())
    return isinstance(family, AbstractGaussian | GaussianMixture | SkewGaussian)
