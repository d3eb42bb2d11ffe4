"""`ivon`, `vogn` and `vadam`: one mechanism around the rules of `iblr.optax.rules`.

The mechanism keeps the state, makes the noise of the sample again, and refuses a step that is not
finite. A rule is one function of arrays.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, PyTree, UInt32

from iblr.optax import noise
from iblr.optax.rules import (
    Estimate,
    Leaf,
    Settings,
    decay,
    icml2020_step,
    ivon_step,
    vadam_step,
    vogn_step,
)
from iblr.optax.state import MeanFieldState, by_path

Rule = Callable[[Leaf, Estimate, Settings], Leaf]


def ivon(
    learning_rate: ArrayLike | Callable[..., ArrayLike],
    ess: ArrayLike,
    *,
    hess_init: ArrayLike = 1.0,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99999,
    weight_decay: ArrayLike = 1e-4,
    variant: Literal["ivon", "icml2020"] = "ivon",
    mc_samples: ArrayLike | None = None,
    clip_radius: ArrayLike = math.inf,
    prior_mean: PyTree = None,
    prior_precision: PyTree = None,
    rescale_lr: bool | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The Adam-like optimiser of [LSK20] figure 1, which learns a variance for every parameter.

    The gradients must be taken at a sample that `sample_params` has drawn. One optimiser state is
    the momentum and the precision, in float32. The parameters are the mean; keep them in float32
    and cast the sample where the network computes in fewer bits, as bfloat16 parameters lose
    updates smaller than their last bit.

    A step whose gradients are not finite is refused: parameters and state stay, and `refused` in
    the state counts it. So is an update for which no sample was drawn; outside of `jit` that
    raises. Under `optax.partition` each part looks at its own gradients.

    Numbers may be scheduled by `optax.inject_hyperparams`. There `mc_samples`, if given, must be
    among the `static_args`, bfloat16 parameters need `hyperparam_dtype=jnp.float32`, and 1 - b2,
    then taken in float32, is right to 1 part in 700 at the default.

    Args:
        learning_rate: a number, or a schedule of the number of steps taken.
        ess: effective sample size N, the number of examples for a posterior at temperature one.
        hess_init: h at the start.
        b1: decay of the momentum.
        b2: decay of the precision.
        weight_decay: delta, the precision of the prior over N.
        variant: "ivon", or "icml2020" for the listing of the paper; see `iblr.optax.rules`.
        mc_samples: samples a step, 1 by default. With more, samples and gradients have one axis
            more, in front, the gradients being those of each sample's own loss; `optax.MultiSteps`
            cannot be used then.
        clip_radius: bound on every entry of the step of the mean, before the learning rate.
        prior_mean: a number or like the parameters; 0 by default.
        prior_precision: a number or like the parameters; takes the place of `weight_decay`.
        rescale_lr: whether to multiply the learning rate by hess_init + delta, so that the first
            steps are those of gradient descent at that rate. By default for "ivon" only.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from iblr.optax import ivon, posterior, sample_params
        >>> loss = lambda w: 0.5 * 3.0 * (w - 2.0) ** 2
        >>> optimiser = ivon(0.05, ess=100.0, b2=0.9995, prior_precision=100.0)
        >>> params = jnp.array(0.0)
        >>> @jax.jit
        ... def step(carry, key):
        ...     params, state = carry
        ...     sample, state = sample_params(key, params, state)
        ...     updates, state = optimiser.update(jax.grad(loss)(sample), state, params)
        ...     return (optax.apply_updates(params, updates), state), None
        >>> keys = jax.random.split(jax.random.key(0), 20_000)
        >>> (params, state), _ = jax.lax.scan(step, (params, optimiser.init(params)), keys)
        >>> q = posterior(params, state)                  # exactly: mean 1.5, precision 400
        >>> abs(float(q.mean) - 1.5) < 0.1, abs(float(q.precision) - 400) < 120
        (True, True)
    """
    if variant not in ("ivon", "icml2020"):
        raise ValueError(
            f'`ivon(variant=...)` must be "ivon" or "icml2020", but got {variant!r}. Leave it out '
            'for "ivon".'
        )
    _check("ivon", "clip_radius", clip_radius, "positive", lambda x: x > 0)
    return _mean_field(
        "ivon",
        ivon_step if variant == "ivon" else icml2020_step,
        learning_rate,
        ess,
        hess_init=hess_init,
        b1=b1,
        b2=b2,
        weight_decay=weight_decay,
        mc_samples=mc_samples,
        clip_radius=clip_radius,
        prior_mean=prior_mean,
        prior_precision=prior_precision,
        rescale_lr=variant == "ivon" if rescale_lr is None else rescale_lr,
    )


