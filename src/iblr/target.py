"""What is to be approximated: a log density, perhaps a sum over data, checked before use.

    log p(z) = ( log_density(z)  or  (N / B) log_likelihood(z, batch) + log prior(z) ) / temperature

A prior given as a function is sampled with the rest; the term of one given as a family is known in
closed form, and `Rep`, `Hess` and the ELBO use it so (`Stl` and `Secant` say why they do not).
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from iblr.compiling import quickly_compiled
from iblr.structure import Structure

FlatFunction = Callable[[Float[Array, " d"]], Float[Array, ""]]


class Target(eqx.Module):
    """An unnormalised log density over points of the family's structure.

    Args:
        log_density: log density of one point, up to a constant; or, instead,
        log_likelihood: `log_likelihood(z, batch)`, the *sum* of the log likelihood over the rows
            of a batch of `data` (`log_likelihood(z)` where there is no `data`).
        data: pytree of arrays with one leading axis of length N.
        batch_size: rows B in a minibatch, drawn on the device at every step; the likelihood is
            scaled by N / B. None takes all rows.
        replacement: draw the rows of a minibatch with replacement.
        prior: a function `log_prior(z)`, or a family, whose term is then exact; a full `Gaussian`
            costs O(d^3) a step there, a `DiagonalGaussian` with `Stl` or `Secant` does not.
        temperature: fit p(z)^(1/temperature).

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> x, y = jnp.array([[1.0], [2.0], [-1.0]]), jnp.array([1.0, 1.0, -1.0])
        >>> target = iblr.Target(
        ...     log_likelihood=lambda w, rows: jax.nn.log_sigmoid(rows[1] * (rows[0] @ w)).sum(),
        ...     data=(x, y), batch_size=2, prior=iblr.Gaussian.standard(1))
        >>> target.num_data
        3
    """

    log_density: Callable | None
    log_likelihood: Callable | None
    data: PyTree
    prior: Any
    temperature: Float[Array, ""]
    batch_size: int | None = eqx.field(static=True)
    replacement: bool = eqx.field(static=True)

    def __init__(
        self,
        log_density: Callable | None = None,
        *,
        log_likelihood: Callable | None = None,
        data: PyTree = None,
        batch_size: int | None = None,
        replacement: bool = False,
        prior: Any = None,
        temperature: float = 1.0,
    ):
        if (log_density is None) == (log_likelihood is None):
            raise ValueError(
                "`Target(...)` needs exactly one of `log_density` and `log_likelihood`, but got "
                f"{'neither' if log_density is None else 'both'}."
            )
        for name, function in (("log_density", log_density), ("log_likelihood", log_likelihood)):
            if function is not None and not callable(function):
                raise ValueError(f"`Target({name}=...)` must be a function, but got {function!r}.")
        if log_density is not None and (data is not None or prior is not None):
            raise ValueError(
                "`Target(log_density=...)` already holds its data and prior, but got `data` or "
                "`prior` too. Pass `log_likelihood=` with them, or leave them out."
            )
        lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(data)}
        if data is not None and (len(lengths) != 1 or lengths & {(), (0,)}):
            raise ValueError(
                "`Target(data=...)` needs arrays that share one leading axis of at least one row, "
                f"but their shapes are {[jnp.shape(leaf) for leaf in jax.tree.leaves(data)]}."
            )
        num_data = lengths.pop()[0] if data is not None else None
        if batch_size is not None and (
            num_data is None
            or not isinstance(batch_size, int | np.integer)
            or not 1 <= batch_size <= num_data
        ):
            raise ValueError(
                f"`Target(batch_size=...)` must be a whole number from 1 to the {num_data or 'no'} "
                f"rows of `data`, but got {batch_size!r}."
            )
        if not 0 < temperature < float("inf"):
            raise ValueError(f"`Target(temperature=...)` must be positive, but got {temperature}.")
        self.log_density, self.log_likelihood = log_density, log_likelihood
        self.data = jax.tree.map(jnp.asarray, data)
        self.prior, self.temperature = prior, jnp.asarray(temperature, jnp.result_type(float))
        self.batch_size = None if batch_size is None else int(batch_size)
        self.replacement = replacement

    @property
    def num_data(self) -> int:
        """N, the rows of `data`; 0 where there is none."""
        return 0 if self.data is None else jax.tree.leaves(self.data)[0].shape[0]

    @property
    def exact_prior(self) -> Any:
        """The prior where it is a family, else None."""
        return None if callable(self.prior) else self.prior

    @property
    def is_stochastic(self) -> bool:
        """Whether an evaluation depends on a minibatch."""
        return self.batch_size is not None and self.batch_size < self.num_data

    def batch(self, key: Key[Array, ""]) -> PyTree:
        """A minibatch, or all data."""
        if not self.is_stochastic:
            return self.data
        shape = (self.batch_size or self.num_data,)
        rows = (
            jax.random.choice(key, self.num_data, shape)
            if self.replacement
            else distinct_rows(key, self.num_data, *shape)
        )
        return jax.tree.map(lambda leaf: leaf[rows], self.data)

    @property
    def weight(self) -> Float[Array, ""]:
        """What `log_density` or `log_likelihood` is multiplied by: (N / B) / temperature."""
        return (
            self.num_data / (self.batch_size or self.num_data) if self.num_data else 1.0
        ) / self.temperature

    def arguments(self, z: PyTree, batch: PyTree) -> tuple:
        """What `log_density` or `log_likelihood` is called with."""
        return (z,) if self.data is None else (z, batch)

    def sampled(self, structure: Structure, batch: PyTree) -> FlatFunction:
        """The part that must be sampled, as a function of flat coordinates: all but an exact prior.

        On a support it is the density of the coordinates, log p(z(x)) + log|dz/dx|. A prior that is
        a family over the same coordinates already has its share of the Jacobian, which the
        temperature does not divide. Products of matrices are taken in full precision, unless
        `jax_default_matmul_precision` says otherwise: an accelerator's default has three digits.
        """
        function: Any = self.log_density or self.log_likelihood
        share = 1.0 if self.exact_prior is None else 1 - 1 / self.temperature
        share = jnp.asarray(share)

        def log_density(vector: Float[Array, " d"]) -> Float[Array, ""]:
            z = structure.unravel(vector)
            with jax.default_matmul_precision(_precision()):
                value = self.weight * function(*self.arguments(z, batch))
                if callable(self.prior):
                    value = value + jnp.asarray(self.prior(z)) / self.temperature
            if not structure.is_real:
                value = value + share * structure.log_jacobian(vector)
            return value.astype(vector.dtype)

        return log_density

    def whole(self, structure: Structure, batch: PyTree) -> FlatFunction:
        """The tempered log density of flat coordinates, the prior included."""
        sampled = self.sampled(structure, batch)
        if self.exact_prior is None:
            return sampled

        def log_density(vector: Float[Array, " d"]) -> Float[Array, ""]:
            log_prior = self.exact_prior.log_prob_rows(vector[None])[0]
            return sampled(vector) + (log_prior / self.temperature).astype(vector.dtype)

        return log_density

    def check(self, structure: Structure, points: Float[Array, "n d"], starts: int = 1) -> None:
        """Raise `ValueError` unless the target can be fitted from `points`.

        It must be finite at one of the first `starts` of them, if there are any.
        """
        _check_prior(self, structure)
        batch = self.batch(jax.random.key(0))
        for name in ("log_density", "log_likelihood", "prior"):
            function = getattr(self, name)
            if callable(function):
                rest = (batch,) if name == "log_likelihood" and self.data is not None else ()
                _check_function(name, function, rest, structure, points, starts)


def _precision() -> str:
    """That of products in a target: the user's, or the highest."""
    options: Any = jax.config  # whose attributes are set as it is imported
    return options.jax_default_matmul_precision or "highest"


