"""What a user says of a family of their own, and whether it is one that the rule is valid for.

A `Definition` holds the functions of one member and how its blocks are laid out. `define` builds it
from what a user passes, and raises `ValueError`, in words, unless the blocks are block-coordinate
natural ([LSK20] Assumptions 1 to 3) and the sampler fits them. With F_i = D_i^2 A and the score
s_i = grad_i log q at draws:

    minimal         F_i is positive definite
    Assumption 2    E[-d_i d_j log q] = 0 between blocks, within the error of the draws
    Assumption 3    -D_i^2 log q = D_i^2 A at every draw, here and at blocks nearby
    agreement       E[s_i] = 0: sampler, density and log-partition belong together
    reparameterised E[d s_i(z(lambda')) / d lambda'_i] = F_i: the derivative reaches the draws
    entropy         E[-log q] is the user's formula, if there is one

The expectations are over 4 096 draws, so a Fisher correlation of a few hundredths between blocks
passes unnoticed.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PyTree

from iblr import geometry
from iblr.linalg import matmul
from iblr.support import AbstractSupport, real

CHECK_DRAWS = 4096
LARGEST_Z = 6.0
SMALLEST_CORRELATION = 0.02

Vectors = tuple[Float[Array, " _"], ...]


class PositiveDefinite(eqx.Module):
    """The constraint of a block that is a symmetric positive-definite matrix."""

    def contains(self, matrix: Float[Array, "n n"]) -> Bool[Array, ""]:
        """Whether a Cholesky factor exists."""
        return jnp.isfinite(jnp.linalg.cholesky(matrix)).all()

    def __repr__(self) -> str:
        return "positive_definite"


positive_definite = PositiveDefinite()


class Definition(eqx.Module):
    """What a user says of a family: functions of one member, and how its blocks are laid out.

    A block is a vector of coordinates inside (the lower triangle of a symmetric matrix), an array
    in the user's functions.
    """

    name: str = eqx.field(static=True)
    log_prob: Callable = eqx.field(static=True)
    log_partition: Callable = eqx.field(static=True)
    sampler: Callable = eqx.field(static=True)
    entropy: Callable | None = eqx.field(static=True)
    names: tuple[str, ...] = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    constraints: tuple[Any, ...] = eqx.field(static=True)

    def pack(self, blocks: Mapping[str, Float[Array, "..."]]) -> Vectors:
        """The user's blocks as coordinates."""
        return tuple(
            geometry.pack_symmetric(blocks[name])
            if isinstance(constraint, PositiveDefinite)
            else blocks[name].reshape(-1)
            for name, constraint in zip(self.names, self.constraints, strict=True)
        )

    def unpack(self, vectors: Vectors) -> dict[str, Float[Array, "..."]]:
        """Coordinates as the user's blocks."""
        laid_out = zip(self.names, vectors, self.shapes, self.constraints, strict=True)
        return {
            name: geometry.unpack_symmetric(vector)
            if isinstance(constraint, PositiveDefinite)
            else vector.reshape(shape)
            for name, vector, shape, constraint in laid_out
        }

    def log_partition_of(self, vectors: Vectors) -> Float[Array, ""]:
        """A in the coordinates of the blocks."""
        return jnp.asarray(self.log_partition(self.unpack(vectors)))

    def log_prob_of(self, z: PyTree, vectors: Vectors) -> Float[Array, ""]:
        """log q in the coordinates of the blocks."""
        return jnp.asarray(self.log_prob(z, self.unpack(vectors)))

    def sample_of(self, key: Key[Array, ""], vectors: Vectors) -> PyTree:
        """One draw, differentiable in the coordinates of the blocks."""
        return self.sampler(key, self.unpack(vectors))

    def contains(self, index: int, vector: Float[Array, " _"]) -> Bool[Array, ""]:
        """Whether one block is finite and meets its constraint."""
        block = self.unpack_one(index, vector)
        return jnp.isfinite(vector).all() & jnp.all(self.constraints[index].contains(block))

    def to_free(self, index: int, vector: Float[Array, " _"]) -> Float[Array, " _"]:
        """Coordinates of one block to numbers without constraint.

        Those of the support, or the lower triangle of a Cholesky factor.
        """
        block = self.unpack_one(index, vector)
        if isinstance(self.constraints[index], PositiveDefinite):
            return geometry.pack_symmetric(jnp.linalg.cholesky(block))
        return self.constraints[index].inverse(block).reshape(-1)

    def from_free(self, index: int, theta: Float[Array, " _"]) -> Float[Array, " _"]:
        """The inverse of `to_free`."""
        constraint, shape = self.constraints[index], self.shapes[index]
        if isinstance(constraint, PositiveDefinite):
            C = jnp.tril(geometry.unpack_symmetric(theta))
            return geometry.pack_symmetric(matmul(C, C.T))
        return constraint.forward(theta.reshape(constraint.coordinate_shape(shape))).reshape(-1)

    def unpack_one(self, index: int, vector: Float[Array, " _"]) -> Float[Array, "..."]:
        """One block in the user's shape."""
        if isinstance(self.constraints[index], PositiveDefinite):
            return geometry.unpack_symmetric(vector)
        return vector.reshape(self.shapes[index])


