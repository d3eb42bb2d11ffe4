"""A family that a user writes: a density, its log-partition, a sampler, the blocks' constraints.

The user's blocks lambda = (lambda_1, ..., lambda_m) must be block-coordinate natural ([LSK20]
Assumptions 1 to 3), which `definition` checks. Then `iblr.geometry` has all of the rule,

    lambda_i <- lambda_i - t ghat_i - (t^2/2) F_i^-1 1/2 D_i^2 (grad_i A)[ghat_i, ghat_i]

with F_i = D_i^2 A, by two nested derivatives of the log-partition A. The gradient of L is
E[(dz / dlambda)' grad(lbar + log q)], the form b(z) of appendix H.

No theorem says that the step of a user's block stays inside its constraint, so that is looked at,
and the step of a block that would leave is halved until it stays; the halvings are counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from iblr import geometry
from iblr.families.base import MARGINAL_DRAWS, AbstractFamily, Draws, StepInfo
from iblr.families.curvature import Parameterisation
from iblr.families.definition import Definition, Vectors, check_assumptions, check_functions, define
from iblr.families.line_search import LineSearch
from iblr.status import Status
from iblr.structure import Structure

MOST_HALVINGS = 60

Stacked = tuple[Float[Array, "copies _"], ...]


class CustomTangent(eqx.Module):
    """A natural gradient at a user's family, every array with one leading axis of copies.

    Attributes:
        directions: ghat of every block.
    """

    directions: tuple[Float[Array, "copies _"], ...]

    @property
    def gradient(self) -> Float[Array, " 0"]:
        """Nothing: what is known of a user's block is no reason to average over steps."""
        return jnp.zeros(0, self.directions[0].dtype)


