"""The contract of a family: what the estimators, the rule, the loop and the posterior rely on."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree

from iblr.families.curvature import Parameterisation
from iblr.families.line_search import LineSearch
from iblr.status import Status
from iblr.structure import Structure


class StepInfo(NamedTuple):
    """What happened in one step.

    Attributes:
        status: `Status.ok`, or why the family was kept as it was.
        limited: directions whose change was cut to what the precision can hold, or draws that
            underflowed and were held at the smallest number.
        shrunk: the factor by which a trust region scaled the losses of precision or the decreases
            of positive parameters, or by which a line search cut the step (1: not at all).
        mean_shrunk: the factor by which the step of the mean was scaled.
        halvings: how often a step was halved because no theorem keeps it inside the set.
        excluded: draws left out because the target was not finite there; a family that cannot do
            without them refuses the step instead.
    """

    status: Status
    limited: Int[Array, ""]
    shrunk: Float[Array, ""]
    mean_shrunk: Float[Array, ""]
    halvings: Int[Array, ""]
    excluded: Int[Array, ""]

    @property
    def refused(self):
        """Whether the family was kept as it was."""
        return self.status != Status.ok


class Draws(NamedTuple):
    """Draws from a family, and what it needs to turn slopes at them into a tangent."""

    rows: Float[Array, "M d"]
    noise: Any


class Defaults(NamedTuple):
    """What `iblr.fit` takes for a family where nothing is said, as measured in benchmarks.

    Attributes:
        step_size: the schedule of t for a number of steps and of pairs.
        trust_region: whether the improved rule bounds the change of one step.
        pairs: those of `Stl`.
        first_round: steps of the first of the rounds in which it settles by itself.
    """

    step_size: Callable[[int, int], Callable[[ArrayLike], Float[Array, ""]]]
    trust_region: bool
    pairs: int
    first_round: int = 100


def modest_steps(step: ArrayLike) -> Float[Array, ""]:
    """min(1/10, 2 / (10 + k)): large steps first, then an average of natural parameters."""
    return jnp.minimum(0.1, 2 / (10.0 + step))


def bold_steps(step: ArrayLike) -> Float[Array, ""]:
    """min(1/2, 5 / (10 + k)), for use with a trust region."""
    return jnp.minimum(0.5, 5 / (10.0 + step))


class SettlingSteps(eqx.Module):
    """`largest` for two fifths of all steps, then linearly to zero."""

    largest: Float[Array, ""]
    num_steps: Float[Array, ""]

    def __init__(self, largest: float, num_steps: int):
        self.largest, self.num_steps = jnp.asarray(largest), jnp.asarray(float(num_steps))

    def __call__(self, step: ArrayLike) -> Float[Array, ""]:
        """t at a step; not below a thousandth, where more steps are taken than were planned."""
        left = (1 - jnp.asarray(step) / self.num_steps) / 0.6
        return self.largest * jnp.clip(left, 1e-3, 1.0)


MARGINAL_DRAWS = 4000


class AbstractFamily(eqx.Module):
    """An approximation q(z), an immutable pytree of parameters.

    A point z is a pytree laid out by `structure`; a family works inside on the flat vector x of its
    real coordinates and shows points outside. The two differ by a map where a leaf has a support
    (`structure.unravel`); what is said of x here is said of z where it has none. Families are
    batched with `jax.vmap`, not by their methods.
    """

    structure: eqx.AbstractVar[Structure]
    mean: eqx.AbstractVar[Float[Array, " d"]]

    growth: ClassVar[Any] = None
    """How a mixture adapts its size between rounds of a fit; None where a family has one size."""

    line_search: ClassVar[LineSearch] = LineSearch(factor=0.8)
    """How the paper's authors keep the original rule inside the set."""

    @property
    def name(self) -> str:
        """What the family is called in messages."""
        return type(self).__name__

    @property
    def dim(self) -> int:
        """Number of coordinates x of one point."""
        return self.structure.dim

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes of the parameters: () for one member, (n,) for n stacked ones."""
        return self.mean.shape[:-1]

    @property
    def gradient_size(self) -> int:
        """Length of a tangent's `gradient`, which is what momentum averages: none by default."""
        return 0

    @property
    def groups(self) -> int:
        """Groups of draws that `draw_pairs` makes: the components of a mixture."""
        return 1

    @property
    def centres(self) -> Float[Array, "n d"]:
        """Where a fit starts: the target must be finite at one of these points."""
        return self.mean[None]

    @property
    def defaults(self) -> Defaults:
        """What `iblr.fit` takes where nothing is said."""
        return Defaults(lambda num_steps, pairs: bold_steps, True, 8)

    @property
    def leaves_out_draws(self) -> bool:
        """Whether draws at which the target is not finite are left out of a step, not refused."""
        return False

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""

    @property
    @abc.abstractmethod
    def standard_deviations(self) -> Float[Array, " d"]:
        """The standard deviations of x."""

    @property
    @abc.abstractmethod
    def covariance(self) -> Float[Array, "d d"]:
        """The covariance of x."""

    @property
    @abc.abstractmethod
    def precision(self) -> Float[Array, "d d"]:
        """The inverse of the covariance."""

    def with_support(self, support: Any) -> "AbstractFamily":
        """The family with leaves mapped onto supports, if its coordinates are real."""
        raise ValueError(
            f"`support=` maps the real coordinates of a Gaussian onto constrained leaves, but a "
            f"{self.name} lives where its own density says. Leave it out."
        )

    # Draws and densities.

    @abc.abstractmethod
    def draw(self, key: Key[Array, ""], num: int, antithetic: bool = False) -> Draws:
        """`num` draws of x; `antithetic` ones come in pairs where the family has a symmetry."""

    def draw_pairs(self, key: Key[Array, ""], pairs: int, reuse: bool = False) -> Draws:
        """Antithetic draws for `stl`, `pairs` of them in every group.

        With `reuse` the draws of all groups serve every group, by importance weights.
        """
        return self.draw(key, 2 * pairs, antithetic=True)

    @abc.abstractmethod
    def log_prob_of_draws(self, draws: Draws) -> Float[Array, " M"]:
        """log q(x) at draws, by the cheapest way the family has."""

    def sample_with_log_prob(
        self, key: Key[Array, ""], num: int
    ) -> tuple[Float[Array, "num d"], Float[Array, " num"]]:
        """Draws of x, and log q(x) at them."""
        draws = self.draw(key, num)
        return draws.rows, self.log_prob_of_draws(draws)

    @abc.abstractmethod
    def log_prob_rows(self, rows: Float[Array, "M d"]) -> Float[Array, " M"]:
        """log q(x) at any coordinates."""

    def sample(self, key: Key[Array, ""], num: int | None = None) -> PyTree:
        """`num` draws stacked along a first axis, or one draw without that axis."""
        rows = self.draw(key, count_draws("sample", num)).rows
        return self.structure.unravel(rows[0] if num is None else rows)

    def log_prob(self, z: PyTree) -> Float[Array, "*batch"]:
        """Log density at one point, or at points stacked along leading axes."""
        rows = self.structure.ravel(z, "log_prob(z)").astype(self.dtype)
        flat = rows.reshape(-1, self.dim)
        value = _log_prob_of_points(self, flat).reshape(rows.shape[:-1])
        if self.structure.is_real:
            return value
        inside, unknown = self.structure.contains(z)
        return jnp.where(inside, value, jnp.where(unknown, jnp.nan, -jnp.inf))

    @abc.abstractmethod
    def entropy(self) -> Float[Array, ""] | None:
        """Differential entropy of x in nats; None where there is no closed form."""

    @abc.abstractmethod
    def kl(self, other: Any) -> Float[Array, ""]:
        """KL(self || other) in nats."""

    @abc.abstractmethod
    def expected_log_prob(self, q: Any) -> Float[Array, ""]:
        """E_q[log self(x)] in closed form: what makes a prior's term exact."""

    def moments(self) -> tuple[PyTree, PyTree]:
        """Mean and standard deviation of every scalar of a point.

        On a support they have no closed form and are estimated from 4 000 draws of fixed noise, so
        that one family always gives one answer.
        """
        if self.structure.is_real:
            return tuple(map(self.structure.unravel, (self.mean, self.standard_deviations)))
        draws = self.sample(jax.random.key(0), MARGINAL_DRAWS)
        mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), draws)
        return mean, jax.tree.map(lambda leaf: leaf.std(axis=0), draws)

    def intervals(self, probability: float) -> tuple[PyTree, PyTree]:
        """The ends of the central interval of every scalar of a point, from draws as above."""
        draws = self.sample(jax.random.key(0), MARGINAL_DRAWS)
        tail = 0.5 * (1 - probability)
        ends = jnp.array([tail, 1 - tail])
        both = jax.tree.map(lambda leaf: jnp.quantile(leaf, ends.astype(leaf.dtype), 0), draws)
        return jax.tree.map(lambda leaf: leaf[0], both), jax.tree.map(lambda leaf: leaf[1], both)

    # From slopes of -log p at draws to the natural gradient of the negative ELBO.

    @abc.abstractmethod
    def rep(self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]) -> Any:
        """The tangent at independent draws, with the entropy's part exact.

        `slopes` are gradients of lbar = -log p, `values` those of log p.
        """

    @abc.abstractmethod
    def stl(self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]) -> Any:
        """The tangent at draws of `draw_pairs`, with log q differentiated there too."""

    def hess(
        self,
        draws: Draws,
        slopes: Float[Array, "M d"],
        values: Float[Array, " M"],
        hessians: Float[Array, "M d d"],
    ) -> Any:
        """The tangent at independent draws from exact Hessians of lbar."""
        raise ValueError(
            f"`Hess` estimates the curvature of a Gaussian, but got a {self.name}. Use "
            "`iblr.Stl(pairs=...)` or `iblr.Rep(samples=...)`, which serve every family."
        )

    @abc.abstractmethod
    def add_prior(self, tangent: Any, prior: Any, weight: Float[Array, ""]) -> Any:
        """The tangent with the exact term of `weight * log prior` added."""

    def with_gradient(self, tangent: Any, gradient: Float[Array, " p"]) -> Any:
        """The tangent with another `gradient`: what momentum changes."""
        return tangent

    # The rules.

    @abc.abstractmethod
    def improved(
        self,
        tangent: Any,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        trust_region: bool,
    ) -> tuple["AbstractFamily", StepInfo]:
        """The improved rule; see `iblr.improved_step`."""

    @abc.abstractmethod
    def original(
        self,
        tangent: Any,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        line_search: LineSearch | None,
    ) -> tuple["AbstractFamily", StepInfo]:
        """The rule without the curvature term; see `iblr.natural_gradient_step`.

        With `line_search` the step of all blocks is cut alike to stay in the set.
        """

    @abc.abstractmethod
    def geodesic(
        self, tangent: Any, step_size: Float[Array, ""], curvature_step_size: Float[Array, ""]
    ) -> tuple["AbstractFamily", StepInfo]:
        """The exact geodesic of every block; see `iblr.geodesic_step`."""

    @abc.abstractmethod
    def refreshed(self) -> tuple["AbstractFamily", Float[Array, ""]]:
        """The family with derived quantities recomputed, and how far they had drifted."""

    def losses(self, tangent: Any) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Draws of a tangent that were held at the smallest number, and that were left out."""
        none = jnp.zeros((), jnp.int32)
        return none, none

    # Parameters without constraints, for methods that know no geometry (`iblr.baselines`).

    def free(self) -> PyTree:
        """Parameters theta that may take any real values."""
        return self._no_free()

    def from_free(self, theta: PyTree) -> "AbstractFamily":
        """The member at theta; nan where that is none, as with a standard deviation of zero."""
        return self._no_free()

    def free_gradient(self, tangent: Any, theta: PyTree) -> PyTree:
        """The gradient of the negative ELBO in theta, from a natural gradient.

        The Fisher matrix lowers the index of the tangent, the chain rule does the rest. `theta` is
        that of this member.
        """
        return self._no_free()

    def _no_free(self) -> NoReturn:
        raise ValueError(
            f"A {self.name} has no parameters without constraints, which black-box methods need. "
            "Write its `free`, `from_free` and `free_gradient`, or use `iblr.improved_step`."
        )


def cut_alike(
    moved: Callable[[Any], tuple[Any, StepInfo]], line_search: LineSearch | None
) -> tuple[Any, StepInfo]:
    """The step `moved(1)`; with a line search that of the share which keeps every block inside."""
    if line_search is None:
        return moved(1.0)
    share = moved(1.0)[1].shrunk
    family, info = moved(share)
    return family, info._replace(shrunk=share, mean_shrunk=share)


def count_draws(call: str, num: int | None) -> int:
    """How many draws a user asked for: one where `num` is None."""
    if num is None:
        return 1
    if isinstance(num, bool) or not hasattr(num, "__index__") or num < 1:
        raise ValueError(f"`{call}(key, num)` needs a whole number from 1, but got {num!r}.")
    return num


# Compiled as a whole, since hundreds of operations would be compiled one by one.


@eqx.filter_jit
def _log_prob_of_points(family: AbstractFamily, rows: Float[Array, "M d"]) -> Float[Array, " M"]:
    return family.log_prob_rows(rows) - family.structure.log_jacobian(rows)


@eqx.filter_jit
def marginals(family: AbstractFamily, probability: float) -> tuple[PyTree, ...]:
    """Mean, standard deviation and the ends of the central interval of every scalar."""
    return *family.moments(), *family.intervals(probability)