def define(
    blocks: Any,
    log_prob: Any,
    log_partition: Any,
    sampler: Any,
    constraints: Any,
    entropy: Any,
    name: str,
) -> tuple[Definition, Vectors]:
    """The definition and the coordinates of its start, from what a user passed to `custom`."""
    if not isinstance(blocks, Mapping) or not blocks:
        raise ValueError(
            "`custom(blocks=...)` needs a dictionary of parameters, such as "
            f"`{{'rate': 1.0}}`, but got {blocks!r}."
        )
    functions = {"log_prob": log_prob, "log_partition": log_partition, "sampler": sampler}
    if entropy is not None:
        functions["entropy"] = entropy
    for argument, function in functions.items():
        if not callable(function):
            raise ValueError(f"`custom({argument}=...)` must be a function, but got {function!r}.")
    if constraints is not None and not isinstance(constraints, Mapping):
        raise ValueError(
            "`custom(constraints=...)` needs a dictionary by the names of blocks, but got "
            f"{constraints!r}."
        )
    constraints = dict(constraints or {})
    unknown = [key for key in constraints if key not in blocks]
    if unknown:
        raise ValueError(
            f"`custom(constraints=...)` names blocks that are not there: {unknown}. The blocks are "
            f"{list(blocks)}."
        )
    for key, constraint in constraints.items():
        if not isinstance(constraint, AbstractSupport | PositiveDefinite):
            raise ValueError(
                f"`custom(constraints=...)` needs `iblr.positive`, `iblr.positive_definite` or "
                f"another support for {key!r}, but got {constraint!r}."
            )
    try:
        dtype = jnp.result_type(float, *(jnp.asarray(b) for b in blocks.values()))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`custom(blocks=...)` needs arrays of numbers, but got {blocks}."
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"`custom(blocks=...)` needs real numbers, but got {dtype}.")
    arrays = {key: jnp.asarray(b, dtype) for key, b in blocks.items()}
    definition = Definition(
        name=name,
        log_prob=log_prob,
        log_partition=log_partition,
        sampler=sampler,
        entropy=entropy,
        names=tuple(arrays),
        shapes=tuple(b.shape for b in arrays.values()),
        constraints=tuple(constraints.get(key, real) for key in arrays),
    )
    for i, (key, block) in enumerate(arrays.items()):
        constraint = definition.constraints[i]
        square = block.ndim == 2 and block.shape[0] == block.shape[1]
        if isinstance(constraint, PositiveDefinite) and not square:
            raise ValueError(
                f"`custom(blocks=...)` needs a square matrix for {key!r}, which is to be positive "
                f"definite, but got shape {block.shape}."
            )
        if isinstance(constraint, AbstractSupport):
            constraint.coordinate_shape(block.shape)  # says what is wrong with the shape
        elif not bool(jnp.allclose(block, block.T)):
            raise ValueError(
                f"`custom(blocks=...)` needs a symmetric matrix for {key!r}, but it differs from "
                "its transpose."
            )
        if block.size == 0:
            raise ValueError(f"`custom(blocks=...)` needs numbers in {key!r}, but it is empty.")
        if not bool(jnp.isfinite(block).all() & jnp.all(constraint.contains(block))):
            raise ValueError(
                f"`custom(blocks=...)` must start inside the constraints, but {key!r} is "
                f"{block.tolist()} and is to be {constraint}."
            )
    return definition, definition.pack(arrays)


