"""Checks of what a user passes to a family's constructors: a `ValueError` that names the call."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, PyTree

from iblr.structure import Structure


def start_structure(
    call: str, dim: int | None, like: PyTree, dtype: Any, support: Any = None
) -> tuple[Structure, Any]:
    """The structure and dtype of a standard start, from a dimension or from a pytree."""
    if (dim is None) == (like is None):
        raise ValueError(
            f"`{call}(dim)` or `{call}(like=params)` needs exactly one of the two, but got "
            f"dim={dim!r} and like={'None' if like is None else 'a pytree'}."
        )
    if like is not None:
        structure = Structure.like(like, support, call=call)
        dtype = dtype or jnp.result_type(*jax.tree.leaves(like))
    else:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
            raise ValueError(
                f"`{call}(dim)` needs an integer, but got {dim!r}. For a pytree of parameters "
                f"write `{call}(like=params)`."
            )
        structure = Structure.flat(int(dim)).with_support(support)
    if structure.dim < 1:
        raise ValueError(f"`{call}` needs at least one dimension, but got {structure.dim}.")
    return structure, floating_type(call, dtype or float)


def floating_type(call: str, dtype: Any) -> Any:
    """A floating-point type, as precise as JAX is set to be."""
    try:
        found = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(f"`{call}(dtype=...)` needs a floating-point type, but got {dtype!r}.")
    return found


def flat_mean(call: str, mean: PyTree, dtype: Any) -> tuple[Float[Array, " d"], Structure]:
    """A mean given as a vector or a pytree, as a vector."""
    structure = Structure.like(jax.tree.map(lambda x: jnp.asarray(x, dtype), mean))
    vector = structure.ravel(mean, f"{call}(mean=...)").astype(dtype)
    if vector.ndim != 1 or structure.dim < 1:
        raise ValueError(
            f"`{call}(mean=...)` needs a vector of at least one number, but got shape "
            f"{vector.shape}."
        )
    check_finite(call, "mean", vector)
    return vector, structure


def positive(
    call: str, parameters: dict[str, PyTree], dtype: Any
) -> tuple[list[Float[Array, " d"]], Structure]:
    """Positive parameters, broadcast against one another, as vectors over one structure.

    A number or an array goes with every leaf of a pytree; two pytrees must have one structure. A
    list of plain numbers is an array.
    """
    for name, value in parameters.items():
        try:
            fine = all(jnp.isrealobj(jnp.asarray(leaf)) for leaf in jax.tree.leaves(value))
        except (TypeError, ValueError):
            fine = False
        if not fine:
            raise ValueError(f"`{call}({name}=...)` needs positive numbers, but got {value!r}.")
    parameters = {name: _number_array(value) for name, value in parameters.items()}
    dtype = floating_type(call, dtype or floating(*parameters.values()))
    single = jax.tree.structure(0)
    trees = {jax.tree.structure(value) for value in parameters.values()}
    if len(trees - {single}) > 1:
        raise ValueError(
            f"`{call}({', '.join(parameters)})` needs parameters of one structure, but got "
            f"{' and '.join(map(str, trees - {single}))}."
        )
    treedef = next(iter(trees - {single}), single)
    leaves = {
        name: jax.tree.leaves(value)
        * (1 if jax.tree.structure(value) == treedef else treedef.num_leaves)
        for name, value in parameters.items()
    }
    arrays = {name: [jnp.asarray(x, dtype) for x in xs] for name, xs in leaves.items()}
    try:
        shapes = [
            np.broadcast_shapes(*(x.shape for x in column))
            for column in zip(*arrays.values(), strict=True)
        ]
    except ValueError as error:
        shown = "; ".join(f"{n} {[x.shape for x in xs]}" for n, xs in arrays.items())
        raise ValueError(
            f"`{call}({', '.join(parameters)})` needs shapes that broadcast, but got {shown}."
        ) from error
    structure = Structure(treedef, tuple(shapes))
    if structure.dim < 1:
        raise ValueError(
            f"`{call}({', '.join(parameters)})` needs at least one number, but got shapes {shapes}."
        )
    vectors = []
    for name, xs in arrays.items():
        full = [jnp.broadcast_to(x, s).reshape(-1) for x, s in zip(xs, shapes, strict=True)]
        vectors.append(jnp.concatenate(full))
        check_positive(call, name, vectors[-1])
    return vectors, structure


def _number_array(value: Any) -> Any:
    """Lists of plain numbers, however deep, as an array; everything else as it is."""
    numbers = all(isinstance(leaf, int | float | np.number) for leaf in jax.tree.leaves(value))
    if not isinstance(value, list | tuple) or not numbers:
        return value
    try:
        return np.asarray(value)
    except ValueError:  # of unequal lengths: a pytree
        return value


def floating(*trees: Any) -> Any:
    """The floating-point type that the leaves promote to; the default one for integers."""
    dtype = jnp.result_type(*[jnp.asarray(leaf) for leaf in jax.tree.leaves(trees)])
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)


def check_finite(call: str, name: str, value: Float[Array, "..."]) -> None:
    """Raise unless every entry is finite; silent on a traced array."""
    if not isinstance(value, Tracer) and not bool(jnp.isfinite(value).all()):
        raise ValueError(f"`{call}({name}=...)` must be finite, but it has nan or inf entries.")


def check_positive(call: str, name: str, value: Float[Array, "..."]) -> None:
    """Raise unless every entry is positive and finite; silent on a traced array."""
    check_finite(call, name, value)
    if not isinstance(value, Tracer) and not bool((value > 0).all()):
        tiny = jnp.finfo(value.dtype).tiny
        raise ValueError(
            f"`{call}({name}=...)` must be positive, and at least {tiny:.1g} in {value.dtype}, but "
            f"its smallest entry is {value.min():.3g}."
        )


def check_fits(call: str, name: str, value: Float[Array, "..."]) -> None:
    """Raise unless a parameter made from positive arguments is a normal number, too."""
    limits = jnp.finfo(value.dtype)
    if not isinstance(value, Tracer) and not bool(
        ((value >= limits.tiny) & (value <= limits.max)).all()
    ):
        raise ValueError(
            f"`{call}({name}=...)` does not fit into {value.dtype}: it makes a parameter between "
            f"{value.min():.3g} and {value.max():.3g}. Rescale the numbers, or use float64."
        )


def cholesky(call: str, name: str, matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The lower Cholesky factor of a matrix that must be symmetric and positive definite."""
    factor = jnp.linalg.cholesky(0.5 * (matrix + matrix.T))
    if isinstance(matrix, Tracer):
        return factor
    check_finite(call, name, matrix)
    asymmetry = float(jnp.abs(matrix - matrix.T).max())
    if asymmetry > 1e-3 * float(jnp.abs(matrix).max()):
        raise ValueError(
            f"`{call}({name}=...)` needs a symmetric matrix, but it differs from its transpose by "
            f"up to {asymmetry:.3g}. Pass `0.5 * (m + m.T)` if that is what you mean."
        )
    if not bool(jnp.isfinite(factor).all()):
        smallest = float(jnp.linalg.eigvalsh(matrix)[0])
        raise ValueError(
            f"`{call}({name}=...)` needs a positive-definite matrix, but its smallest eigenvalue "
            f"is {smallest:.3g}. Check the matrix, or add jitter: `m + 1e-6 * jnp.eye(d)`."
        )
    return factor


