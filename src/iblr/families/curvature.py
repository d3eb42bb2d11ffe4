"""The whitened natural gradient of a Gaussian's precision, and what a rule does to its spectrum.

Write S for the precision, A for any root of the covariance (Sigma = A'A) and G for the natural
gradient in S ([LSK20] eq. ivon_2). In whitened coordinates S is the identity and the natural
gradient is Ghat = A G A', so every rule of the package is one scalar function m of the eigenvalues
x of t Ghat, applied to the root:

    A <- m(t Ghat) A

    improved rule     S <- S - tG + (t^2/2) G S^-1 G       m(x) = f(x)^(-1/2), f(x) = 1 - x + x^2/2
    original rule     S <- S - tG                          m(x) = (1 - x)^(-1/2), x < 1
    block geodesic    S <- S^(1/2) exp(-t Ghat) S^(1/2)    m(x) = exp(x/2)

In the parameter theta = S^p (p = 1 precision, -1 covariance, -1/2 standard deviation) the relative
step is p x and the geodesic is again exponential, so that the rule of that parameterisation is
theta <- theta f(p x), that is m(x) = f(p x)^(-1/(2p)). Appendix A ({mu, sigma}, {mu, v}) and E.4
({mu, Sigma}) of the paper are p = -1/2 and p = -1.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int

from iblr.families.line_search import LineSearch
from iblr.linalg import matmul, orthonormal_rows, unit_rows

LARGEST_GAIN = 3.0
LARGEST_LOSS = 0.5
CHOLESKY_LIMIT = 8.0
CHOLESKY_PIVOT = 0.2


class Parameterisation(enum.Enum):
    """The power of the precision in which a rule takes its step."""

    precision = 1.0
    covariance = -1.0
    standard_deviation = -0.5

    def check_only(self, family: str) -> None:
        """Raise where a family that is no Gaussian is asked to step in another block."""
        if self is not Parameterisation.precision:
            raise ValueError(
                f"`parameterisation={self.name}` is a choice of the Gaussians; {family} steps in "
                "the blocks of its own. Leave it out."
            )


class Rule(NamedTuple):
    """A rule as the scalar function m, and how it is to be applied.

    Attributes:
        multiplier: m.
        trust_region: whether x is bounded first.
        new_metric: whether the mean moves in the metric after the step.
        is_polynomial: whether m is f^(-1/2), so that a Cholesky factor of f may stand for it.
    """

    multiplier: Callable[[Float[Array, "..."]], Float[Array, "..."]]
    trust_region: bool = False
    new_metric: bool = False
    is_polynomial: bool = False


def improved(parameterisation: Parameterisation, trust_region: bool) -> Rule:
    """The improved rule in the parameter S^power."""
    power = parameterisation.value
    return Rule(
        lambda x: (0.5 * (1 + (1 - power * x) ** 2)) ** (-0.5 / power),
        trust_region=trust_region,
        is_polynomial=power == 1,
    )


def original(parameterisation: Parameterisation) -> Rule:
    """The rule without the curvature term; nan where the step leaves the set."""
    power = parameterisation.value
    return Rule(
        lambda x: jnp.where(power * x < 1, 1 - power * x, jnp.nan) ** (-0.5 / power),
        new_metric=True,
    )


def geodesic() -> Rule:
    """The exact geodesic of the precision block, the mean held ([LSK20] lemma gauss_s_chris).

    The lemma prints Exp(+t ...); its derivative at zero must be -G, so the sign here is the
    corrected one.
    """
    return Rule(lambda x: jnp.exp(0.5 * x))


class RootChange(NamedTuple):
    """T in A <- T A: `rest * I + rows' core rows`, with `core` a matrix or a diagonal.

    Attributes:
        rows: None where T is diagonal, with `core` on the diagonal.
        core: see above.
        rest: the multiple of the identity.
        log_det: log|T|.
        finite: whether the curvature was finite; then nan in T means that the step left the set.
        limited: directions whose change was cut to what the precision can hold.
        shrunk: the factor by which the trust region scaled the losses of precision.
    """

    rows: Float[Array, "r d"] | None
    core: Float[Array, "r *r"]
    rest: Float[Array, ""]
    log_det: Float[Array, ""]
    finite: Bool[Array, ""]
    limited: Int[Array, ""]
    shrunk: Float[Array, ""]

    def times_core(self, rows: Float[Array, "r d"]) -> Float[Array, "r d"]:
        """`core` times the given rows."""
        return self.core[:, None] * rows if self.core.ndim == 1 else matmul(self.core, rows)

    def if_ok(self, ok: Bool[Array, ""]) -> "RootChange":
        """T where `ok` holds, the identity elsewhere."""
        assert self.rows is not None
        return self._replace(
            rows=jnp.where(ok, self.rows, 0),
            core=jnp.where(ok, self.core, 0),
            rest=jnp.where(ok, self.rest, 1),
        )

    def inverse(self) -> "RootChange":
        """T^-1, for orthonormal rows and a diagonal core."""
        assert self.core.ndim == 1
        core = -self.core / (self.rest * (self.rest + self.core))
        return self._replace(core=core, rest=1 / self.rest, log_det=-self.log_det)

    def apply(self, row: Float[Array, " d"]) -> Float[Array, " d"]:
        """T times one vector."""
        if self.rows is None:
            return self.core * row
        along = self.times_core(matmul(self.rows, row)[:, None])[:, 0]
        return self.rest * row + matmul(along, self.rows)


class Spectrum(NamedTuple):
    """Eigenvalues of Ghat: `values` on the orthonormal rows `basis`, `rest` on their complement.

    `basis` is None where the eigenvectors are the coordinate axes; `rest_dim` may be zero.
    """

    basis: Float[Array, "r d"] | None
    values: Float[Array, " r"]
    rest: Float[Array, ""]
    rest_dim: int

    def cut(self, t: Float[Array, ""], line_search: LineSearch) -> Float[Array, ""]:
        """What of t keeps the original rule's 1 - t Ghat positive, by the line search."""
        x = t * self.values
        return line_search.cut(jnp.maximum(x.max(), t * self.rest) if self.rest_dim else x.max())

    def change(self, t: Float[Array, ""], rule: Rule) -> RootChange:
        """T = m(t Ghat).

        With a trust region, gains of precision (x < 0) are clipped one by one at x = -3 and losses
        (x > 0) are scaled by one common factor so that the largest is at most 1/2. Losses must not
        be clipped one by one: f is smallest at x = 1, so every noisy direction would double its
        variance.

        In every case one step changes one direction of the root by a factor of at most 100 in
        float32 (10^6 in float64): beyond that the rounding of the stored factor would show in its
        determinant.
        """
        x, rest = t * self.values, t * self.rest
        factor = jnp.ones((), x.dtype)
        if rule.trust_region:
            largest = jnp.maximum(x.max(), rest) if self.rest_dim else x.max()
            factor = jnp.minimum(1, LARGEST_LOSS / jnp.maximum(largest, LARGEST_LOSS))
            x = jnp.where(x < 0, jnp.maximum(x, -LARGEST_GAIN), factor * x)
            rest = jnp.where(rest < 0, jnp.maximum(rest, -LARGEST_GAIN), factor * rest)
        bound = 1e-2 if jnp.finfo(x.dtype).eps > 1e-10 else 1e-6
        values, others = rule.multiplier(x), rule.multiplier(rest)
        outside = [(value < bound) | (value > 1 / bound) for value in (values, others)]
        limited = (outside[0].sum() + self.rest_dim * outside[1]).astype(jnp.int32)
        values, others = (jnp.clip(value, bound, 1 / bound) for value in (values, others))
        finite = jnp.isfinite(self.values).all() & jnp.isfinite(self.rest) & jnp.isfinite(t)
        if self.basis is None:
            log_det = jnp.log(values).sum()
            return RootChange(None, values, others, log_det, finite, limited, factor)
        if self.rest_dim == 0:
            others = jnp.exp(jnp.log(values).mean())  # any value will do; this one rounds least
        core = values - others
        squared = jnp.sum(self.basis**2, axis=1)  # 1 but for rounding, which adds up over steps
        log_det = jnp.log(others + core * squared).sum() + self.rest_dim * jnp.log(others)
        return RootChange(self.basis, core, others, log_det, finite, limited, factor)