def check_functions(definition: Definition, vectors: Vectors) -> PyTree:
    """The shapes of one draw, after checking that all functions take and return what they must."""
    name, key = definition.name, jax.random.key(0)

    def shape_of(argument: str, function: Callable, *given: Any) -> Any:
        try:
            return jax.eval_shape(function, *given)
        except Exception as error:
            raise ValueError(
                f"`custom({argument}=...)` of {name} raised {type(error).__name__}: {error}\nIt is "
                f"called with blocks {dict(zip(definition.names, definition.shapes, strict=True))}."
            ) from error

    event = shape_of("sampler", definition.sample_of, key, vectors)
    leaves = jax.tree.leaves(event)
    if not leaves or not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError(
            f"`custom(sampler=...)` of {name} must return arrays of floating-point numbers, but "
            f"returned {event}."
        )
    scalars = {
        "log_prob": shape_of("log_prob", definition.log_prob_of, event, vectors),
        "log_partition": shape_of("log_partition", definition.log_partition_of, vectors),
    }
    if definition.entropy is not None:
        unpacked = definition.unpack(vectors)
        scalars["entropy"] = shape_of("entropy", definition.entropy, unpacked)
    for argument, out in scalars.items():
        if out.shape != ():
            raise ValueError(
                f"`custom({argument}=...)` of {name} must return a scalar, but returned shape "
                f"{out.shape}. Sum the terms: `.sum()`."
            )
    return event


def check_assumptions(definition: Definition, vectors: Vectors) -> None:
    """Raise, in words, unless the blocks are block-coordinate natural and the sampler fits them.

    Looked at where the fit starts and away from there, as blocks may be block-coordinate at a
    single point: the natural parameters of a Gaussian are where its mean is zero.
    """
    _check_measured(definition, _measured(definition, vectors))
    _check_measured(definition, _measured(definition, _away(definition, vectors)))


