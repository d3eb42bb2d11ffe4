"""Gradients of a mean loss together with the mean of the squares of its examples' gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def grad_and_squares(
    loss: Callable[[Any, Any], Array], *, chunk: int | None = None
) -> Callable[[PyTree, PyTree], tuple[Float[Array, ""], PyTree, PyTree]]:
    """What `vogn` needs: gradients of every example, averaged, and their squares, averaged.

    Args:
        loss: of the parameters and one example, an entry along the first axis of the batch.
        chunk: how many examples to take at a time; their gradients are held at once. All of them
            by default.

    Returns:
        A function of parameters and a batch: the mean loss, the mean gradients, and the mean of
        the squared gradients, in float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from iblr.optax import grad_and_squares
        >>> both = grad_and_squares(lambda w, x: 0.5 * (w - x) ** 2)
        >>> loss, gradient, squares = both(jnp.array(0.0), jnp.array([1.0, 3.0]))
        >>> float(loss), float(gradient), float(squares)
        (2.5, -2.0, 5.0)
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"`grad_and_squares(chunk=...)` must be at least 1, but got {chunk}.")

    def sums(params: PyTree, examples: PyTree) -> tuple[Array, PyTree, PyTree]:
        values, slopes = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, examples)
        slopes = jax.tree.map(lambda g: g.astype(jnp.float32), slopes)
        total = values.astype(jnp.float32).sum()
        first = jax.tree.map(lambda g: g.sum(0), slopes)
        return total, first, jax.tree.map(lambda g: (g * g).sum(0), slopes)

    def both(params: PyTree, batch: PyTree) -> tuple[Float[Array, ""], PyTree, PyTree]:
        count = _examples(batch)
        if chunk is None or chunk >= count:
            total = sums(params, batch)
        else:
            split = count - count % chunk
            rest = jax.tree.map(lambda x: x[split:], batch)
            chunks = jax.tree.map(lambda x: x[:split].reshape(-1, chunk, *x.shape[1:]), batch)
            shapes = jax.eval_shape(sums, params, rest)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            total, _ = jax.lax.scan(
                lambda sofar, part: (jax.tree.map(jnp.add, sofar, sums(params, part)), None),
                sums(params, rest) if split < count else zeros,
                chunks,
            )
        return jax.tree.map(lambda x: x / count, total)

    return both


def _examples(batch: PyTree) -> int:
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(counts) != 1 or () in counts or (0,) in counts:
        raise ValueError(
            "`grad_and_squares(loss)(params, batch)` needs examples along the first axis of every "
            f"leaf of the batch, but these are {sorted(counts)}. Give every leaf the same number."
        )
    return counts.pop()[0]