@functools.partial(jax.jit, static_argnums=(1, 2))
def distinct_rows(key: Key[Array, ""], num_data: int, count: int) -> Int[Array, " count"]:
    """A uniformly random set of `count` of `num_data` rows.

    On a CPU in O(count) by Floyd's algorithm (Bentley & Floyd 1987): the i-th draw is uniform among
    the first n - count + i + 1 rows, and the last of these where it was drawn before. Elsewhere by
    a permutation of all rows, since there steps in sequence are dear.
    """
    first = num_data - count

    def by_floyd(key: Key[Array, ""]) -> Int[Array, " count"]:
        drawn = jax.random.randint(key, (count,), 0, first + 1 + jnp.arange(count))

        def pick(taken: Bool[Array, " n"], step: tuple[Int[Array, ""], Int[Array, ""]]):
            index, row = step
            row = jnp.where(taken[row], index, row)
            return taken.at[row].set(True), row

        places = first + jnp.arange(count), drawn
        return jax.lax.scan(pick, jnp.zeros(num_data, bool), places)[1].astype(jnp.int32)

    def by_permutation(key: Key[Array, ""]) -> Int[Array, " count"]:
        return jax.random.choice(key, num_data, (count,), replace=False).astype(jnp.int32)

    return jax.lax.platform_dependent(key, cpu=by_floyd, default=by_permutation)