class LowRank(eqx.Module):
    """Ghat = shift * I - sym(left' right), of rank 2M on top of a multiple of the identity."""

    shift: Float[Array, ""]
    left: Float[Array, "M d"]
    right: Float[Array, "M d"]

    def dense(self) -> "Dense":
        """The same operator as a matrix."""
        d = self.left.shape[1]
        half = 0.5 * matmul(self.left.T, self.right)
        return Dense(self.shift * jnp.eye(d, dtype=half.dtype) - half - half.T)

    def plus(self, other: "LowRank | Dense | Diagonal") -> "Dense":
        """The sum of two operators."""
        return self.dense().plus(other)

    def diagonal(self) -> Float[Array, " d"]:
        """The diagonal of the operator."""
        return self.shift - jnp.sum(self.left * self.right, axis=0)

    def spectrum(self) -> Spectrum:
        """From a 2M-by-2M eigenproblem where 2M < d, from a d-by-d one otherwise."""
        M, d = self.left.shape
        if 2 * M >= d:
            return self.dense().spectrum()
        return self.spectrum_in(*orthonormal_rows(jnp.concatenate([self.left, self.right])))

    def spectrum_in(self, basis: Float[Array, "r d"], rows: Float[Array, "r r"]) -> Spectrum:
        """The spectrum, given orthonormal rows and the coordinates of `left`, `right` in them."""
        M, d = self.left.shape
        half = 0.5 * matmul(rows[:M].T, rows[M:])
        values, vectors = jnp.linalg.eigh(half + half.T)
        return Spectrum(matmul(vectors.T, basis), self.shift - values, self.shift, d - 2 * M)

    def change(self, t: Float[Array, ""], rule: Rule) -> RootChange:
        """T = m(t Ghat), or another root of the same covariance where that is cheaper."""
        M, d = self.left.shape
        if 2 * M >= d or rule.trust_region or not rule.is_polynomial:
            return self.spectrum().change(t, rule)

        return _cheapest_change(self, t, rule)

    def cholesky_change(self, t: Float[Array, ""]) -> tuple[RootChange, Bool[Array, ""]]:
        """A root of f(t Ghat)^-1 without eigenvectors, and whether it can be trusted.

        Take from each row of `right` its part along the same row of `left`, and let F be all rows
        scaled to length one. With F F' = R R' and X = t Ghat in the orthonormal rows R^-1 F,
        f(X) = (I + (I - X)^2) / 2 = L L' gives T = L^-1 there. It needs |X| to be moderate, since
        f is formed, and the rows to be well separated, since R is inverted.
        """
        M, d = self.left.shape
        squared = jnp.sum(self.left**2, axis=1, keepdims=True)
        along = jnp.sum(self.left * self.right, axis=1, keepdims=True) / squared
        rows, lengths = unit_rows(jnp.concatenate([self.left, self.right - along * self.left]))
        identity = jnp.eye(2 * M, dtype=rows.dtype)
        R = jnp.linalg.cholesky(matmul(rows, rows.T))
        inside = lengths * R
        half = 0.5 * matmul(inside[:M].T, inside[M:] + along * inside[:M])
        X = t * (self.shift * identity - half - half.T)
        L = jnp.linalg.cholesky(0.5 * (identity + matmul(identity - X, identity - X)))
        x = t * self.shift
        # The barrier keeps `log(rest)` that of the rounded number by which A is multiplied.
        rest = jax.lax.optimization_barrier((0.5 * (1 + (1 - x) ** 2)) ** -0.5)
        R_inverse, L_inverse = (solve_triangular(F, identity, lower=True) for F in (R, L))
        core = matmul(matmul(R_inverse.T, L_inverse - rest * identity), R_inverse)
        log_det = (d - 2 * M) * jnp.log(rest) + jnp.log(jnp.diagonal(L_inverse)).sum()
        size = jnp.maximum(jnp.sqrt(jnp.sum(X**2)), jnp.abs(x))
        fits = (size < CHOLESKY_LIMIT) & (jnp.diagonal(R).min() > CHOLESKY_PIVOT)
        none, all_ = jnp.zeros((), jnp.int32), jnp.ones((), rows.dtype)
        return RootChange(rows, core, rest, log_det, jnp.asarray(True), none, all_), fits