class Custom(AbstractFamily):
    """Independent copies of a family that a user defined; made by `iblr.custom`.

    Attributes:
        vectors: the coordinates of every block, one row a copy.
    """

    vectors: tuple[Float[Array, "copies _"], ...]
    definition: Definition
    copies: tuple[int, ...] = eqx.field(static=True)
    structure: Structure

    line_search: ClassVar[LineSearch] = LineSearch(factor=0.5)

    def __init__(
        self,
        vectors: tuple[Float[Array, "copies _"], ...],
        definition: Definition,
        copies: tuple[int, ...],
        structure: Structure,
    ):
        self.vectors, self.definition = vectors, definition
        self.copies, self.structure = copies, structure

    @property
    def name(self) -> str:
        """As given to `custom`."""
        return self.definition.name

    @property
    def blocks(self) -> dict[str, Float[Array, "..."]]:
        """The parameters by name, after the axes of the copies."""
        flat = tuple(v.reshape(-1, v.shape[-1]) for v in self.vectors)
        blocks = jax.vmap(self.definition.unpack)(flat)
        leading = self.batch_shape + self.copies
        return {name: b.reshape(leading + b.shape[1:]) for name, b in blocks.items()}

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes of the parameters."""
        return self.vectors[0].shape[:-2]

    @property
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""
        return self.vectors[0].dtype

    def _fixed_draws(self) -> Float[Array, "M d"]:
        return self.draw(jax.random.key(0), MARGINAL_DRAWS).rows

    @property
    def mean(self) -> Float[Array, " d"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Estimated from 4 000 draws of fixed noise."""
        return self._fixed_draws().mean(0)

    @property
    def standard_deviations(self) -> Float[Array, " d"]:
        """Estimated from 4 000 draws of fixed noise."""
        return self._fixed_draws().std(0)

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """Estimated from 4 000 draws of fixed noise."""
        return jnp.atleast_2d(jnp.cov(self._fixed_draws().T))

    @property
    def precision(self) -> Float[Array, "d d"]:
        """The inverse of the estimated covariance."""
        return jnp.linalg.inv(self.covariance)

    # Points are pytrees whose leaves begin with the axes of the copies; here with one axis.

    def _points(self, rows: Float[Array, "M d"]) -> PyTree:
        count, axes = math.prod(self.copies), len(self.copies)
        return jax.tree.map(
            lambda leaf: leaf.reshape((len(rows), count) + leaf.shape[1 + axes :]),
            self.structure.unravel(rows),
        )

    def _rows(self, points: PyTree) -> Float[Array, "M d"]:
        back = lambda leaf: leaf.reshape(leaf.shape[:1] + self.copies + leaf.shape[2:])  # noqa: E731
        return self.structure.ravel(jax.tree.map(back, points), "custom")

    def _each(self, function: Callable) -> Callable:
        """`function(m, vectors)` over copies, then over draws."""
        return jax.vmap(jax.vmap(function), in_axes=(0, None))

    def draw(self, key: Key[Array, ""], num: int, antithetic: bool = False) -> Draws:
        """Independent draws by the user's sampler; the noise is their keys."""
        keys = jax.random.split(key, (num, math.prod(self.copies)))
        points = self._each(self.definition.sample_of)(keys, self.vectors)
        return Draws(self._rows(points).astype(self.dtype), keys)

    def log_prob_of_draws(self, draws: Draws) -> Float[Array, " M"]:
        """The user's log density."""
        return self.log_prob_rows(draws.rows)

    def log_prob_rows(self, rows: Float[Array, "M d"]) -> Float[Array, " M"]:
        """The user's log density."""
        each = self._each(self.definition.log_prob_of)(self._points(rows), self.vectors)
        return each.sum(1).astype(self.dtype)

    def entropy(self) -> Float[Array, ""] | None:
        """By the user's formula, if one was given."""
        if self.definition.entropy is None:
            return None
        function = self.definition.entropy
        each = jax.vmap(lambda vectors: function(self.definition.unpack(vectors)))(self.vectors)
        return jnp.sum(each).astype(self.dtype)

    def kl(self, other: Any) -> Float[Array, ""]:
        """Not known in closed form."""
        raise ValueError(
            f"`kl(other)` has no closed form for {self.name}. Estimate it from draws: "
            "`(q.log_prob(z) - other.log_prob(z)).mean()`."
        )

    def expected_log_prob(self, q: Any) -> Float[Array, ""]:
        """Not known in closed form."""
        raise ValueError(
            f"A {self.name} has no exact term as a prior. Pass `prior=prior.log_prob` to `Target`."
        )

    def rep(
        self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]
    ) -> CustomTangent:
        """The reparameterised gradient of lbar, that of the entropy by the user's formula."""
        if self.definition.entropy is None:
            raise ValueError(
                f"`Rep` needs the entropy of {self.name} in closed form. Give `custom(entropy=...)`"
                ", or use `iblr.Stl(pairs=...)`, which does without."
            )
        gradients = self._reparameterised(draws, slopes)
        of_entropy = jax.grad(
            lambda vectors: eqx.tree_at(lambda q: q.vectors, self, vectors).entropy()
        )(self.vectors)
        return self._tangent(tuple(g - h for g, h in zip(gradients, of_entropy, strict=True)))

    def stl(
        self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]
    ) -> CustomTangent:
        """The reparameterised gradient of b(z) = lbar(z) + log q(z), q held in log q."""
        score = jax.grad(lambda rows: self.log_prob_rows(rows).sum())(draws.rows)
        return self._tangent(self._reparameterised(draws, slopes + score))

    def _reparameterised(
        self, draws: Draws, slopes: Float[Array, "M d"]
    ) -> tuple[Float[Array, "copies _"], ...]:
        """The mean over draws of (dz / dlambda)' slopes."""

        def drawn(vectors):
            return self._rows(self._each(self.definition.sample_of)(draws.noise, vectors))

        _, pull_back = jax.vjp(drawn, self.vectors)
        return pull_back(slopes / len(slopes))[0]

    def add_prior(
        self, tangent: CustomTangent, prior: Any, weight: Float[Array, ""]
    ) -> CustomTangent:
        """Not known in closed form."""
        raise ValueError(
            f"The term of a prior has no closed form under {self.name}. Pass "
            "`prior=prior.log_prob` to `Target`, or use `iblr.Stl(pairs=...)`."
        )

    def _tangent(self, gradients: tuple[Float[Array, "copies _"], ...]) -> CustomTangent:
        """The natural gradient F^-1 g of every block; nan where F is not positive definite."""

        def one_copy(vectors: Vectors, gradients: Vectors) -> Vectors:
            A = self.definition.log_partition_of
            return tuple(
                geometry.natural_gradient(A, vectors, i, g) for i, g in enumerate(gradients)
            )

        return CustomTangent(jax.vmap(one_copy)(self.vectors, gradients))

    # The rules.

    def improved(
        self,
        tangent: CustomTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        trust_region: bool,
    ) -> tuple["Custom", StepInfo]:
        """The generic rule of `iblr.geometry`, halved where it would leave the set.

        With a trust region the length of a block's step in the Fisher metric is at most the root of
        the block's size.
        """
        halving = LineSearch(factor=0.5)
        return self._moved(tangent, step_size, parameterisation, True, trust_region, halving)

    def original(
        self,
        tangent: CustomTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        line_search: LineSearch | None,
    ) -> tuple["Custom", StepInfo]:
        """The natural-gradient step in the user's blocks; a line search backtracks until inside."""
        return self._moved(tangent, step_size, parameterisation, False, False, line_search)

    def geodesic(
        self,
        tangent: CustomTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
    ) -> tuple["Custom", StepInfo]:
        """Not known in closed form."""
        raise ValueError(
            f"`geodesic_step` has no closed form for {self.name}. Use `improved_step`, which "
            "agrees with the geodesic to second order."
        )

    def refreshed(self) -> tuple["Custom", Float[Array, ""]]:
        """Itself: nothing derived is stored."""
        return self, jnp.zeros((), self.dtype)

    def free(self) -> Stacked:
        """Those of every block, by its constraint."""
        blocks = enumerate(self.vectors)
        return tuple(jax.vmap(lambda v, i=i: self.definition.to_free(i, v))(v) for i, v in blocks)

    def from_free(self, theta: Stacked) -> "Custom":
        """Every block at its own."""
        return eqx.tree_at(lambda q: q.vectors, self, self._vectors_of(theta))

    def free_gradient(self, tangent: CustomTangent, theta: Stacked) -> Stacked:
        """(dlambda / dtheta)' F ghat."""
        A = self.definition.log_partition_of

        def lowered(vectors: Vectors, directions: Vectors) -> Vectors:
            metrics = [geometry.fisher_block(A, vectors, i) for i in range(len(vectors))]
            return tuple(F @ ghat for F, ghat in zip(metrics, directions, strict=True))

        covectors = jax.vmap(lowered)(self.vectors, tangent.directions)
        return jax.vjp(self._vectors_of, theta)[1](covectors)[0]

    def _vectors_of(self, theta: Stacked) -> Stacked:
        blocks = enumerate(theta)
        return tuple(jax.vmap(lambda x, i=i: self.definition.from_free(i, x))(x) for i, x in blocks)

    def _moved(
        self,
        tangent: CustomTangent,
        t: Float[Array, ""],
        parameterisation: Parameterisation,
        curved: bool,
        trust_region: bool,
        search: LineSearch | None,
    ) -> tuple["Custom", StepInfo]:
        parameterisation.check_only(self.name)
        definition, A = self.definition, self.definition.log_partition_of

        def one_copy(vectors: Vectors, directions: Vectors, t: Float[Array, ""]):
            moved = []
            for i, (block, ghat) in enumerate(zip(vectors, directions, strict=True)):
                bend = geometry.correction(A, vectors, i, ghat) if curved else jnp.zeros_like(ghat)
                share = jnp.ones((), block.dtype)
                if trust_region:
                    metric = geometry.fisher_block(A, vectors, i)
                    length = t * jnp.sqrt(jnp.maximum(ghat @ metric @ ghat, 0))
                    radius = math.sqrt(block.size)
                    share = radius / jnp.maximum(length, radius)
                step = lambda t, block=block, ghat=ghat, bend=bend: (  # noqa: E731
                    block - t * ghat - 0.5 * t**2 * bend
                )
                inside = lambda t, i=i, step=step: definition.contains(i, step(t))  # noqa: E731
                count = jnp.zeros((), jnp.int32)
                final = share * t
                if search is not None:
                    count = _backtracks(inside, final, search, jnp.isfinite(ghat).all())
                    final = final * search.factor**count
                moved.append((step(final), inside(final), share, count))
            new, ok, shares, counts = zip(*moved, strict=True)
            return new, jnp.stack(ok).all(), jnp.stack(shares).min(), jnp.stack(counts)

        every_copy = jax.vmap(one_copy, (0, 0, None))
        new, ok, shares, counts = every_copy(self.vectors, tangent.directions, t)
        if search is not None and not curved:  # a line search: the step of all is cut alike
            shares = jnp.asarray(search.factor, self.dtype) ** counts.max()
            new, ok, *_ = every_copy(self.vectors, tangent.directions, shares * t)
        finite = jnp.stack([jnp.isfinite(ghat).all() for ghat in tangent.directions]).all()
        ok = ok.all()
        kept = tuple(
            jnp.where(ok & finite, after, before)
            for after, before in zip(new, self.vectors, strict=True)
        )
        status = Status.where(
            ~finite, Status.nonfinite, Status.where(ok, Status.ok, Status.left_set)
        )
        family = eqx.tree_at(lambda q: q.vectors, self, kept)
        none = jnp.zeros((), jnp.int32)
        halvings = jnp.where(finite, counts.sum(), 0)
        return family, StepInfo(status, none, shares.min(), shares.min(), halvings, none)