def as_target(target: Any, call: str) -> Target:
    """A `Target` as it is, a log density wrapped."""
    if isinstance(target, Target):
        return target
    if not callable(target):
        raise ValueError(
            f"`{call}(target, ...)` needs a log density or an `iblr.Target`, but got {target!r}."
        )
    return Target(target)


def _check_prior(target: Target, structure: Structure) -> None:
    prior = target.exact_prior
    if prior is not None and getattr(prior, "structure", None) != structure:
        raise ValueError(
            "`Target(prior=...)` must be a function or a family over the same points as the "
            f"approximation ({structure}), but got {prior!r}."
        )


def _check_function(
    name: str,
    function: Callable,
    rest: tuple,
    structure: Structure,
    points: Float[Array, "n d"],
    starts: int,
) -> None:
    flat = lambda vector, rest: function(structure.unravel(vector), *rest)  # noqa: E731
    start = points[0]
    shown = ", ".join(str(shape) for shape in structure.shapes)
    called = f"`{name}` called with " + (
        f"an array of shape {shown}" if structure.is_flat else f"a pytree of shapes {shown}"
    )
    try:
        out = jax.eval_shape(flat, start, rest)
    except Exception as error:
        raise ValueError(
            f"{called} raised {type(error).__name__}: {error}\nCheck that the family has the "
            "dimension the function expects, and that the function uses `jax.numpy` only."
        ) from error
    if not isinstance(out, jax.ShapeDtypeStruct) or out.shape != ():
        got = f"shape {out.shape}" if isinstance(out, jax.ShapeDtypeStruct) else f"{type(out)}"
        raise ValueError(
            f"{called} must return a scalar, but returned {got}. Sum the terms: `.sum()`."
        )
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"{called} is not differentiable: it returned {out.dtype}. Return a real number."
        )
    try:
        values, gradients = jax.device_get(_slopes(function, structure, points, rest))
    except Exception as error:
        raise ValueError(
            f"{called} is not differentiable: {type(error).__name__}: {error}\nReplace the "
            "operation by one that JAX differentiates, or give it a `jax.custom_vjp`."
        ) from error
    _check_values(called, values, gradients, starts)
    if name == "log_density":
        _check_that_it_varies(called, structure, points, gradients)


@functools.partial(quickly_compiled, once=True)
def _slopes(
    function: Callable, structure: Structure, points: Float[Array, "n d"], rest: tuple
) -> tuple[Float[Array, " n"], Float[Array, "n d"]]:
    """Values and gradients at points."""
    flat = lambda vector: function(structure.unravel(vector), *rest)  # noqa: E731
    return jax.vmap(jax.value_and_grad(flat))(points)


def _check_values(
    called: str,
    values: Float[np.ndarray, " n"],
    gradients: Float[np.ndarray, "n d"],
    starts: int,
) -> None:
    finite = np.isfinite(values) & np.isfinite(gradients).all(axis=1)
    if starts and not finite[:starts].any():
        value_is_finite = np.isfinite(values[0])
        what = "its gradient is nan or infinite" if value_is_finite else f"it returned {values[0]}"
        raise ValueError(
            f"{called} is not finite at the start: {what}. Start the family inside the support, or "
            "reparameterise so that every point is allowed."
        )
    values, gradients = values[finite], gradients[finite]
    if values.size > 1 and np.ptp(values) > 0 and (gradients == 0).all():
        raise ValueError(
            f"{called} is not differentiable: it varies, but its gradient is zero everywhere it "
            "was tried. Remove rounding, comparisons or `stop_gradient` from it."
        )


def _check_that_it_varies(
    called: str,
    structure: Structure,
    points: Float[Array, "n d"],
    gradients: Float[np.ndarray, "n d"],
) -> None:
    """A density over real coordinates does; points on a support have such, by a map."""
    slopes = np.zeros_like(gradients)
    if not structure.is_real:
        slopes = np.asarray(jax.vmap(jax.grad(structure.log_jacobian))(points))
    total, size = np.abs(gradients + slopes), np.abs(gradients) + np.abs(slopes)
    known = np.isfinite(total).all(axis=1)
    rounding = 100 * np.finfo(total.dtype).eps
    if known.sum() > 1 and (total <= rounding * size)[known].all():
        raise ValueError(
            f"{called} is the same everywhere it was tried (or, on a support, over the real "
            "numbers that are mapped onto it): there is no way to go. Does it use its argument? "
            "Give the parameters a prior or a support; or start where it varies, nearer or from a "
            "wider family."
        )
