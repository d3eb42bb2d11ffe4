"""The shape of one point: a flat vector inside the library, a pytree in the user's hands."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class Structure(eqx.Module):
    """How a vector of `dim` numbers is laid out as a pytree of arrays.

    Hashable and compared by value, so that two families of the same structure share one compiled
    program.
    """

    treedef: Any = eqx.field(static=True)
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    @staticmethod
    def flat(dim: int) -> "Structure":
        """One array of shape `(dim,)`."""
        return Structure(jax.tree.structure(0), ((dim,),))

    @staticmethod
    def like(tree: PyTree) -> "Structure":
        """The structure of `tree`, whose leaves must be floating-point arrays or numbers."""
        leaves, treedef = jax.tree.flatten(tree)
        if not leaves:
            raise ValueError(
                "`standard(like=...)` needs at least one array, but the pytree has no leaves."
            )
        for path, leaf in jax.tree.leaves_with_path(tree):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ValueError(
                    f"`standard(like=...)` needs floating-point leaves, but the one at "
                    f"{jax.tree_util.keystr(path) or 'the root'} is {jnp.result_type(leaf)}. "
                    "Convert it, or leave it out of the parameters."
                )
        return Structure(treedef, tuple(jnp.shape(leaf) for leaf in leaves))

    @property
    def dim(self) -> int:
        """Number of scalars in one point."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def is_flat(self) -> bool:
        """Whether a point is one plain vector."""
        return self == Structure.flat(self.dim)

    def unravel(self, vector: Float[Array, "*batch d"]) -> PyTree:
        """Vectors to pytrees, over any leading axes."""
        batch, leaves, start = vector.shape[:-1], [], 0
        for shape in self.shapes:
            size = math.prod(shape)
            leaves.append(vector[..., start : start + size].reshape(batch + shape))
            start += size
        return jax.tree.unflatten(self.treedef, leaves)

    def ravel(self, tree: PyTree, call: str) -> Float[Array, "*batch d"]:
        """Pytrees to vectors, over any leading axes; `call` names the caller in the error."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f"`{call}` needs points with the structure {self.treedef}, but got {treedef}."
            )
        rows = []
        for leaf, shape in zip(leaves, self.shapes, strict=True):
            leaf = jnp.asarray(leaf)
            split = leaf.ndim - len(shape)
            if split < 0 or leaf.shape[split:] != shape:
                raise ValueError(
                    f"`{call}` needs points whose trailing shape is {shape}, but got an array of "
                    f"shape {leaf.shape}."
                )
            rows.append(leaf.reshape(leaf.shape[:split] + (-1,)))
        batches = {row.shape[:-1] for row in rows}
        if len(batches) > 1:
            raise ValueError(
                f"`{call}` needs leaves with the same leading axes, but got {sorted(batches)}."
            )
        return jnp.concatenate(rows, axis=-1)

    def labels(self) -> list[str]:
        """A name for every scalar: `z[3]`, or the path of its leaf and its index."""
        shells = jax.tree.unflatten(
            self.treedef, [jax.ShapeDtypeStruct(s, float) for s in self.shapes]
        )
        names = []
        for path, leaf in jax.tree.leaves_with_path(shells):
            stem = jax.tree_util.keystr(path, simple=True, separator=".") or "z"
            size = math.prod(leaf.shape)
            for flat in range(size):
                index, rest = [], flat
                for length in reversed(leaf.shape):
                    index.append(str(rest % length))
                    rest //= length
                names.append(stem + (f"[{', '.join(reversed(index))}]" if leaf.shape else ""))
        return names