def _check_measured(definition: Definition, found: Any) -> None:
    fisher, cross, affine, score, moved, values, entropy = jax.tree.map(np.asarray, found)
    names, tolerance = definition.names, 1e-2 if fisher[0].dtype == jnp.float32 else 1e-6
    # First those that are known to bend: such a block's log-partition need not be convex.
    bent = [d > tolerance and np.isfinite(d) for d in affine]
    for block, metric in zip(names, fisher, strict=True):
        singular = not np.isfinite(metric).all() or np.linalg.eigvalsh(metric)[0] <= 0
        if singular and not any(bent):
            raise ValueError(
                f"`custom(log_partition=...)` of {definition.name} is not strictly convex in the "
                f"block {block!r}: its second derivative is {metric.tolist()}. The block must "
                "be a minimal parameter of an exponential family while the others are fixed; check "
                "the log-partition, or remove redundant entries."
            )
    if not all(np.isfinite(samples).all() for samples in (values, *score)):
        raise ValueError(
            f"`custom(log_prob=...)` of {definition.name}, or its derivative, is not finite at all "
            "draws of the sampler. Check log_prob there; where draws round to the edge of the "
            "support, start elsewhere, or enable float64."
        )
    reasons = []
    coupled = [
        f"{names[i]!r} and {names[j]!r} ({_significant(correlations):.2g} of the most it could be)"
        for (i, j), correlations in cross.items()
        if _significant(correlations) > 0
    ]
    if coupled:
        reasons.append(
            f"the Fisher information between {', '.join(coupled)} is not zero, so they are not "
            "block-coordinate (Assumption 2): join them in one block, or choose others, as mean "
            "and precision for a Gaussian"
        )
    curved = [
        f"{block!r} (relative curvature {difference:.2g})"
        for block, difference in zip(names, affine, strict=True)
        if not difference <= tolerance
    ]
    if curved:
        reasons.append(
            f"log_prob + log_partition is not affine in the block {', '.join(curved)} with the "
            "others fixed, so it is not a natural parameter (Assumption 3): parameterise it by "
            "what multiplies a statistic, as 1/m^2 for the mean m of an inverse Gaussian"
        )
    if reasons:
        raise ValueError(
            f"`custom(blocks=...)` of {definition.name}: " + "; and ".join(reasons) + "."
        )
    for block, metric, scores, slopes in zip(names, fisher, score, moved, strict=True):
        if _significant(scores) > 0:
            raise ValueError(
                f"`custom(...)` of {definition.name}: the mean of dlog_prob/d{block} over draws is "
                f"not zero ({_significant(scores):.2g} standard deviations), so sampler, log_prob "
                "and log_partition do not describe one density. Check the normalisation of "
                "log_prob, and the sampler."
            )
        products = scores[:, :, None] * scores[:, None, :] - _relative(metric)
        if _significant(products) > 0:
            raise ValueError(
                f"`custom(sampler=...)` of {definition.name}: dlog_prob/d{block} varies over draws "
                f"by another amount than the second derivative of log_partition says (off by "
                f"{_significant(products):.2g} of it), so the draws are not from log_prob. Check "
                "the sampler."
            )
        if _significant(slopes) > 0:
            raise ValueError(
                f"`custom(sampler=...)` of {definition.name} is not differentiable in {block!r} as "
                "it must be: moving the block does not move the draws as the density moves (off by "
                f"{_significant(slopes):.2g} of the Fisher information). Write the draw as a "
                "function of noise and blocks."
            )
    if entropy is not None and _significant(values + entropy) > 0:
        raise ValueError(
            f"`custom(entropy=...)` of {definition.name} is {entropy:.4g}, but the mean of "
            f"-log_prob over draws is {-values.mean():.4g}. Check the normalisation of log_prob, "
            "and the entropy."
        )


def _relative(metric: np.ndarray) -> np.ndarray:
    """A Fisher block in units of its own diagonal."""
    scale = np.sqrt(np.abs(np.diagonal(metric)))
    return metric / scale[:, None] / scale


def _significant(samples: np.ndarray) -> float:
    """The largest mean over draws that is neither noise nor negligible; 0 if there is none."""
    if not np.isfinite(samples).all():
        return math.inf
    mean, error = samples.mean(0), samples.std(0) / math.sqrt(len(samples))
    size = np.abs(mean)
    return float(np.max(np.where(size > LARGEST_Z * error + SMALLEST_CORRELATION, size, 0.0)))


