"""Mixture of Gaussians q(z) = sum_c pi_c N(z | mu_c, S_c^-1); [LSK20] App. J.

With the component w as a second variable, q(w, z) = pi_w N(z | mu_w, S_w^-1) is a conditional
exponential family. Its joint Fisher matrix is block-diagonal in log pi, all mu_c and all S_c (lemma
mog_bc), and pi_c, which multiplies the Fisher block of a component, cancels the pi_c of its
gradient. With lbar = -log p, b = lbar + log q and responsibilities r_c(z) = pi_c N_c(z) / q(z),

    natural gradients     mu_c      Sigma_c g_c,   g_c = E_c[grad b]
                          S_c       G_c = -E_c[hess b]              eq. mog_cov_hess
                                        = -E_c[S_c (z - mu_c) grad b']        eq. mog_cov_rep
                          log pi_c  E_c[b]                          up to a common constant
    improved rule         mu_c <- mu_c - t Sigma_c g_c
                          S_c  <- S_c - t G_c + (t^2/2) G_c S_c^-1 G_c        eq. mog_iblr
                          log pi_c <- log pi_c - t E_c[b], normalised

where E_c is the expectation over the component N_c. So a component moves as the Gaussian it is, in
whitened coordinates, with the slopes of b in place of those of lbar:

    grad log q = -sum_c r_c B_c eps_c,                 eps_c = (z - mu_c) B_c,  B_c = A_c^-1
    hess log q = sum_c r_c (d_c d_c' - S_c) - (grad log q)(grad log q)',   d_c = -B_c eps_c

What differs between estimators is where E_c comes from: from draws of the component itself, which
keep light components learning (`Stl`), or from shared draws z_m with importance weights

    E_c[f] ~ mean_m (N_c / s)(z_m) f(z_m)

where s = q for draws of the mixture (the paper's delta_c = N_c / q; `Rep`, `Hess`) and
s = sum_j N_j / K for the draws of all components together (`Stl(reuse=True)`). Weights and
densities are kept as logarithms.

The weights are natural parameters without constraint: their second-order term,
(t^2/4)(E_c[b] - E_q[b])^2 up to a constant, is not zero but not needed, and an option
(`curved_weights`). With a trust region the step of log pi is bounded to a Fisher length of 1/10 and
to a factor of e: far from the target b differs between components by thousands of nats.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree

from iblr.families import arguments, mixture_components
from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.families.base import (
    AbstractFamily,
    Defaults,
    Draws,
    SettlingSteps,
    StepInfo,
    cut_alike,
)
from iblr.families.component import Component
from iblr.families.curvature import Parameterisation
from iblr.families.diagonal import DiagonalGaussian
from iblr.families.gaussian import Gaussian
from iblr.families.line_search import LineSearch
from iblr.families.mixture_components import scattered
from iblr.families.mixture_gradients import (
    MixtureTangent,
    Own,
    Pooled,
    Shared,
    Terms,
    from_own,
    weight_step,
    weighted,
)
from iblr.families.mixture_growth import (
    CANDIDATES,
    FIRST_COMPONENTS,
    MOST_COMPONENTS,
    NEGLIGIBLE_WEIGHT,
    Growth,
    grown,
)
from iblr.linalg import matmul
from iblr.status import Status
from iblr.structure import Structure
from iblr.target import as_target

LARGEST_STEP = 0.15
LARGEST_NOISE = 3.0


class GaussianMixture(AbstractFamily):
    """A mixture of Gaussians with full or diagonal covariances.

    Attributes:
        components: the Gaussians, stacked; `mixture[c]` is one of them.
        log_weights: log pi, normalised.
        learn_weights: whether the weights move.
        curved_weights: whether they move with their second-order term.
        weight_rate: the step size of the weights over that of the components.
        growth: how the number of components adapts; None where it is fixed.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> log_density = lambda z: jnp.logaddexp(-0.5 * (z[0] - 4) ** 2, -0.5 * (z[0] + 4) ** 2)
        >>> start = iblr.GaussianMixture.init(jax.random.key(0), 4, 1, spread=4.0)
        >>> mixture = iblr.fit(log_density, start, key=jax.random.key(1), num_steps=500).family
        >>> round(float(mixture.weights @ (mixture.components.mean[:, 0] > 0)), 1)
        0.5
    """

    components: Any
    log_weights: Float[Array, " K"]
    structure: Structure
    learn_weights: bool = eqx.field(static=True)
    curved_weights: bool = eqx.field(static=True)
    growth: Growth | None
    weight_rate: float = eqx.field(static=True)

    line_search: ClassVar[LineSearch] = LineSearch(factor=0.5)

    def __init__(
        self,
        components: Component | DiagonalGaussian,
        log_weights: Float[Array, " K"],
        structure: Structure,
        learn_weights: bool = True,
        curved_weights: bool = False,
        growth: Growth | None = None,
        weight_rate: float = 1.0,
    ):
        self.components, self.log_weights, self.structure = components, log_weights, structure
        self.learn_weights, self.curved_weights = learn_weights, curved_weights
        self.weight_rate = weight_rate
        self.growth = growth  # pyright: ignore[reportIncompatibleVariableOverride]

    @staticmethod
    def init(
        key: Key[Array, ""],
        components: int | Literal["auto"],
        dim: int | None = None,
        *,
        like: PyTree = None,
        scale: float = 1.0,
        spread: float = 1.0,
        diagonal: bool = False,
        learn_weights: bool = True,
        curved_weights: bool = False,
        weight_rate: float = 1.0,
        most: int = MOST_COMPONENTS,
        dtype: Any = None,
        support: Any = None,
    ) -> "GaussianMixture":
        """A start: equal weights, covariances scale^2 I, means drawn from N(0, spread^2 I).

        Args:
            key: for the means.
            components: their number, K; "auto" starts with few, and `fit` adds more where the
                mixture misses mass, deletes negligible ones, and stops when more do not help.
            dim: the length of a point; or, instead,
            like: a pytree of the structure of the points.
            scale: the standard deviation of each component.
            spread: that of the component means.
            diagonal: whether covariances are diagonal.
            learn_weights: whether the weights move.
            curved_weights: whether they move with their second-order term.
            weight_rate: the step size of the weights over that of the components; the paper's
                experiments have 0.01 to 0.05, which its noisier estimators need.
            most: components that "auto" may come to.
            dtype: the floating-point type.
            support: as for `Gaussian.standard`.
        """
        call, growth = "GaussianMixture.init", None
        arguments.check_count(call, "most", most)
        for name, value in (("scale", scale), ("spread", spread), ("weight_rate", weight_rate)):
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not is_number or not 0 < value < float("inf"):
                raise ValueError(
                    f"`{call}({name}=...)` must be a positive number, but got {value!r}."
                )
        if components == "auto":
            if not learn_weights:
                raise ValueError(
                    f'`{call}(components="auto")` needs weights that move, to find out which '
                    "components are negligible, but got learn_weights=False. Give their number."
                )
            components = min(FIRST_COMPONENTS, most)
            growth = Growth(float(scale), float(spread), most)
        arguments.check_count(call, "components", components)
        structure, dtype = arguments.start_structure(call, dim, like, dtype, support)
        stacked = scattered(key, (components, structure.dim), scale, spread, diagonal, dtype)
        log_weights = arguments.log_simplex(call, None, components, dtype)
        return GaussianMixture(
            stacked, log_weights, structure, learn_weights, curved_weights, growth, weight_rate
        )

    @staticmethod
    def from_moments(
        means: ArrayLike,
        covariances: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        learn_weights: bool = True,
    ) -> "GaussianMixture":
        """The mixture with given means, covariances and weights.

        Args:
            means: (K, d).
            covariances: (K, d, d), or variances (K, d) for diagonal components.
            weights: K positive numbers that sum to one; equal if not given.
            learn_weights: whether the weights move.
        """
        call = "GaussianMixture.from_moments"
        dtype = arguments.floating(means, covariances)
        means, covariances = jnp.asarray(means, dtype), jnp.asarray(covariances, dtype)
        if means.ndim != 2 or 0 in means.shape:
            raise ValueError(
                f"`{call}(means=...)` needs an array of shape (K, d), but got shape {means.shape}."
            )
        K, d = means.shape
        if covariances.shape not in ((K, d, d), (K, d)):
            raise ValueError(
                f"`{call}(means, covariances)` needs covariances of shape {(K, d, d)}, or "
                f"variances of shape {(K, d)}, to go with means of shape {means.shape}, but got "
                f"shape {covariances.shape}."
            )
        arguments.check_finite(call, "means", means)
        if covariances.ndim == 2:
            arguments.check_positive(call, "covariances", covariances)
            stacked = mixture_components.diagonal(means, jnp.sqrt(covariances))
        else:
            factors = jnp.stack([arguments.cholesky(call, "covariances", c).T for c in covariances])
            stacked = mixture_components.full(means, factors, jnp.linalg.inv(factors))
        log_weights = arguments.log_simplex(call, weights, K, dtype)
        return GaussianMixture(stacked, log_weights, Structure.flat(d), learn_weights)

    @property
    def num_components(self) -> int:
        """K."""
        return self.log_weights.shape[-1]

    @property
    def weights(self) -> Float[Array, "*runs K"]:
        """pi."""
        return jnp.exp(self.log_weights)

    def __getitem__(self, index: int) -> Gaussian | DiagonalGaussian:
        """One component."""
        self._check_single("mixture[component]")
        if not -self.num_components <= index < self.num_components:
            raise IndexError(f"component {index} of {self.num_components}")
        one = jax.tree.map(lambda leaf: leaf[index], self.components)
        if isinstance(one, DiagonalGaussian):
            return dataclasses.replace(one, structure=self.structure)
        return Gaussian(
            mean=one.mean, factor=one.factor, log_det=one.log_det, structure=self.structure
        )

    def _check_single(self, call: str) -> None:
        if self.batch_shape:
            raise ValueError(
                f"`{call}` needs one mixture, but this holds a batch of shape {self.batch_shape}. "
                "Take one run, `posterior[i].family`, or map over them by `jax.vmap`."
            )

    def with_support(self, support: Any) -> "GaussianMixture":
        """The same mixture over x, its points mapped onto the supports of the leaves."""
        return dataclasses.replace(self, structure=self.structure.with_support(support))

    def pruned(self, smallest: float = NEGLIGIBLE_WEIGHT) -> "GaussianMixture":
        """Without the components whose weight is below `smallest`; the heaviest stays."""
        self._check_single("pruned")
        return self.heaviest(max(int((self.weights >= smallest).sum()), 1))

    def heaviest(self, num: int) -> "GaussianMixture":
        """The `num` components of largest weight, in their order."""
        arguments.check_count("heaviest", "num", num, most=self.num_components)
        kept = jnp.sort(jax.lax.top_k(self.log_weights, num)[1])
        return dataclasses.replace(
            self,
            components=jax.tree.map(lambda leaf: leaf[kept], self.components),
            log_weights=jax.nn.log_softmax(self.log_weights[kept]),
        )

    def marginal(self, indices: ArrayLike | Sequence[int]) -> "GaussianMixture":
        """The distribution of the flat coordinates `indices`, in that order."""
        indices = arguments.check_indices("marginal", indices, self.dim)
        stacked = mixture_components.marginal(self.components, indices)
        structure = Structure.flat(indices.size)
        return dataclasses.replace(self, components=stacked, structure=structure)

    def responsibilities(self, z: PyTree) -> Float[Array, "*batch K"]:
        """The probability of every component at points, along a last axis."""
        rows = self.structure.ravel(z, "responsibilities(z)").astype(self.dtype)
        shares = self.terms(rows.reshape(-1, self.dim)).responsibilities
        return shares.T.reshape(*rows.shape[:-1], self.num_components)

    # The family contract.

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes of the parameters."""
        return self.log_weights.shape[:-1]

    @property
    def gradient_size(self) -> int:
        """The means of all components."""
        return self.num_components * self.dim

    @property
    def groups(self) -> int:
        """The components."""
        return self.num_components

    @property
    def centres(self) -> Float[Array, "K d"]:
        """The means of the components."""
        return self.components.mean

    @property
    def defaults(self) -> Defaults:
        """Steps that settle, and as many pairs of every component as the largest of them needs.

        The low-rank estimate of the curvature from P pairs has relative noise d / P, so steps of t
        are stable up to about t d / P = 3.
        """

        def step_size(num_steps: int, pairs: int) -> SettlingSteps:
            return SettlingSteps(min(LARGEST_STEP, LARGEST_NOISE * pairs / self.dim), num_steps)

        pairs = -(-self.dim * LARGEST_STEP // LARGEST_NOISE)
        return Defaults(step_size, True, int(pairs))

    @property
    def leaves_out_draws(self) -> bool:
        """Yes: a component learns from its other draws."""
        return True

    @property
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""
        return self.log_weights.dtype

    @property
    def mean(self) -> Float[Array, "*runs d"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """sum_c pi_c mu_c."""
        return jnp.einsum(
            "...k,...kd->...d", self.weights, self.components.mean, precision="highest"
        )

    @property
    def standard_deviations(self) -> Float[Array, " d"]:
        """The marginal standard deviations."""
        variances = jax.vmap(lambda q: q.variances)(self.components)
        return jnp.sqrt(self.weights @ (variances + (self.components.mean - self.mean) ** 2))

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """Within and between components."""
        within = weighted(self.weights, jax.vmap(lambda q: q.covariance)(self.components))
        apart = self.components.mean - self.mean
        return within + matmul((self.weights[:, None] * apart).T, apart)

    @property
    def precision(self) -> Float[Array, "d d"]:
        """The inverse of the covariance."""
        return jnp.linalg.inv(self.covariance)

    def draw(self, key: Key[Array, ""], num: int, antithetic: bool = False) -> Draws:
        """Draws of the mixture, each component as often as its weight says."""
        which_key, noise_key = jax.random.split(key)
        count = num // 2 if antithetic else num
        which = jax.random.categorical(which_key, self.log_weights, shape=(count,))
        E = jax.random.normal(noise_key, (count, self.dim), self.dtype)
        everywhere = jax.vmap(lambda q: q.colour(E))(self.components)
        X = jnp.take_along_axis(everywhere, which[None, :, None], axis=0)[0]
        means = self.components.mean[which]
        rows = jnp.concatenate([means + X, means - X]) if antithetic else means + X
        return Draws(rows, Pooled(self.log_weights))

    def draw_pairs(self, key: Key[Array, ""], pairs: int, reuse: bool = False) -> Draws:
        """Pairs mu_c +- eps A_c of every component."""
        K = self.num_components
        E = jax.random.normal(key, (K, pairs, self.dim), self.dtype)
        X = jax.vmap(lambda q, E: q.colour(E))(self.components, E)
        centres = self.components.mean[:, None]
        rows = jnp.concatenate([centres + X, centres - X], axis=1).reshape(-1, self.dim)
        proportions = jnp.full(K, -np.log(K), self.dtype)
        return Draws(rows, Pooled(proportions) if reuse else Own(E))

    def log_prob_of_draws(self, draws: Draws) -> Float[Array, " M"]:
        """log q at the draws."""
        return self.log_prob_rows(draws.rows)

    def log_prob_rows(self, rows: Float[Array, "M d"]) -> Float[Array, " M"]:
        """The logarithm of the sum over components."""
        return self.terms(rows).log_q

    def terms(self, rows: Float[Array, "N d"]) -> Terms:
        """What the density is made of, at rows."""
        return Terms.at(self.components, self.log_weights, rows)

    def entropy(self) -> None:
        """None: there is no closed form; see `entropy_estimate`."""
        return None

    def entropy_estimate(
        self, key: Key[Array, ""], *, draws: int = 1000
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The differential entropy of x from draws, and its standard error."""
        values = -self.sample_with_log_prob(key, draws)[1]
        return values.mean(), values.std() / jnp.sqrt(draws - 1)

    def kl(self, other: Any) -> Float[Array, ""]:
        """Not known in closed form."""
        raise ValueError(
            "`kl(other)` has no closed form for a GaussianMixture. Estimate it from draws: "
            "`(q.log_prob(z) - other.log_prob(z)).mean()`."
        )

    def expected_log_prob(self, q: Any) -> Float[Array, ""]:
        """Not known in closed form."""
        raise ValueError(
            "A GaussianMixture has no exact term as a prior. Pass `prior=prior.log_prob` to "
            "`Target`."
        )

    def stl(
        self, draws: Draws, slopes: Float[Array, "N d"], values: Float[Array, " N"]
    ) -> MixtureTangent:
        """From the slopes of b = lbar + log q, [LSK20] eq. mog_cov_rep, first equality."""
        terms = self.terms(draws.rows)
        if isinstance(draws.noise, Own):
            U, b = slopes + terms.score(), terms.log_q - values
            return from_own(self.components, self.weights, draws.noise.noise, U, b)
        return Shared.at(terms, draws.noise, slopes, values).stl()

    def rep(
        self, draws: Draws, slopes: Float[Array, "N d"], values: Float[Array, " N"]
    ) -> MixtureTangent:
        """Stein's identity for lbar and the exact Hessian of log q, the paper's "-rep"."""
        return Shared.at(self.terms(draws.rows), draws.noise, slopes, values).rep()

    def hess(
        self,
        draws: Draws,
        slopes: Float[Array, "N d"],
        values: Float[Array, " N"],
        hessians: Float[Array, "N d d"],
    ) -> MixtureTangent:
        """Exact Hessians of lbar and of log q, the paper's "-hess"."""
        known = jnp.isfinite(hessians).all((1, 2))
        values = jnp.where(known, values, jnp.nan)
        return Shared.at(self.terms(draws.rows), draws.noise, slopes, values).hess(hessians)

    def add_prior(
        self, tangent: MixtureTangent, prior: Any, weight: Float[Array, ""]
    ) -> MixtureTangent:
        """The exact term of a Gaussian prior, component by component."""
        if not isinstance(prior, AbstractGaussian):
            raise ValueError(
                f"`Target(prior=...)` has no exact term under a mixture where it is a "
                f"{prior.name}. Pass `prior=prior.log_prob`."
            )
        components = jax.vmap(lambda q, g: q.add_prior(g, prior, weight))(
            self.components, tangent.components
        )
        expected = jax.vmap(prior.expected_log_prob)(self.components)
        return dataclasses.replace(
            tangent,
            components=components,
            log_weights=tangent.log_weights - weight * expected,
        )

    def with_gradient(
        self, tangent: MixtureTangent, gradient: Float[Array, " p"]
    ) -> MixtureTangent:
        """The tangent with other gradients of the means."""
        rows = gradient.reshape(self.num_components, self.dim)
        components = jax.vmap(lambda q, g, row: q.with_gradient(g, row))(
            self.components, tangent.components, rows
        )
        return dataclasses.replace(tangent, components=components)

    def grown(self, target: Any, key: Key[Array, ""], num: int) -> "GaussianMixture":
        """With `num` more components where it misses mass of the target: a start for another fit.

        Args:
            target: a log density or a `Target`, as for `fit`.
            key: for the candidates, and a minibatch.
            num: components to add, at most 512.
        """
        arguments.check_count("grown", "num", num, most=CANDIDATES)
        growth_key, batch_key = jax.random.split(key)
        target = as_target(target, "grown")
        log_density = target.whole(self.structure, target.batch(batch_key))
        return grown(self, log_density, growth_key, num)

    # The rules.

    def improved(
        self,
        tangent: MixtureTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        trust_region: bool,
    ) -> tuple["GaussianMixture", StepInfo]:
        """[LSK20] eq. mog_iblr, component by component, and the weights."""
        moved = jax.vmap(
            lambda q, g: q.improved(
                g, step_size, curvature_step_size, parameterisation, trust_region
            )
        )(self.components, tangent.components)
        return self._moved(tangent, moved, step_size, trust_region)

    def original(
        self,
        tangent: MixtureTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        line_search: LineSearch | None,
    ) -> tuple["GaussianMixture", StepInfo]:
        """The rule without the curvature term; a line search cuts the step of all alike."""

        def moved(share: Any) -> tuple["GaussianMixture", StepInfo]:
            stepped = jax.vmap(
                lambda q, g: q.original(
                    g, share * step_size, share * curvature_step_size, parameterisation, line_search
                )
            )(self.components, tangent.components)
            return self._moved(tangent, stepped, share * step_size, False)

        return cut_alike(moved, line_search)

    def geodesic(
        self,
        tangent: MixtureTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
    ) -> tuple["GaussianMixture", StepInfo]:
        """The block geodesic of every component; straight in log pi."""
        moved = jax.vmap(lambda q, g: q.geodesic(g, step_size, curvature_step_size))(
            self.components, tangent.components
        )
        return self._moved(tangent, moved, step_size, False)

    def refreshed(self) -> tuple["GaussianMixture", Float[Array, ""]]:
        """Every component refreshed, and the largest drift."""
        components, drift = jax.vmap(lambda q: q.refreshed())(self.components)
        return dataclasses.replace(self, components=components), drift.max()

    def losses(self, tangent: MixtureTangent) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """None that underflowed, and those left out."""
        return jnp.zeros((), jnp.int32), tangent.excluded

    def free(self) -> dict[str, Any]:
        """Those of the components, stacked, and logits of the weights."""
        components = jax.vmap(lambda q: q.free())(self.components)
        return {"components": components, "logits": self.log_weights}

    def from_free(self, theta: dict[str, Any]) -> "GaussianMixture":
        """The weights are the softmax of the logits."""
        return dataclasses.replace(
            self,
            components=jax.vmap(lambda q, x: q.from_free(x))(self.components, theta["components"]),
            log_weights=jax.nn.log_softmax(theta["logits"]),
        )

    def free_gradient(self, tangent: MixtureTangent, theta: dict[str, Any]) -> dict[str, Any]:
        """pi_c times the gradient of a Gaussian, and pi_c (E_c[b] - E_q[b]) for the logits.

        nan where the target was finite at no draw.
        """
        pi = jnp.where(tangent.finite, self.weights, jnp.nan)

        def one(q: Any, g: Any, x: Any, weight: Float[Array, ""]) -> Any:
            return jax.tree.map(lambda leaf: weight * leaf, q.free_gradient(g, x))

        components = jax.vmap(one)(self.components, tangent.components, theta["components"], pi)
        logits = pi * (tangent.log_weights - self.weights @ tangent.log_weights)
        if not self.learn_weights:
            logits = jnp.zeros_like(pi)
        return {"components": components, "logits": logits}

    def _moved(
        self, tangent: MixtureTangent, moved: Any, t: Float[Array, ""], bounded: bool
    ) -> tuple["GaussianMixture", StepInfo]:
        components, infos = moved
        log_weights = self.log_weights
        if self.learn_weights:
            step = weight_step(
                self.weights,
                tangent.log_weights,
                self.weight_rate * t,
                bounded,
                self.curved_weights,
            )
            log_weights = jax.nn.log_softmax(log_weights - step)
        fine = tangent.finite & jnp.isfinite(log_weights).all() & ~infos.refused.any()
        after = dataclasses.replace(self, components=components, log_weights=log_weights)
        kept = jax.tree.map(lambda new, old: jnp.where(fine, new, old), after, self)
        worst = jnp.argmax(infos.refused)
        of_components = jax.tree.map(lambda code: code[worst], infos.status)
        status = Status.where(
            fine, Status.ok, Status.where(infos.refused.any(), of_components, Status.nonfinite)
        )
        return kept, StepInfo(
            status,
            jnp.where(fine, infos.limited.sum(), 0),
            infos.shrunk.min(),
            infos.mean_shrunk.min(),
            infos.halvings.sum(),
            tangent.excluded,
        )