def square(call: str, name: str, matrix: ArrayLike, dim: int) -> Float[Array, "d d"]:
    """A matrix that must be `dim` by `dim`."""
    matrix = jnp.asarray(matrix)
    if matrix.shape != (dim, dim):
        raise ValueError(
            f"`{call}(mean, {name})` needs a {name} of shape ({dim}, {dim}) to go with a mean of "
            f"{dim} numbers, but got shape {matrix.shape}."
        )
    return matrix


def check_count(
    call: str, name: str, value: Any, *, least: int = 1, most: int | None = None
) -> None:
    """Raise unless `value` is a whole number from `least` to `most`."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(
            f"`{call}({name}=...)` must be a whole number {wanted}, but got {value!r}."
        )


def is_typed_key(key: Any) -> bool:
    """Whether it is one such as `jax.random.key(0)`, or an array of them."""
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def check_indices(call: str, indices: ArrayLike | Sequence[int], dim: int) -> np.ndarray:
    """Distinct coordinates of a flat point, in any order."""
    indices = np.atleast_1d(np.asarray(indices))
    valid = indices.ndim == 1 and indices.size and np.issubdtype(indices.dtype, np.integer)
    if not valid or indices.min() < 0 or indices.max() >= dim or len(set(indices)) < indices.size:
        raise ValueError(
            f"`{call}(indices)` needs distinct integers from 0 to {dim - 1}, but got "
            f"{indices.tolist()}."
        )
    return indices


def split_indices(
    indices: ArrayLike | Sequence[int], values: ArrayLike | Sequence[float], dim: int
) -> tuple[np.ndarray, np.ndarray, Float[Array, " k"]]:
    """The coordinates that `conditional` fixes, those it leaves free, and the fixed values."""
    indices, values = (
        check_indices("conditional", indices, dim),
        jnp.atleast_1d(jnp.asarray(values)),
    )
    if values.shape != indices.shape:
        raise ValueError(
            f"`conditional(indices, values)` needs one value an index, but got shapes "
            f"{indices.shape} and {values.shape}."
        )
    others = np.setdiff1d(np.arange(dim), indices)
    if others.size == 0:
        raise ValueError("`conditional(indices, ...)` fixes every coordinate; leave one free.")
    return indices, others, values


def log_simplex(
    call: str, weights: ArrayLike | None, count: int, dtype: Any
) -> Float[Array, " count"]:
    """The logarithms of `count` positive weights that sum to one; of equal ones for None."""
    if weights is None:
        return jnp.full(count, -np.log(count), dtype)
    weights = jnp.asarray(weights, dtype)
    if weights.shape != (count,):
        raise ValueError(
            f"`{call}(weights=...)` needs {count} weights, one a component, but got shape "
            f"{weights.shape}."
        )
    check_positive(call, "weights", weights)
    if not isinstance(weights, Tracer) and abs(float(weights.sum()) - 1) > 1e-3:
        raise ValueError(
            f"`{call}(weights=...)` must sum to one, but sums to {float(weights.sum()):.4g}. "
            "Divide by the sum if that is what you mean."
        )
    return jax.nn.log_softmax(jnp.log(weights))