@eqx.filter_jit
def _measured(definition: Definition, vectors: Vectors) -> Any:
    """At draws: Fisher blocks, and samples of what must vanish, in units of the Fisher matrix."""
    A, count = definition.log_partition_of, len(vectors)
    keys = jax.random.split(jax.random.key(0), CHECK_DRAWS)
    # Compiling a sampler can take seconds: one program has both the draws and their derivatives.
    draw = lambda vectors, key: (definition.sample_of(key, vectors),) * 2  # noqa: E731
    slopes, draws = jax.vmap(jax.jacfwd(draw, has_aux=True), (None, 0))(vectors, keys)
    fisher = [geometry.fisher_block(A, vectors, i) for i in range(count)]
    scale = [jnp.sqrt(jnp.abs(jnp.diagonal(metric))) for metric in fisher]

    def block_of(i: int, vectors: Vectors) -> Callable:
        return lambda block: vectors[:i] + (block,) + vectors[i + 1 :]

    def score(i: int, z: PyTree, vectors: Vectors) -> Float[Array, " _"]:
        own = block_of(i, vectors)
        return jax.grad(lambda block: definition.log_prob_of(z, own(block)))(vectors[i])

    def cross(i: int, j: int, z: PyTree) -> Float[Array, "_ _"]:
        other = block_of(j, vectors)
        mixed = jax.jacfwd(lambda block: score(i, z, other(block)))(vectors[j])
        return mixed / scale[i][:, None] / scale[j]

    def bent(i: int, z: PyTree, vectors: Vectors) -> Float[Array, ""]:
        """The largest entry of D_i^2 (log q + A), relative to D_i^2 A."""
        own = block_of(i, vectors)
        statistic = lambda block: definition.log_prob_of(z, own(block)) + A(own(block))  # noqa: E731
        metric = geometry.fisher_block(A, vectors, i)
        roots = jnp.sqrt(jnp.abs(jnp.diagonal(metric)))
        hessian = jax.hessian(statistic)(vectors[i])
        return jnp.abs(hessian / roots[:, None] / roots).max()

    def moved(i: int, z: PyTree, slopes: PyTree) -> Float[Array, "_ _"]:
        own = jax.tree.map(lambda _, slope: slope[i], z, slopes)
        along = lambda dz: jax.jvp(lambda z: score(i, z, vectors), (z,), (dz,))[1]  # noqa: E731
        return jax.vmap(along, -1, -1)(own) / scale[i][:, None] / scale[i]

    few = jax.tree.map(lambda leaf: leaf[:16], draws)
    nearby = [vectors, *(_nearby(definition, vectors, factor) for factor in (0.8, 1.3))]
    affine = [
        jnp.stack(
            [jax.vmap(lambda z, i=i, v=v: bent(i, z, v))(few).max() for v in nearby]  # noqa: B023
        ).max()
        for i in range(count)
    ]
    relative = [fisher[i] / scale[i][:, None] / scale[i] for i in range(count)]
    return (
        fisher,
        {
            (i, j): jax.vmap(lambda z, i=i, j=j: cross(i, j, z))(draws)
            for i in range(count)
            for j in range(i)
        },
        affine,
        [jax.vmap(lambda z, i=i: score(i, z, vectors))(draws) / scale[i] for i in range(count)],
        [
            jax.vmap(lambda z, slope, i=i: moved(i, z, slope))(draws, slopes) - relative[i]
            for i in range(count)
        ],
        jax.vmap(lambda z: definition.log_prob_of(z, vectors))(draws),
        definition.entropy and definition.entropy(definition.unpack(vectors)),
    )


def _nearby(definition: Definition, vectors: Vectors, factor: float) -> Vectors:
    """Other blocks inside the constraints: scaled, or kept where scaling would leave them."""
    return _inside(definition, vectors, [factor * vector for vector in vectors])


def _away(definition: Definition, vectors: Vectors) -> Vectors:
    """Other blocks inside the constraints: real ones half a unit of Fisher length further out."""
    moved = []
    for i, (vector, constraint) in enumerate(zip(vectors, definition.constraints, strict=True)):
        metric = geometry.fisher_block(definition.log_partition_of, vectors, i)
        unit = 1 / jnp.sqrt(jnp.diagonal(metric))
        further = vector + 0.5 * jnp.where(vector < 0, -unit, unit)
        moved.append(further if constraint == real else 1.3 * vector)
    return _inside(definition, vectors, moved)


def _inside(definition: Definition, vectors: Vectors, moved: list) -> Vectors:
    """The moved blocks where they meet their constraints, the others as they were."""
    return tuple(
        jnp.where(definition.contains(i, new), new, old)
        for i, (new, old) in enumerate(zip(moved, vectors, strict=True))
    )
