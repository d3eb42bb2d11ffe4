"""The state of the mean-field optimisers, and what is read from it: samples and the posterior.

The parameters are the mean of q, its precision is ess * s with s in the state. A training step is

    sample, state = sample_params(key, params, state)       notes a seed in the state
    gradients = jax.grad(loss)(sample, batch)
    updates, state = optimiser.update(gradients, state, params)
    params = optax.apply_updates(params, updates)

`update` makes the noise of the sample again from the seed.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt32

from iblr.optax import noise


class MeanFieldState(NamedTuple):
    """What `ivon`, `vogn` and `vadam` keep; float32 whatever the parameters are.

    Attributes:
        count: steps taken; a refused one does not count.
        momentum: m, like the parameters.
        precision: s, like the parameters; the precision of q is `ess * s`.
        second_moment: v of Vadam, like the parameters; None for the others.
        ess: N of the next sample.
        seed: of the samples last drawn, one a row.
        pending: whether a sample was drawn that no update has used.
        refused: steps refused, because a gradient was not finite or no sample was pending.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    momentum: PyTree
    precision: PyTree
    second_moment: PyTree
    ess: Float[Array, ""]
    seed: UInt32[Array, "S 2"]
    pending: Bool[Array, ""]
    refused: Int[Array, ""]


class MeanField(eqx.Module):
    """A Gaussian with independent entries over a pytree of parameters.

    Attributes:
        mean: the parameters.
        precision: of every entry, in float32; infinite for a leaf that has no distribution.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from iblr.optax import MeanField
        >>> q = MeanField({"w": jnp.ones(3)}, {"w": jnp.full(3, jnp.inf)})
        >>> q.sample(jax.random.key(0))["w"].tolist()
        [1.0, 1.0, 1.0]
    """

    mean: PyTree
    precision: PyTree

    def sample(self, key: Key[Array, ""]) -> PyTree:
        """One draw, in the dtypes of the mean."""
        (seed,) = noise.seeds(key, 0, 1)
        leaves, structure = jax.tree.flatten(self.mean)
        draws = [
            _drawn(mean, jnp.sqrt(precision), seed, i)
            for i, (mean, precision) in enumerate(
                zip(leaves, jax.tree.leaves(self.precision), strict=True)
            )
        ]
        return jax.tree.unflatten(structure, draws)


