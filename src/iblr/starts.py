"""Where a fit starts: from a family, or from a point and what is known of the target."""

import dataclasses
import os
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from iblr.families.base import AbstractFamily
from iblr.families.diagonal import DiagonalGaussian
from iblr.families.gaussian import Gaussian
from iblr.posterior import Posterior

MATRICES = 24  # of d x d numbers that fitting a full Gaussian may need
SHARE = 0.5  # of the memory


def starting_family(family: Any, init: Any, support: Any, call: str = "fit") -> AbstractFamily:
    """The family to start from, whichever way a user gave it."""
    start = _given(family, init, support, call)
    if not isinstance(start, AbstractFamily):
        return start  # the call refuses what is none
    if start.dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"`{call}` got a start in float64, but float64 is switched off. Call it inside of "
            "`with jax.enable_x64(True):`, as the start was made."
        )
    numbers = jax.tree.leaves(eqx.filter(start, eqx.is_inexact_array))
    if any(np.isnan(leaf).any() for leaf in numbers):
        raise ValueError(f"`{call}` got a start with parameters that are nan: {numbers}.")
    return start


def _given(family: Any, init: Any, support: Any, call: str) -> AbstractFamily:
    if init is None:
        if family is None:
            raise ValueError(
                f"`{call}(target, ...)` needs a start: a point, `init=jnp.zeros(10)`, or a family, "
                "`iblr.Gaussian.standard(10)`."
            )
        if support is None or not isinstance(family, AbstractFamily):
            return family
        return family.with_support(support)
    if family is not None and not isinstance(family, AbstractFamily | type):
        raise ValueError(
            f"`{call}(target, family, init=...)` needs the class of a family, such as "
            f"`iblr.DiagonalGaussian`, but got {family!r}."
        )
    if isinstance(family, AbstractFamily):
        raise ValueError(
            f"`{call}(target, family, init=...)` got two starts, a {family.name} and `init`. Leave "
            f"one out, or give the class alone: `iblr.{call}(target, iblr.DiagonalGaussian, "
            "init=...)`."
        )
    if isinstance(init, Posterior | AbstractFamily):
        start = init.best.family if isinstance(init, Posterior) else init
        if family is not None and not isinstance(start, family):
            raise ValueError(
                f"`{call}(target, {family.__name__}, init=...)` got a start of another family, "
                f"{start.name}. Leave the class out, or start from a point: `init=posterior.mean`."
            )
        return start if support is None else start.with_support(support)
    return _around(init, family, support, call)


def _around(point: PyTree, family: Any, support: Any, call: str) -> AbstractFamily:
    """A standard Gaussian, of any class, around a point."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(point)):
        raise ValueError(
            f"`{call}` cannot be traced by `jax.jit`, `jax.vmap` or `jax.grad`, but got a traced "
            "`init`. For many fits pass an array of keys; a loop of your own takes `iblr.step`."
        )
    wanted = f"`{call}(init=...)` needs numbers, a posterior or a family, but got {point!r}."
    try:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(point)]
    except TypeError as error:
        raise ValueError(wanted) from error
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
        raise ValueError(wanted)
    if not leaves or sum(leaf.size for leaf in leaves) == 0:
        raise ValueError(
            f"`{call}(init=...)` needs at least one number to start from, but got {point!r}."
        )
    point = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x, float)), point)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(point)}
    if not kinds <= {"float32", "float64"}:
        raise ValueError(
            f"`{call}(init=...)` computes in float32 or float64, but got "
            f"{', '.join(sorted(kinds))}. Convert it."
        )
    if family is None:
        family = _affordable(leaves, call)
    if family not in (Gaussian, DiagonalGaussian):
        raise ValueError(
            f"`{call}(target, family, init=...)` puts `iblr.Gaussian` or `iblr.DiagonalGaussian` "
            f"around a point, but got {family!r}. Make a member of the family and pass that."
        )
    start = family.standard(like=point, support=support)
    mean = np.asarray(start.structure.ravel(point, f"{call}(init=...)"), start.dtype)
    if mean.ndim != 1 or not np.isfinite(mean).all():
        raise ValueError(
            f"`{call}(init=...)` must be a finite point inside its support, but got "
            f"{point!r} with the coordinates {mean}."
        )
    if not (start.structure.is_real or bool(start.structure.contains(point)[0])):
        raise ValueError(
            f"`{call}(init=...)` must be a point inside its support, but got {point!r}. Numbers on "
            "a simplex must sum to 1."
        )
    return dataclasses.replace(start, mean=jnp.asarray(mean))


def _affordable(leaves: list[jax.Array], call: str) -> type:
    """A full Gaussian, or a diagonal one where memory does not suffice for it."""
    dim = sum(leaf.size for leaf in leaves)
    needed = MATRICES * dim**2 * jnp.result_type(*leaves, float).itemsize
    there = _memory()
    if needed <= SHARE * there:
        return Gaussian
    warnings.warn(
        f"`{call}` takes a diagonal Gaussian: a full one over {dim} parameters would need some "
        f"{needed / 1e9:.0f} GB, and there are {there / 1e9:.0f}.",
        stacklevel=6,
    )
    return DiagonalGaussian


def _memory() -> float:
    """Bytes of the default device, or of the machine."""
    statistics = jax.devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return float(statistics["bytes_limit"])
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 8e9