class Dense(eqx.Module):
    """Ghat as a symmetric matrix."""

    matrix: Float[Array, "d d"]

    def dense(self) -> "Dense":
        """The operator itself."""
        return self

    def plus(self, other: "LowRank | Dense | Diagonal") -> "Dense":
        """The sum of two operators."""
        return Dense(self.matrix + other.dense().matrix)

    def diagonal(self) -> Float[Array, " d"]:
        """The diagonal of the matrix."""
        return jnp.diagonal(self.matrix)

    def spectrum(self) -> Spectrum:
        """From a d-by-d eigenproblem."""
        values, vectors = jnp.linalg.eigh(self.matrix)
        return Spectrum(vectors.T, values, jnp.zeros((), values.dtype), 0)

    def change(self, t: Float[Array, ""], rule: Rule) -> RootChange:
        """T = m(t Ghat), or another root of the same covariance where that is cheaper."""
        if rule.trust_region or not rule.is_polynomial:
            return self.spectrum().change(t, rule)
        return _cheapest_change(self, t, rule)

    def cholesky_change(self, t: Float[Array, ""]) -> tuple[RootChange, Bool[Array, ""]]:
        """T = L^-1 for f(t Ghat) = L L', and whether it can be trusted, as for `LowRank`."""
        X = t * self.matrix
        identity = jnp.eye(len(X), dtype=X.dtype)
        L = jnp.linalg.cholesky(0.5 * (identity + matmul(identity - X, identity - X)))
        T = solve_triangular(L, identity, lower=True)
        none, one = jnp.zeros((), jnp.int32), jnp.ones((), X.dtype)
        log_det = -jnp.log(jnp.diagonal(L)).sum()
        change = RootChange(identity, T - identity, one, log_det, jnp.asarray(True), none, one)
        return change, jnp.sqrt(jnp.sum(X**2)) < CHOLESKY_LIMIT