def sample_params(key: Key[Array, ""], params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Draw parameters from q, and note in the state which.

    Every state of `ivon`, `vogn` or `vadam` inside `state` is found, under `optax.chain`,
    `optax.MultiSteps`, `optax.inject_hyperparams`, `optax.masked` and `optax.partition` alike.
    Leaves that none of them covers stay as they are.

    One sample a step: until the next update the first sample's noise is used again, whatever the
    key. So with `optax.MultiSteps` all minibatches of a step see one sample, as they must for their
    mean gradient to be one of the whole batch, and keys may be fresh ones.

    Args:
        key: of the sample.
        params: the mean, as they were given to `init`.
        state: of the optimiser, or of one that contains it.

    Returns:
        The sample, in the dtypes of the parameters, and the state to give to `update`. With
        `mc_samples` the leaves covered have one axis more, of the samples, in front.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from iblr.optax import ivon, sample_params
        >>> params = jnp.zeros(10_000)
        >>> state = ivon(0.1, ess=100.0, hess_init=0.25, weight_decay=0.0).init(params)
        >>> sample, state = sample_params(jax.random.key(0), params, state)
        >>> round(float(sample.std()), 2)                             # 1/sqrt(100 * 0.25)
        0.2
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        raise ValueError(
            f"`sample_params(key, ...)` needs one typed key, but got an array of {key.dtype} of "
            f"shape {key.shape}. Make one with `jax.random.key(0)`."
        )
    nodes, structure = jax.tree.flatten(state, is_leaf=_is_mean_field)
    where, leaves = _covered("sample_params", params, nodes)
    for j, at in enumerate(where):
        node = nodes[at.node]
        fresh = noise.seeds(key, j, len(node.seed))
        seed = jnp.where(node.pending, node.seed, fresh)
        nodes[at.node] = node._replace(seed=seed, pending=jnp.ones_like(node.pending))
        for i, (place, s) in enumerate(
            zip(at.places, jax.tree.leaves(node.precision), strict=True)
        ):
            root = jnp.sqrt(node.ess) * jnp.sqrt(s)
            draws = [_drawn(leaves[place], root, row, i) for row in seed]
            leaves[place] = draws[0] if len(draws) == 1 else jnp.stack(draws)
    sample = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return sample, jax.tree.unflatten(structure, nodes)


def posterior(params: PyTree, state: PyTree) -> MeanField:
    """The Gaussian that the optimiser has found.

    Its fields are what the next task takes for a prior, as in
    `ivon(..., prior_mean=q.mean, prior_precision=q.precision)`.

    Args:
        params: the mean.
        state: of the optimiser, or of one that contains it.

    Example:
        >>> import jax.numpy as jnp
        >>> from iblr.optax import ivon, posterior
        >>> params = {"w": jnp.zeros(2)}
        >>> state = ivon(0.1, ess=100.0, hess_init=0.25, weight_decay=0.25).init(params)
        >>> posterior(params, state).precision["w"].tolist()
        [50.0, 50.0]
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_mean_field)
    where, leaves = _covered("posterior", params, nodes)
    precisions = [jnp.full(jnp.shape(leaf), jnp.inf, jnp.float32) for leaf in leaves]
    largest = float(jnp.finfo(jnp.float32).max)
    for at in where:
        node = nodes[at.node]
        for place, s in zip(at.places, jax.tree.leaves(node.precision), strict=True):
            precisions[place] = jnp.minimum(node.ess * s, largest)
    return MeanField(params, jax.tree.unflatten(jax.tree.structure(params), precisions))


def by_path(tree: PyTree) -> dict[Any, Any]:
    """The leaves of a tree under their paths, in its order; masked ones are none."""
    return dict(jax.tree_util.tree_flatten_with_path(tree)[0])


class _Coverage(NamedTuple):
    """Which node of the state it is, and the places of its leaves among those of the parameters."""

    node: int
    places: list[int]


def _covered(call: str, params: PyTree, nodes: list[Any]) -> tuple[list[_Coverage], list[Any]]:
    """The mean-field states among the nodes with the leaves they cover, and all leaves."""
    leaves = by_path(params)
    place = {path: i for i, path in enumerate(leaves)}
    found: list[_Coverage] = []
    taken: set[Any] = set()
    for index, node in enumerate(nodes):
        if not _is_mean_field(node):
            continue
        for path, s in by_path(node.precision).items():
            name = f"the leaf `{jax.tree_util.keystr(path)}`"
            if path not in leaves or jnp.shape(leaves[path]) != s.shape:
                got = f"has shape {jnp.shape(leaves[path])}" if path in leaves else "is not there"
                raise ValueError(
                    f"`{call}(params=...)` must be what `init` was given, but {name} of shape "
                    f"{s.shape} in the state {got} in them. Pass the mean, not a sample."
                )
            if path in taken:
                raise ValueError(
                    f"`{call}(state=...)` has two mean-field optimisers for {name}. Give every "
                    "leaf to one of them, as with `optax.partition`."
                )
            taken.add(path)
        found.append(_Coverage(index, [place[path] for path in by_path(node.precision)]))
    if not found:
        raise ValueError(
            f"`{call}(state=...)` has no state of `iblr.optax.ivon`, `vogn` or `vadam` in it. Pass "
            "what `optimiser.init(params)` returned."
        )
    return found, list(leaves.values())


def _is_mean_field(node: Any) -> bool:
    return isinstance(node, MeanFieldState)


def _drawn(
    mean: Array, root: Float[Array, "..."], seed: UInt32[Array, "2"], leaf_index: int
) -> Array:
    """mu + eps / root, in the dtype of mu."""
    eps = noise.leaf_noise(seed, leaf_index, jnp.shape(mean))
    return (mean.astype(jnp.float32) + eps / root).astype(mean.dtype)
