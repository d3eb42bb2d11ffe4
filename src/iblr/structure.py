"""The shape of one point: a flat vector inside the library, a pytree in the user's hands.

The flat vector holds real coordinates, the pytree points on the supports of its leaves; where every
leaf is real, the default, the two hold the same numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from iblr.support import AbstractSupport, real

Shape = tuple[int, ...]


class Structure(eqx.Module):
    """How a vector of `dim` real coordinates is laid out and mapped to a pytree of arrays.

    Hashable and compared by value, so that two families of the same structure share one compiled
    program.

    Attributes:
        treedef: the containers of a point.
        shapes: the shapes of the leaves of a point.
        supports: where each leaf lives; `real` if not given.
    """

    treedef: Any = eqx.field(static=True)
    shapes: tuple[Shape, ...] = eqx.field(static=True)
    supports: tuple[AbstractSupport, ...] = eqx.field(static=True)

    def __init__(
        self,
        treedef: Any,
        shapes: tuple[Shape, ...],
        supports: tuple[AbstractSupport, ...] | None = None,
    ):
        self.treedef, self.shapes = treedef, shapes
        self.supports = (real,) * len(shapes) if supports is None else supports
        if len(self.supports) != len(shapes):
            raise ValueError(
                f"`Structure(treedef, shapes, supports)` needs one support a leaf, but got "
                f"{len(self.supports)} for {len(shapes)} leaves."
            )

    @staticmethod
    def flat(dim: int) -> "Structure":
        """One array of shape `(dim,)`."""
        return Structure(jax.tree.structure(0), ((dim,),))

    @staticmethod
    def like(tree: PyTree, support: Any = None, *, call: str = "standard") -> "Structure":
        """The structure of points like `tree`, whose leaves must be floating-point.

        Args:
            tree: a template of the points: a leaf on the simplex has K numbers, one more than it
                has coordinates. Values do not matter.
            support: None for real leaves, one support for all leaves, or mappings and sequences
                that follow the containers of `tree` down to supports; what they leave out is real.
            call: the caller, for the errors.

        Example:
            >>> import jax.numpy as jnp
            >>> from iblr.structure import Structure
            >>> from iblr.support import positive, simplex
            >>> template = {"tau": 1.0, "mixture": {"weights": jnp.ones(3), "means": jnp.ones(3)}}
            >>> structure = Structure.like(
            ...     template, {"tau": positive, "mixture": {"weights": simplex}})
            >>> structure.dim, structure.point_dim
            (6, 7)
        """
        leaves, treedef = jax.tree.flatten(tree)
        if not leaves:
            raise ValueError(
                f"`{call}(like=...)` needs at least one array, but the pytree has no leaves."
            )
        for path, leaf in jax.tree.leaves_with_path(tree):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ValueError(
                    f"`{call}(like=...)` needs floating-point leaves, but the one at "
                    f"{jax.tree_util.keystr(path) or 'the root'} is {jnp.result_type(leaf)}. "
                    "Convert it, or leave it out of the parameters."
                )
        points = Structure(treedef, tuple(jnp.shape(leaf) for leaf in leaves))
        supports = points._assigned(support, f"{call}(support=...)")
        points._reshaped(supports, lambda s, shape: s.coordinate_shape(shape), call)
        return Structure(treedef, points.shapes, supports)

    @staticmethod
    def join(parts: Mapping[str, "Structure"]) -> "Structure":
        """The structure of dicts with a point of every part.

        A flat vector is that of the parts one after the other, *sorted by name*.
        """
        good = isinstance(parts, Mapping) and all(isinstance(name, str) for name in parts)
        if not good or not parts or not all(isinstance(p, Structure) for p in parts.values()):
            raise ValueError(
                "`Structure.join(parts)` needs a dict from names to structures, with at least one, "
                f"but got {parts!r}."
            )
        ordered = [parts[name] for name in sorted(parts)]
        treedef = jax.tree.structure({name: part._filled(0.0) for name, part in parts.items()})
        return Structure(
            treedef,
            sum((part.shapes for part in ordered), ()),
            sum((part.supports for part in ordered), ()),
        )

    def with_support(self, support: Any, *, call: str = "with_support") -> "Structure":
        """The structure of points on `support`, given as in `like`, of the same coordinates.

        A leaf on the simplex gains a number along its last axis. A leaf that is not real keeps its
        support, and it is an error to give it another.
        """
        supports, names = self._assigned(support, f"{call}(support=...)"), self._names()
        for name, old, new in zip(names, self.supports, supports, strict=True):
            if old != real and new not in (real, old):
                raise ValueError(
                    f"`{call}(support=...)` gives {name} the support {new}, but it already has "
                    f"{old}. Leave it out."
                )
        supports = tuple(
            new if old == real else old for old, new in zip(self.supports, supports, strict=True)
        )
        base = self.coordinates
        shapes = base._reshaped(supports, lambda s, shape: s.point_shape(shape), call)
        return Structure(self.treedef, shapes, supports)

    @property
    def coordinate_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the real coordinates of every leaf."""
        pairs = zip(self.supports, self.shapes, strict=True)
        return tuple(support.coordinate_shape(shape) for support, shape in pairs)

    @property
    def coordinates(self) -> "Structure":
        """The same coordinates laid out as a pytree, but not mapped: all leaves real."""
        return Structure(self.treedef, self.coordinate_shapes)

    @property
    def dim(self) -> int:
        """Number of real coordinates of one point, the length of a flat vector."""
        return sum(math.prod(shape) for shape in self.coordinate_shapes)

    @property
    def point_dim(self) -> int:
        """Number of scalars in one point."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def is_flat(self) -> bool:
        """Whether a point is one plain vector, on any support."""
        return self.treedef == jax.tree.structure(0) and len(self.shapes[0]) == 1

    @property
    def is_real(self) -> bool:
        """Whether points are their own coordinates."""
        return all(support == real for support in self.supports)

    def unravel(self, vector: Float[Array, "*batch d"]) -> PyTree:
        """Real coordinates to points on the supports, over any leading axes."""
        leaves = [
            x if support == real else support.forward(x) for support, x in self._blocks(vector)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def ravel(self, tree: PyTree, call: str) -> Float[Array, "*batch d"]:
        """Points to real coordinates, over any leading axes; `call` names the caller in errors.

        Coordinates of what is not on its support are nan or infinite.
        """
        leaves = self._checked(tree, call)
        return self._concatenated(
            [
                leaf if support == real else support.inverse(_floating(leaf))
                for support, leaf in zip(self.supports, leaves, strict=True)
            ],
            self.coordinate_shapes,
        )

    def ravel_point(self, tree: PyTree, call: str) -> Float[Array, "*batch n"]:
        """The numbers of points as they are, in the order of `labels`, over any leading axes."""
        return self._concatenated(self._checked(tree, call), self.shapes)

    def contains(self, tree: PyTree) -> tuple[Bool[Array, "*batch"], Bool[Array, "*batch"]]:
        """Whether points, over any leading axes, are on the supports, and whether any is nan."""
        inside, unknown = [], []
        for leaf, shape, support in zip(
            jax.tree.leaves(tree), self.shapes, self.supports, strict=True
        ):
            leaf = jnp.asarray(leaf)
            batch = leaf.shape[: leaf.ndim - len(shape)]
            inside.append(support.contains(leaf).reshape((*batch, -1)).all(-1))
            unknown.append(jnp.isnan(leaf).reshape((*batch, -1)).any(-1))
        return jnp.stack(inside).all(0), jnp.stack(unknown).any(0)

    def log_jacobian(self, vector: Float[Array, "*batch d"]) -> Float[Array, "*batch"]:
        """The log |det| of the map from coordinates to points, over any leading axes."""
        batch = vector.ndim - 1
        total = jnp.zeros(vector.shape[:-1], vector.dtype)
        if self.is_real:
            return total
        for support, x in self._blocks(vector):
            if support != real:
                terms = support.log_jacobian(x)
                total = total + terms.sum(axis=tuple(range(batch, terms.ndim)))
        return total

    def labels(self) -> list[str]:
        """A name for every scalar of a point: `z[3]`, or the path of its leaf and its index."""
        names = []
        for path, shape in zip(self._paths(), self.shapes, strict=True):
            stem = jax.tree_util.keystr(path, simple=True, separator=".") or "z"
            for flat in range(math.prod(shape)):
                index, rest = [], flat
                for length in reversed(shape):
                    index.append(str(rest % length))
                    rest //= length
                names.append(stem + (f"[{', '.join(reversed(index))}]" if shape else ""))
        return names

    def _blocks(
        self, vector: Float[Array, "*batch d"]
    ) -> list[tuple[AbstractSupport, Float[Array, "..."]]]:
        """The support and the coordinates of every leaf."""
        blocks, start = [], 0
        for support, shape in zip(self.supports, self.coordinate_shapes, strict=True):
            size = math.prod(shape)
            x = vector[..., start : start + size].reshape(vector.shape[:-1] + shape)
            blocks.append((support, x))
            start += size
        return blocks

    def _checked(self, tree: PyTree, call: str) -> list[Array]:
        """The leaves of points, which must have the structure and the same leading axes."""
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise ValueError(
                f"`{call}` needs points with the structure {self.treedef}, but got {treedef}."
            )
        leaves, batches = [jnp.asarray(leaf) for leaf in leaves], set()
        for leaf, shape in zip(leaves, self.shapes, strict=True):
            split = leaf.ndim - len(shape)
            if split < 0 or leaf.shape[split:] != shape:
                raise ValueError(
                    f"`{call}` needs points whose trailing shape is {shape}, but got an array of "
                    f"shape {leaf.shape}."
                )
            batches.add(leaf.shape[:split])
        if len(batches) > 1:
            raise ValueError(
                f"`{call}` needs leaves with the same leading axes, but got {sorted(batches)}."
            )
        return leaves

    def _concatenated(self, leaves: list[Array], shapes: tuple[Shape, ...]) -> Array:
        rows = [
            leaf.reshape(leaf.shape[: leaf.ndim - len(shape)] + (math.prod(shape),))
            for leaf, shape in zip(leaves, shapes, strict=True)
        ]
        return jnp.concatenate(rows, axis=-1)

    def _filled(self, value: Any) -> PyTree:
        return jax.tree.unflatten(self.treedef, [value] * len(self.shapes))

    def _paths(self) -> list[tuple]:
        return [path for path, _ in jax.tree.leaves_with_path(self._filled(0.0))]

    def _names(self) -> list[str]:
        return [f"the leaf {jax.tree_util.keystr(p)}" if p else "it" for p in self._paths()]

    def _assigned(self, support: Any, call: str) -> tuple[AbstractSupport, ...]:
        """The support of every leaf, from what a user passed."""
        paths = self._paths()
        found = _walk(
            support, {i: tuple(map(_key, path)) for i, path in enumerate(paths)}, "", call
        )
        return tuple(found.get(i, real) for i in range(len(paths)))

    def _reshaped(
        self,
        supports: tuple[AbstractSupport, ...],
        shape_of: Callable[[AbstractSupport, Shape], Shape],
        call: str,
    ) -> tuple[Shape, ...]:
        shapes = []
        for support, shape, name in zip(supports, self.shapes, self._names(), strict=True):
            try:
                shapes.append(shape_of(support, shape))
            except ValueError as error:
                raise ValueError(f"`{call}(support=...)` cannot hold for {name}: {error}") from None
        return tuple(shapes)


def _floating(leaf: Array) -> Array:
    return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(float)


def _key(entry: Any) -> Any:
    """What a user would write for one step of a path: a name, a key or a position."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def _walk(support: Any, paths: dict[int, tuple], where: str, call: str) -> dict[int, Any]:
    """The supports of those leaves of `paths`, relative to `where`, that `support` names."""
    if support is None:
        return {}
    if isinstance(support, AbstractSupport):
        return dict.fromkeys(paths, support)
    place = f" at {where}" if where else ""
    if hasattr(support, "_asdict"):
        support = support._asdict()
    if isinstance(support, Sequence) and not isinstance(support, str):
        support = {i: part for i, part in enumerate(support) if part is not None}
    if not isinstance(support, Mapping):
        raise ValueError(
            f"`{call}` needs supports such as `positive` or `interval(0, 1)`, in the containers of "
            f"the parameters, but got {support!r}{place}."
        )
    if () in paths.values():
        raise ValueError(
            f"`{call}` has containers{place} where the parameters have one array, but got "
            f"{support!r}. Give one support for the array."
        )
    names = list(dict.fromkeys(path[0] for path in paths.values()))
    found = {}
    for name, part in support.items():
        below = {i: path[1:] for i, path in paths.items() if path[0] == name}
        if not below:
            raise ValueError(
                f"`{call}` names {name!r}{place}, which is not a parameter; there "
                f"{'are' if len(names) > 1 else 'is'} {', '.join(map(repr, names))}."
            )
        found |= _walk(part, below, f"{where}[{name!r}]", call)
    return found
