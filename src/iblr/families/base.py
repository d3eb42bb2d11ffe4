"""The contract of a family: what the estimators, the rule, the loop and the posterior rely on."""

import abc
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Float, Int, Key, PyTree

from iblr.families.curvature import Parameterisation
from iblr.status import Status
from iblr.structure import Structure


class StepInfo(NamedTuple):
    """What happened in one step.

    Attributes:
        status: `Status.ok`, or why the family was kept as it was.
        limited: directions whose change was cut to what the precision can hold.
        shrunk: the factor by which the trust region scaled the losses of precision (1: not at all).
        mean_shrunk: the factor by which the trust region scaled the step of the mean.
    """

    status: Status
    limited: Int[Array, ""]
    shrunk: Float[Array, ""]
    mean_shrunk: Float[Array, ""]

    @property
    def refused(self):
        """Whether the family was kept as it was."""
        return self.status != Status.ok


class AbstractFamily(eqx.Module):
    """An approximation q(z), an immutable pytree of parameters.

    A point z is a pytree laid out by `structure`; a family works on flat vectors inside and shows
    pytrees outside. Families are batched with `jax.vmap`, not by their methods.
    """

    structure: eqx.AbstractVar[Structure]
    mean: eqx.AbstractVar[Float[Array, " d"]]

    @property
    def dim(self) -> int:
        """Number of scalars in one point."""
        return self.structure.dim

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""

    @property
    @abc.abstractmethod
    def standard_deviations(self) -> Float[Array, " d"]:
        """The marginal standard deviations, flat."""

    @property
    @abc.abstractmethod
    def covariance(self) -> Float[Array, "d d"]:
        """The covariance of the flat point."""

    @property
    @abc.abstractmethod
    def precision(self) -> Float[Array, "d d"]:
        """The inverse of the covariance."""

    @abc.abstractmethod
    def sample(self, key: Key[Array, ""], num: int | None = None) -> PyTree:
        """`num` draws stacked along a first axis, or one draw without that axis."""

    @abc.abstractmethod
    def sample_with_log_prob(
        self, key: Key[Array, ""], num: int
    ) -> tuple[Float[Array, "num d"], Float[Array, " num"]]:
        """Flat draws and log q at them, by the cheapest way the family has."""

    @abc.abstractmethod
    def log_prob(self, z: PyTree) -> Float[Array, "*batch"]:
        """Log density at one point, or at points stacked along leading axes."""

    @abc.abstractmethod
    def entropy(self) -> Float[Array, ""]:
        """Differential entropy in nats."""

    @abc.abstractmethod
    def kl(self, other: Any) -> Float[Array, ""]:
        """KL(self || other) in nats."""

    @abc.abstractmethod
    def expected_log_prob(self, q: Any) -> Float[Array, ""]:
        """E_q[log self(z)] in closed form: what makes a prior's term exact."""

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
    ) -> tuple["AbstractFamily", StepInfo]:
        """The rule without the curvature term; see `iblr.natural_gradient_step`."""

    @abc.abstractmethod
    def geodesic(
        self, tangent: Any, step_size: Float[Array, ""], curvature_step_size: Float[Array, ""]
    ) -> tuple["AbstractFamily", StepInfo]:
        """The exact geodesic of every block; see `iblr.geodesic_step`."""

    @abc.abstractmethod
    def with_gradient(self, tangent: Any, gradient: Float[Array, " d"]) -> Any:
        """The tangent with another gradient in the mean: what momentum changes."""

    @abc.abstractmethod
    def refreshed(self) -> tuple["AbstractFamily", Float[Array, ""]]:
        """The family with derived quantities recomputed, and how far they had drifted."""