def vogn(
    learning_rate: ArrayLike | Callable[..., ArrayLike],
    ess: ArrayLike,
    *,
    hess_init: ArrayLike = 1.0,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    weight_decay: ArrayLike = 1e-4,
    mc_samples: ArrayLike | None = None,
    prior_mean: PyTree = None,
    prior_precision: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Variational online Gauss-Newton, [LSK20] figure 1 (left), for comparison.

    Its `update` takes one argument more, `squares`: the mean over the minibatch of the squared
    gradients of the examples, from `grad_and_squares`. Arguments (but for `variant`, `clip_radius`
    and `rescale_lr`), sampling and refusal are those of `ivon`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from iblr.optax import grad_and_squares, sample_params, vogn
        >>> both = grad_and_squares(lambda w, x: 0.5 * (w - x) ** 2)
        >>> optimiser, params = vogn(0.1, ess=2.0), jnp.array(0.0)
        >>> sample, state = sample_params(jax.random.key(0), params, optimiser.init(params))
        >>> loss, gradients, squares = both(sample, jnp.array([1.0, 3.0]))
        >>> updates, state = optimiser.update(gradients, state, params, squares=squares)
        >>> int(state.count)
        1
    """
    return _mean_field(
        "vogn",
        vogn_step,
        learning_rate,
        ess,
        hess_init=hess_init,
        b1=b1,
        b2=b2,
        weight_decay=weight_decay,
        mc_samples=mc_samples,
        prior_mean=prior_mean,
        prior_precision=prior_precision,
    )


def vadam(
    learning_rate: ArrayLike | Callable[..., ArrayLike],
    ess: ArrayLike,
    *,
    hess_init: ArrayLike = 1.0,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    weight_decay: ArrayLike = 1e-4,
    mc_samples: ArrayLike | None = None,
    prior_mean: PyTree = None,
    prior_precision: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Vadam (Khan et al. 2018): Adam with noise in the weights, for comparison.

    With several samples the square is that of their mean gradient. Arguments (but for `variant`,
    `clip_radius` and `rescale_lr`), sampling and refusal are those of `ivon`; the state holds one
    array more, the second moment.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from iblr.optax import sample_params, vadam
        >>> optimiser, params = vadam(0.1, ess=1e6, hess_init=0.0), jnp.array(1.0)
        >>> sample, state = sample_params(jax.random.key(0), params, optimiser.init(params))
        >>> updates, state = optimiser.update(jnp.array(2.0), state, params)
        >>> round(float(updates), 3)                                  # Adam's first step
        -0.1
    """
    return _mean_field(
        "vadam",
        vadam_step,
        learning_rate,
        ess,
        hess_init=hess_init,
        b1=b1,
        b2=b2,
        weight_decay=weight_decay,
        mc_samples=mc_samples,
        prior_mean=prior_mean,
        prior_precision=prior_precision,
    )


def _mean_field(
    name: str,
    rule: Rule,
    learning_rate: ArrayLike | Callable[..., ArrayLike],
    ess: ArrayLike,
    *,
    hess_init: ArrayLike,
    b1: ArrayLike,
    b2: ArrayLike,
    weight_decay: ArrayLike,
    mc_samples: ArrayLike | None,
    prior_mean: PyTree,
    prior_precision: PyTree,
    clip_radius: ArrayLike = math.inf,
    rescale_lr: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The transformation that takes the steps of a rule."""
    if not callable(learning_rate):
        _check(name, "learning_rate", learning_rate, "finite and >= 0", _is_finite_from_zero)
    _check(name, "ess", ess, "finite and positive", lambda x: 0 < x < math.inf)
    _check(name, "hess_init", hess_init, "finite and >= 0", _is_finite_from_zero)
    _check(name, "b1", b1, "in [0, 1)", lambda x: 0 <= x < 1)
    _check(name, "b2", b2, "in [0, 1)", lambda x: 0 <= x < 1)
    _check(name, "weight_decay", weight_decay, "finite and >= 0", _is_finite_from_zero)
    if mc_samples is not None:
        _check(
            name, "mc_samples", mc_samples, "a whole number >= 1", lambda x: x >= 1 and x % 1 == 0
        )

    def deltas(paths: dict[Any, Any]) -> list[Float[Array, "..."]]:
        if prior_precision is None:
            return [_float32(weight_decay)] * len(paths)
        given = _like_params(name, "prior_precision", prior_precision, paths)
        return [_float32(x) / _float32(ess) for x in given]

    def centres(paths: dict[Any, Any]) -> list[Float[Array, "..."]]:
        given = 0.0 if prior_mean is None else prior_mean
        return [_float32(x) for x in _like_params(name, "prior_mean", given, paths)]

    def init(params: PyTree) -> MeanFieldState:
        paths = by_path(params)
        _check_params(name, paths)
        start = []
        for delta in deltas(paths):
            s = _float32(hess_init) + delta
            right = (delta >= 0) & (s > 0) & (s < jnp.inf)
            if not isinstance(right, Tracer) and not bool(right.all()):
                raise ValueError(
                    f"`{name}` needs a precision of the prior that is finite and >= 0, and a "
                    "positive hess_init + delta, delta being `weight_decay` or `prior_precision` "
                    f"/ ess, but delta is {float(delta.min()):.3g} to {float(delta.max()):.3g}."
                )
            start.append(s)
        for centre in centres(paths):
            if not isinstance(centre, Tracer) and not bool(jnp.isfinite(centre).all()):
                raise ValueError(
                    f"`{name}(prior_mean=...)` must be finite everywhere, but is not. Check it."
                )

        def tree(values: list[Any]) -> PyTree:
            # Arrays of their own, as a caller may donate the state.
            shaped = [
                jnp.array(jnp.broadcast_to(_float32(value), jnp.shape(leaf)))
                for value, leaf in zip(values, paths.values(), strict=True)
            ]
            return jax.tree.unflatten(jax.tree.structure(params), shaped)

        return MeanFieldState(
            count=jnp.zeros((), jnp.int32),
            momentum=tree([0.0] * len(paths)),
            precision=tree(start),
            second_moment=tree([hess_init] * len(paths)) if rule is vadam_step else None,
            ess=jnp.array(ess, jnp.float32),
            seed=jnp.zeros((_number_of_samples(name, mc_samples), 2), jnp.uint32),
            pending=jnp.zeros((), bool),
            refused=jnp.zeros((), jnp.int32),
        )

    def update(
        updates: PyTree,
        state: MeanFieldState,
        params: PyTree | None = None,
        *,
        squares: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, MeanFieldState]:
        del extra_args
        paths = by_path(state.precision)
        means, gradients, per_example = _arguments(
            name, rule, paths, updates, state, params, squares
        )
        k = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        seconds = jax.tree.leaves(state.second_moment) or [None] * len(paths)
        momenta = jax.tree.leaves(state.momentum)
        after = []
        priors = zip(deltas(paths), centres(paths), strict=True)
        for i, (s, (delta, centre)) in enumerate(zip(paths.values(), priors, strict=True)):
            settings = Settings(
                learning_rate=_float32(rate),
                b1=decay(b1),
                b2=decay(b2),
                k=_float32(k),
                ess=state.ess,
                delta=delta,
                prior_mean=centre,
                clip_radius=_float32(clip_radius),
                scale=_float32(hess_init) + delta if rescale_lr else _float32(1.0),
            )
            leaf = Leaf(_float32(means[i]), momenta[i], s, seconds[i])
            estimate = _estimate(state.seed, i, s.shape, gradients[i], per_example[i])
            after.append(rule(leaf, estimate, settings))

        # Asked of what comes in, so that no new leaf waits for the others to be found finite.
        inputs = [_float32(rate), *gradients, *jax.tree.leaves(per_example)]
        ok = jnp.stack([state.pending, *(jnp.isfinite(x).all() for x in inputs)]).all()
        structure = jax.tree.structure(state.precision)

        def tree(new: list[Array], old: list[Array]) -> PyTree:
            pairs = zip(new, old, strict=True)
            kept = [jnp.where(ok, _saturated(x, jnp.float32), y) for x, y in pairs]
            return jax.tree.unflatten(structure, kept)

        changes = [
            jnp.where(ok, _saturated(leaf.mean, mean.dtype), jnp.zeros((), mean.dtype))
            for leaf, mean in zip(after, means, strict=True)
        ]
        state = MeanFieldState(
            count=jnp.where(ok, k, state.count),
            momentum=tree([leaf.momentum for leaf in after], momenta),
            precision=tree([leaf.precision for leaf in after], list(paths.values())),
            second_moment=None
            if state.second_moment is None
            else tree([leaf.second_moment for leaf in after], seconds),  # pyright: ignore[reportArgumentType]
            ess=_float32(ess),
            seed=state.seed,
            pending=jnp.zeros_like(state.pending),
            refused=state.refused + ~ok,
        )
        return jax.tree.unflatten(jax.tree.structure(updates), changes), state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _estimate(
    seed: UInt32[Array, "S 2"],
    leaf_index: int,
    shape: tuple[int, ...],
    gradient: Array,
    squares: Array | None,
) -> Estimate:
    """The means over the samples, for one leaf."""
    S = len(seed)
    g = _float32(gradient).reshape(S, *shape)
    eps = jnp.stack([noise.leaf_noise(row, leaf_index, shape) for row in seed])
    noise_gradient = (_saturated(eps * g, jnp.float32) / S).sum(0)
    if squares is not None:
        squares = _float32(squares).reshape(S, *shape).mean(0)
    return Estimate((g / S).sum(0), noise_gradient, squares)


def _arguments(
    name: str,
    rule: Rule,
    paths: dict[Any, Any],
    updates: PyTree,
    state: MeanFieldState,
    params: PyTree | None,
    squares: PyTree | None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """The parameters, gradients and squares of the leaves, or why they cannot be."""
    call = f"`{name}(...).update`"
    if params is None:
        raise ValueError(f"{call} needs the parameters: `update(gradients, state, params)`.")
    if not isinstance(state.pending, Tracer) and not bool(state.pending):
        raise ValueError(
            f"{call} needs gradients at a sample, but none was drawn since the last update. Call "
            "`sample, state = iblr.optax.sample_params(key, params, state)` and differentiate at "
            "the sample."
        )
    samples = len(state.seed)
    in_front = () if samples == 1 else (samples,)
    means = _shaped(f"{call}(params=...)", params, paths)
    gradients = _shaped(f"{call}(updates=...)", updates, paths, in_front)
    if len(gradients) != len(jax.tree.leaves(updates)):
        raise ValueError(
            f"{call} got gradients of leaves that are not in the state. Give the gradients of the "
            "parameters that `init` was given."
        )
    if rule is not vogn_step:
        return means, gradients, [None] * len(paths)
    if squares is None:
        raise ValueError(
            f"{call} needs the mean squared gradients of the examples: `update(gradients, state, "
            "params, squares=...)`, from `iblr.optax.grad_and_squares`."
        )
    return means, gradients, _shaped(f"{call}(squares=...)", squares, paths, in_front)


def _shaped(
    what: str, tree: PyTree, paths: dict[Any, Any], in_front: tuple[int, ...] = ()
) -> list[Any]:
    """The leaves of a tree at the paths, whose shapes must be those there, with axes in front."""
    given = by_path(tree)
    for path, like in paths.items():
        expected = (*in_front, *jnp.shape(like))
        got = jnp.shape(given[path]) if path in given else None
        if got != expected:
            found = "nothing is there" if got is None else f"its shape is {got}"
            raise ValueError(
                f"{what} needs an array of shape {expected} at `{jax.tree_util.keystr(path)}`, but "
                f"{found}. Give a tree like the parameters"
                + (f", with the {in_front[0]} samples in front." if in_front else ".")
            )
    return [given[path] for path in paths]


def _like_params(name: str, argument: str, value: PyTree, paths: dict[Any, Any]) -> list[Any]:
    """A number once for every leaf, or the leaves of a tree like the parameters."""
    leaves = jax.tree.leaves(value)
    if len(leaves) == 1 and leaves[0] is value and jnp.ndim(value) == 0:
        return [value] * len(paths)
    return _shaped(f"`{name}({argument}=...)`", value, paths)


def _check_params(name: str, paths: dict[Any, Any]) -> None:
    for path, leaf in paths.items():
        dtype = jnp.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"`{name}(...).init(params)` needs real floating-point leaves, but "
                f"`{jax.tree_util.keystr(path)}` is of dtype {dtype}. Leave it out, as with "
                "`optax.masked`, or split it into real parts."
            )


def _number_of_samples(name: str, mc_samples: ArrayLike | None) -> int:
    if isinstance(mc_samples, Tracer):
        raise ValueError(
            f"`{name}(mc_samples=...)` sets shapes, so it cannot be traced. Name it: "
            f'`optax.inject_hyperparams({name}, static_args="mc_samples")`.'
        )
    return 1 if mc_samples is None else int(mc_samples)  # pyright: ignore[reportArgumentType]


def _check(
    name: str, argument: str, value: Any, needed: str, is_right: Callable[[float], bool]
) -> None:
    """Raise unless a number is right, if it is known already, and has enough bits."""
    if jnp.result_type(value) in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"`{name}({argument}=...)` came in {jnp.result_type(value)}, which cannot tell decays "
            "from 1. Give a float, or `hyperparam_dtype=jnp.float32` to `optax.inject_hyperparams`."
        )
    if isinstance(value, Tracer):
        return
    if jnp.ndim(value) != 0 or not is_right(float(value)):
        raise ValueError(f"`{name}({argument}=...)` must be a number, {needed}, but got {value}.")


def _is_finite_from_zero(x: float) -> bool:
    return 0 <= x < math.inf


def _saturated(x: Float[Array, "..."], dtype: Any) -> Array:
    """In a dtype, where what would overflow is the largest number."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def _float32(x: ArrayLike) -> Float[Array, "..."]:
    return jnp.asarray(x, jnp.float32)
