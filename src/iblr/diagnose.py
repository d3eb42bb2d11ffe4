"""Judging a posterior: importance weights, and what they change of it."""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array, Key

from iblr.diagnosis import Diagnosis
from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.families.arguments import check_count, is_typed_key
from iblr.families.base import AbstractFamily
from iblr.importance import FEWEST_DRAWS, weigh
from iblr.posterior import Posterior
from iblr.purposes import Purpose, key_for
from iblr.tails import DIRECTIONS, mass_outside
from iblr.target import Target, as_target


def examine(
    target: Target | Callable, family: AbstractFamily, key: Key[Array, ""], draws: int = 1000
) -> Diagnosis:
    """What importance weights and the tails say about q; other modes are not looked for."""
    target = as_target(target, "diagnose")
    found = weigh(target, family, key, draws=draws)
    shift, spread, shape = found.moved.beyond_noise()
    diagnosis = Diagnosis(found, family.dim, shift, spread, shape)
    if not isinstance(family, AbstractGaussian):
        return diagnosis
    tail_key = key_for(key, Purpose.TAILS)
    outside = mass_outside(target, family, found.log_evidence, tail_key)
    return dataclasses.replace(diagnosis, outside=outside)


def evaluations(family: AbstractFamily, draws: int) -> int:
    """Evaluations of the target by `examine`."""
    return draws + (DIRECTIONS if isinstance(family, AbstractGaussian) else 0)


def diagnose(
    posterior: Posterior, target: Target | Callable, *, key: Key[Array, ""], draws: int = 1000
) -> Posterior:
    """The posterior with a `diagnosis`: `verdict`, `khat`, `log_evidence` and `corrected`.

    Modes that a fit without settings has found, or looked for, are kept.

    Args:
        posterior: one run.
        target: what it was fitted to. With minibatches, all rows are evaluated at every draw.
        key: for the draws.
        draws: evaluations of the target, and a Gaussian takes 128 more for its tails; k-hat is
            uncertain by some 0.17 with a thousand.

    Example:
        >>> import iblr, jax
        >>> target = lambda z: -0.5 * (z**2).sum()
        >>> posterior = iblr.fit(target, iblr.Gaussian.standard(2), key=jax.random.key(0),
        ...                      num_steps=200)
        >>> posterior = iblr.diagnose(posterior, target, key=jax.random.key(1))
        >>> posterior.verdict
        'Fair: other modes were not looked for, ...'
    """
    if not isinstance(posterior, Posterior):
        raise ValueError(
            "`diagnose(posterior, target)` needs the posterior of a fit, but got a "
            f"{type(posterior).__name__}."
        )
    if not is_typed_key(key) or key.ndim:
        raise ValueError(
            f"`diagnose(key=...)` needs a typed key, `jax.random.key(0)`, but got {key!r}."
        )
    check_count("diagnose", "draws", draws, least=FEWEST_DRAWS)
    if posterior.is_batch:
        raise ValueError(
            "`diagnose(posterior, ...)` needs one run, but this posterior holds a batch. Write "
            "`diagnose(posterior.best, ...)` or `diagnose(posterior[i], ...)`."
        )
    found, before = examine(target, posterior.family, key, draws), posterior.diagnosis
    if before is not None:  # what was seen from elsewhere stays seen
        looked = ("modes", "climbs", "left_out", "climb_gradients", "unlooked")
        seen = {name: getattr(before, name) for name in looked}
        found = dataclasses.replace(found, **seen)
    spent = posterior.num_gradients + evaluations(posterior.family, draws)
    return dataclasses.replace(posterior, diagnosis=found, num_gradients=spent)
