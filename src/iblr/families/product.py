"""A product of families over the named parts of a point: q(z) = prod_n q_n(z_n).

The parts are independent, so the Fisher matrix is block-diagonal over them and every block of every
part is a block of the product: the rule of the product is the rule of each part, with one step size
([LSK20] Assumptions 1 to 3 hold for the product where they hold for the parts). What couples them
is the target: all parts are drawn together, the slopes are taken at the joint draws, and the ELBO
is one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.families.base import AbstractFamily, Draws, StepInfo, cut_alike
from iblr.families.curvature import Parameterisation
from iblr.families.line_search import LineSearch
from iblr.status import Status
from iblr.structure import Structure


class ProductTangent(eqx.Module):
    """The natural gradient of every part."""

    parts: dict[str, Any]

    @property
    def gradient(self) -> Float[Array, " p"]:
        """What momentum averages, part after part."""
        return jnp.concatenate([tangent.gradient for tangent in self.parts.values()])


class Product(AbstractFamily):
    """Independent families over the parts of a dictionary.

    Args:
        parts: a family for every name.
        support: where the parts that are Gaussian live, such as `{"tau": iblr.positive}`.

    Attributes:
        parts: the families, in the order of their names; `product["tau"]` is one of them.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> x = jnp.array([0.9, 1.2, 0.7, 1.4, 0.8, 1.0])
        >>> def log_density(z):
        ...     log_lik = 0.5 * jnp.log(z["tau"]) - 0.5 * z["tau"] * (x - z["mu"]) ** 2
        ...     return log_lik.sum() - z["tau"] - 0.5 * z["mu"] ** 2
        >>> q = iblr.Product({"mu": iblr.Gaussian.standard(like=0.0), "tau": iblr.Gamma(1.0, 1.0)})
        >>> posterior = iblr.fit(log_density, q, key=jax.random.key(0), num_steps=1000)
        >>> round(float(posterior.mean["mu"]), 1), posterior.family["tau"].name
        (0.9, 'Gamma')
    """

    parts: dict[str, AbstractFamily]
    structure: Structure

    def __init__(self, parts: Mapping[str, AbstractFamily], *, support: Any = None):
        if not isinstance(parts, Mapping) or not parts:
            raise ValueError(
                "`Product(parts)` needs a dictionary of families, such as "
                f"`{{'tau': iblr.Gamma(1.0, 1.0)}}`, but got {parts!r}."
            )
        for name, part in parts.items():
            if not isinstance(name, str) or not isinstance(part, AbstractFamily):
                raise ValueError(
                    f"`Product(parts)` needs names and families, but got {name!r}: {part!r}."
                )
            if part.growth is not None:
                raise ValueError(
                    f"`Product(parts)` needs parts of one size, but {name!r} adapts it. Give the "
                    "number of components, or take `dataclasses.replace(mixture, growth=None)`."
                )
        if len({part.dtype for part in parts.values()}) > 1:
            shown = {name: str(part.dtype) for name, part in parts.items()}
            raise ValueError(f"`Product(parts)` needs parts of one precision, but got {shown}.")
        if len({part.batch_shape for part in parts.values()}) > 1:
            shown = {name: part.batch_shape for name, part in parts.items()}
            raise ValueError(
                "`Product(parts)` needs parts that are all single members, or all stacked along "
                f"the same axes, but their leading axes are {shown}."
            )
        named = dict(sorted(parts.items()))
        if support is not None:
            named = _supported(named, support)
        self.parts = named
        self.structure = Structure.join({name: part.structure for name, part in named.items()})

    def __getitem__(self, name: str) -> AbstractFamily:
        if name not in self.parts:
            raise ValueError(f"`product[{name!r}]` is no part; the parts are {list(self.parts)}.")
        return self.parts[name]

    def with_support(self, support: Any) -> "Product":
        """The product with its Gaussian parts mapped onto supports."""
        return Product(self.parts, support=support)

    def _with_parts(self, parts: dict[str, Any]) -> "Product":
        return eqx.tree_at(lambda q: q.parts, self, parts)

    def _split(self, rows: Float[Array, "*M d"]) -> dict[str, Float[Array, "*M _"]]:
        """Columns of flat rows by part."""
        dims = [part.dim for part in self.parts.values()]
        ends = [sum(dims[: i + 1]) for i in range(len(dims) - 1)]
        return dict(zip(self.parts, jnp.split(rows, ends, axis=-1), strict=True))

    def _each(self, term: Callable[[str, Any], Any]) -> dict[str, Any]:
        return {name: term(name, part) for name, part in self.parts.items()}

    def _sum(self, term: Callable[[str, Any], Any]) -> Float[Array, "..."]:
        return jnp.stack(list(self._each(term).values())).sum(0)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """That of the parts."""
        return next(iter(self.parts.values())).batch_shape

    @property
    def gradient_size(self) -> int:
        """That of all parts."""
        return sum(part.gradient_size for part in self.parts.values())

    @property
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""
        return next(iter(self.parts.values())).dtype

    @property
    def mean(self) -> Float[Array, " d"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The mean of x, part after part."""
        return jnp.concatenate([part.mean for part in self.parts.values()], axis=-1)

    @property
    def standard_deviations(self) -> Float[Array, " d"]:
        """The standard deviations of x."""
        return jnp.concatenate([part.standard_deviations for part in self.parts.values()])

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """Block-diagonal."""
        return jax.scipy.linalg.block_diag(*(part.covariance for part in self.parts.values()))

    @property
    def precision(self) -> Float[Array, "d d"]:
        """Block-diagonal."""
        return jax.scipy.linalg.block_diag(*(part.precision for part in self.parts.values()))

    def draw(self, key: Key[Array, ""], num: int, antithetic: bool = False) -> Draws:
        """Joint draws; the parts take keys of their own."""
        keys = jax.random.split(key, len(self.parts))
        drawn = {
            name: part.draw(key, num, antithetic)
            for key, (name, part) in zip(keys, self.parts.items(), strict=True)
        }
        return Draws(jnp.concatenate([draws.rows for draws in drawn.values()], axis=1), drawn)

    def log_prob_of_draws(self, draws: Draws) -> Float[Array, " M"]:
        """The sum over parts."""
        return self._sum(lambda name, part: part.log_prob_of_draws(draws.noise[name]))

    def log_prob_rows(self, rows: Float[Array, "M d"]) -> Float[Array, " M"]:
        """The sum over parts."""
        split = self._split(rows)
        return self._sum(lambda name, part: part.log_prob_rows(split[name]))

    def entropy(self) -> Float[Array, ""] | None:
        """The sum over parts; None where a part has no closed form."""
        if any(part.entropy() is None for part in self.parts.values()):
            return None
        return self._sum(lambda name, part: part.entropy())

    def kl(self, other: Any) -> Float[Array, ""]:
        """The sum over parts."""
        self._check_same_parts("kl(other)", other)
        return self._sum(lambda name, part: part.kl(other.parts[name]))

    def expected_log_prob(self, q: Any) -> Float[Array, ""]:
        """The sum over parts."""
        self._check_same_parts("expected_log_prob(q)", q)
        return self._sum(lambda name, part: part.expected_log_prob(q.parts[name]))

    def rep(
        self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]
    ) -> ProductTangent:
        """Every part from its own columns of the slopes."""
        split = self._split(slopes)
        return ProductTangent(
            self._each(lambda name, part: part.rep(draws.noise[name], split[name], values))
        )

    def stl(
        self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]
    ) -> ProductTangent:
        """Every part from its own columns of the slopes."""
        split = self._split(slopes)
        return ProductTangent(
            self._each(lambda name, part: part.stl(draws.noise[name], split[name], values))
        )

    def add_prior(
        self, tangent: ProductTangent, prior: Any, weight: Float[Array, ""]
    ) -> ProductTangent:
        """The exact term of a prior that is a product over the same parts."""
        self._check_same_parts("Target(prior=...)", prior)
        return ProductTangent(
            self._each(
                lambda name, part: part.add_prior(tangent.parts[name], prior.parts[name], weight)
            )
        )

    def with_gradient(
        self, tangent: ProductTangent, gradient: Float[Array, " p"]
    ) -> ProductTangent:
        """The tangent of another gradient."""
        parts, start = {}, 0
        for name, part in self.parts.items():
            own = gradient[start : start + part.gradient_size]
            parts[name] = part.with_gradient(tangent.parts[name], own)
            start += part.gradient_size
        return ProductTangent(parts)

    def improved(
        self,
        tangent: ProductTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        trust_region: bool,
    ) -> tuple["Product", StepInfo]:
        """The improved rule of every part."""
        return self._joined(
            lambda name, part: part.improved(
                tangent.parts[name],
                step_size,
                curvature_step_size,
                self._parameterisation(part, parameterisation),
                trust_region,
            )
        )

    def original(
        self,
        tangent: ProductTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        line_search: LineSearch | None,
    ) -> tuple["Product", StepInfo]:
        """The original rule of every part; a line search cuts the step of all parts alike."""

        def moved(share: Any) -> tuple["Product", StepInfo]:
            return self._joined(
                lambda name, part: part.original(
                    tangent.parts[name],
                    share * step_size,
                    share * curvature_step_size,
                    self._parameterisation(part, parameterisation),
                    line_search,
                )
            )

        return cut_alike(moved, line_search)

    def geodesic(
        self,
        tangent: ProductTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
    ) -> tuple["Product", StepInfo]:
        """The geodesic of every part, where all have one."""
        return self._joined(
            lambda name, part: part.geodesic(tangent.parts[name], step_size, curvature_step_size)
        )

    def refreshed(self) -> tuple["Product", Float[Array, ""]]:
        """Every part refreshed, and the largest drift."""
        fresh = self._each(lambda name, part: part.refreshed())
        drift = jnp.stack([drift for _, drift in fresh.values()]).max()
        return self._with_parts({name: part for name, (part, _) in fresh.items()}), drift

    def losses(self, tangent: ProductTangent) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Numbers that underflowed in all parts, and draws left out by the part that needs most."""
        parts = self._each(lambda name, part: part.losses(tangent.parts[name]))
        underflows, excluded = (jnp.stack(counts) for counts in zip(*parts.values(), strict=True))
        return underflows.sum(), excluded.max()

    def free(self) -> dict[str, Any]:
        """Those of every part."""
        return self._each(lambda name, part: part.free())

    def from_free(self, theta: dict[str, Any]) -> "Product":
        """Every part at its own."""
        return self._with_parts(self._each(lambda name, part: part.from_free(theta[name])))

    def free_gradient(self, tangent: ProductTangent, theta: dict[str, Any]) -> dict[str, Any]:
        """That of every part."""
        return self._each(lambda name, part: part.free_gradient(tangent.parts[name], theta[name]))

    def _joined(
        self, step: Callable[[str, Any], tuple[Any, StepInfo]]
    ) -> tuple["Product", StepInfo]:
        """The product of the parts after a step; none of them moves where one refused to."""
        moved = self._each(step)
        infos = [info for _, info in moved.values()]
        refused = jnp.stack([info.refused for info in infos]).any()
        after = self._with_parts({name: part for name, (part, _) in moved.items()})
        kept = jax.tree.map(lambda old, new: jnp.where(refused, old, new), self, after)
        status = infos[0].status
        for info in infos[1:]:
            status = Status.where(status != Status.ok, status, info.status)
        return kept, StepInfo(
            status,
            jnp.where(refused, 0, jnp.stack([info.limited for info in infos]).sum()),
            jnp.stack([info.shrunk for info in infos]).min(),
            jnp.stack([info.mean_shrunk for info in infos]).min(),
            jnp.stack([info.halvings for info in infos]).sum(),
            jnp.stack([info.excluded for info in infos]).max(),
        )

    def _parameterisation(self, part: AbstractFamily, chosen: Parameterisation) -> Parameterisation:
        """The choice concerns the Gaussian parts; the others have one."""
        has_choice = isinstance(part, AbstractGaussian | Product)
        return chosen if has_choice else Parameterisation.precision

    def _check_same_parts(self, call: str, other: Any) -> None:
        if not isinstance(other, Product) or list(other.parts) != list(self.parts):
            got = list(other.parts) if isinstance(other, Product) else getattr(other, "name", other)
            raise ValueError(
                f"`{call}` needs a `Product` of the parts {list(self.parts)}, but got {got}."
            )


def _supported(parts: dict[str, AbstractFamily], support: Any) -> dict[str, AbstractFamily]:
    """The parts with the supports given by name."""
    if not isinstance(support, Mapping):
        raise ValueError(
            "`Product(support=...)` needs a dictionary by the names of parts, such as "
            f"`{{'tau': iblr.positive}}`, but got {support!r}."
        )
    unknown = [name for name in support if name not in parts]
    if unknown:
        raise ValueError(
            f"`Product(support=...)` names parts that are not there: {unknown}. The parts are "
            f"{list(parts)}."
        )
    supported = dict(parts)
    for name, where in support.items():
        try:
            supported[name] = parts[name].with_support(where)
        except ValueError as error:
            raise ValueError(f"`Product(support=...)`, part {name!r}: {error}") from error
    return supported