def _cheapest_change(operator: Any, t: Float[Array, ""], rule: Rule) -> RootChange:
    """By a Cholesky factor where that is accurate, by eigenvectors elsewhere and under `vmap`."""

    def full(operator: Any, t: Float[Array, ""]) -> RootChange:
        change = operator.spectrum().change(t, rule)
        return change._replace(core=jnp.diag(change.core))

    @custom_vmap
    def change(operator: Any, t: Float[Array, ""]) -> RootChange:
        cheap, fits = operator.cholesky_change(t)
        return jax.lax.cond(fits, lambda: cheap, lambda: full(operator, t))

    @change.def_vmap
    def batched(axis_size, in_batched, operator, t):  # where `cond` would compute both
        axes = jax.tree.map(lambda mapped: 0 if mapped else None, in_batched)
        changes = jax.vmap(full, in_axes=axes)(operator, t)
        return changes, jax.tree.map(lambda _: True, changes)

    return change(operator, t)


class Diagonal(eqx.Module):
    """Ghat of a Gaussian with a diagonal covariance."""

    values: Float[Array, " d"]

    def dense(self) -> Dense:
        """The same operator as a matrix."""
        return Dense(jnp.diag(self.values))

    def plus(self, other: "LowRank | Dense | Diagonal") -> "Diagonal":
        """The sum of two operators, on the diagonal."""
        return Diagonal(self.values + other.diagonal())

    def diagonal(self) -> Float[Array, " d"]:
        """The entries."""
        return self.values

    def spectrum(self) -> Spectrum:
        """The entries themselves."""
        return Spectrum(None, self.values, jnp.zeros((), self.values.dtype), 0)

    def change(self, t: Float[Array, ""], rule: Rule) -> RootChange:
        """T = m(t Ghat)."""
        return self.spectrum().change(t, rule)