def _backtracks(
    inside: Callable, t: Float[Array, ""], search: LineSearch, finite: Bool[Array, ""]
) -> Int[Array, ""]:
    """How often t must be multiplied by the search's factor until `inside(t)`."""
    most = search.most_backtracks(MOST_HALVINGS)

    def outside(count: Int[Array, ""]) -> Bool[Array, ""]:
        return finite & ~inside(t * search.factor**count) & (count < most)

    return jax.lax.while_loop(outside, lambda count: count + 1, jnp.zeros((), jnp.int32))


def custom(
    *,
    blocks: Mapping[str, Any],
    log_prob: Callable[[Any, dict[str, Array]], Array],
    log_partition: Callable[[dict[str, Array]], Array],
    sampler: Callable[[Array, dict[str, Array]], PyTree],
    constraints: Mapping[str, Any] | None = None,
    entropy: Callable[[dict[str, Array]], Array] | None = None,
    copies: tuple[int, ...] | int = (),
    name: str = "Custom",
) -> Custom:
    """A family of your own, as a start for `iblr.fit`.

    Args:
        blocks: the parameters of one member by name, where the fit starts. Each is one block of the
            rule: put parameters that the Fisher matrix couples into one.
        log_prob: `log_prob(z, blocks)`, the normalised log density of one point.
        log_partition: `log_partition(blocks)`, A. Up to a constant; log_prob + A must be affine in
            each block while the others are fixed.
        sampler: `sampler(key, blocks)`, one draw that JAX can differentiate in the blocks
            (a draw of `iblr.Gamma` can be, and JAX's own of `gamma`, `beta` and `dirichlet`, which
            compile for longer; a rejection loop of your own cannot).
        constraints: where blocks must stay, by name: `iblr.positive`, `iblr.positive_definite`,
            `iblr.interval(low, high)`; those left out are real.
        entropy: `entropy(blocks)` in closed form, if there is one: then `Rep` works too, and the
            ELBO has less noise.
        copies: independent copies, a shape: points then have it in front.
        name: what it is called in messages.

    Returns:
        A family. `ValueError` where the blocks are not block-coordinate natural, in words.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> weibull = iblr.custom(                 # with its power fixed at 2: a Rayleigh density
        ...     blocks={"rate": 1.0},
        ...     log_prob=lambda z, b: jnp.log(2 * z * b["rate"]) - b["rate"] * z**2,
        ...     log_partition=lambda b: -jnp.log(b["rate"]),
        ...     sampler=lambda key, b: jnp.sqrt(jax.random.exponential(key) / b["rate"]),
        ...     constraints={"rate": iblr.positive})
        >>> posterior = iblr.fit(lambda z: jnp.log(z) - 3.0 * z**2, weibull, key=jax.random.key(0))
        >>> round(float(posterior.family.blocks["rate"]), 3)
        3.0
    """
    definition, vectors = define(
        blocks, log_prob, log_partition, sampler, constraints, entropy, name
    )
    sizes = tuple(copies) if isinstance(copies, Sequence) else (copies,)
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1 for n in sizes):
        raise ValueError(
            f"`custom(copies=...)` needs whole numbers of at least 1, but got {copies}."
        )
    copies = tuple(int(n) for n in sizes)
    event = check_functions(definition, vectors)
    check_assumptions(definition, vectors)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(copies + leaf.shape, leaf.dtype), event)
    rows = tuple(jnp.tile(v, (math.prod(copies), 1)) for v in vectors)
    return Custom(
        vectors=rows, definition=definition, copies=copies, structure=Structure.like(shapes)
    )
