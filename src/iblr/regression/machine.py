"""A Gaussian fitted by regressing gradients on points, without a step size.

By Stein's lemma the optimum of the ELBO over Gaussians is where the regression of grad lbar(z) on
z under q, lbar = -log p, has the slope S = E_q[hess lbar], the precision, and is 0 at the mean.
For a quadratic target any d independent points give that regression exactly, wherever they lie. So
instead of following natural gradients with a step size, every step solves for the Gaussian that the
gradients seen so far ask for, and the only question is which of them still count.

A step draws P antithetic pairs mu +- x in orthogonal directions. In whitened coordinates, where q
is N(0, I), a pair gives D = (H - I) e exactly for a quadratic with Hessian H, and the mean of its
gradients estimates the gradient y at the mean. From a set of pairs `models` makes models of H, and
the gradient at the mean is averaged over batches after moving each along the model.

*Approach.* Candidates are all models over the latest 1, 2, ... batches; the newest batch, which
none of them has seen, is the judge, in nats: |y - yhat|^2/2 + |D - K E|^2/(4P). The longest window
within a tenth of the best is taken, with the newest batch, and solved for; where q itself is best,
the newest batch alone. *Finish.* Once the model chosen is no more than twice as good as the current
q at predicting the newest batch (three times in a row), what is left is noise, and
the moments are averaged over all batches with weights c/(c + k), extreme pairs trimmed. A younger
average runs beside the older and takes its place if it predicts better: the older had begun too
early. The residuals of a batch under a model that has not seen it tell how much noise the average
still has, and `drift` whether it still goes somewhere: the gap.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from iblr.linalg import matmul, symmetric_eigen
from iblr.regression import drift
from iblr.regression.approach import approach
from iblr.regression.finish import finish
from iblr.regression.models import Model, score_of_q
from iblr.regression.pairs import Look, Whitened, look
from iblr.regression.state import CALM, Regression, Trusted
from iblr.target import Target

SMALLEST = 0.25  # what a precision may fall to in one step
LARGEST_GAIN = {4: 1e6, 8: 1e12}  # what it may grow by, by the bytes of a number
LARGEST_FALL = 10.0  # nats, and four times their spread: batches so far below the best are doubts
SPREAD_RATE = 0.1  # of a batch in the usual spread: the best of many batches has a lucky one
# Batches in a row and pairs in them, before q goes back to the best; after a leap, one batch.
DOUBTS, DOUBTFUL_PAIRS = 2, 16


def advance(state: Regression, target: Target) -> tuple[Regression, Look]:
    """One batch of pairs, and the Gaussian they ask for."""
    P = state.memory.offset.shape[1]
    lead = jnp.where(state.finishing, 0, state.lead)
    found = look(state.family, target, state.key, state.step, lead, P)
    mostly_fine = found.fine.mean(dtype=state.family.dtype) >= 0.5
    usable = mostly_fine & jnp.isfinite(score_of_q(found.seen))
    state = dataclasses.replace(state, trusted=_trusted(state, found))
    after = jax.lax.cond(usable, _solve, lambda state, _: _narrowed(state), state, found)
    finite = jnp.isfinite(after.family.log_det) & jnp.isfinite(after.family.mean).all()
    patience = max(DOUBTS, math.ceil(DOUBTFUL_PAIRS / P))
    lost = state.trusted.doubts >= jnp.where(state.radius > 1, 1, patience)
    after = jax.lax.cond(finite, lambda: after, lambda: _restarted(_narrowed(state)))
    after = jax.lax.cond(lost, lambda: _reverted(state), lambda: after)
    return dataclasses.replace(after, step=state.step + 1), found


def _trusted(state: Regression, found: Look) -> Trusted:
    """q, if its ELBO on this batch is the best so far; a doubt, if it is far below that."""
    before = state.trusted
    elbo, spread = jnp.nanmean(found.elbo), jnp.nanstd(found.elbo)
    spread = jnp.where(jnp.isfinite(spread), spread, before.spread)
    usual = before.spread + SPREAD_RATE * (
        jnp.minimum(spread, 10 * before.spread + 1) - before.spread
    )
    better = elbo > before.elbo
    far_below = ~(elbo >= before.elbo - LARGEST_FALL - 4 * before.spread)
    kept = before._replace(doubts=jnp.where(far_below, before.doubts + 1, 0))
    q = Trusted(state.family, state.inverse, elbo, spread, jnp.zeros_like(before.doubts))
    trusted = jax.tree.map(lambda new, old: jnp.where(better, new, old), q, kept)
    return trusted._replace(spread=jnp.where(better & ~state.finishing, spread, usual))


def _reverted(state: Regression) -> Regression:
    """Back at the best q there was, with all to be seen anew."""
    best = state.trusted
    forgotten = best._replace(
        elbo=jnp.full_like(best.elbo, -jnp.inf), doubts=jnp.zeros_like(best.doubts)
    )
    back = dataclasses.replace(state, family=best.family, inverse=best.inverse, trusted=forgotten)
    return _restarted(back)


def _solve(state: Regression, found: Look) -> Regression:
    batch, seen, _, _ = found
    base = score_of_q(seen)
    state, model, reliable = jax.lax.cond(
        state.finishing, finish, approach, state, batch, seen, base
    )
    return _moved(state, model, seen, base, reliable)


def _narrowed(state: Regression) -> Regression:
    """Half the standard deviations: where they are is mostly outside of the target's domain.

    What the gap of that is, nobody knows before the next step.
    """
    q = state.family
    log_det = q.log_det - 2 * q.dim * math.log(2)
    family = dataclasses.replace(q, factor=0.5 * q.factor, log_det=log_det)
    return dataclasses.replace(
        state,
        family=family,
        inverse=2 * state.inverse,
        moved=jnp.full_like(state.moved, jnp.inf),
        narrowed=state.narrowed + 1,
    )


def _restarted(state: Regression) -> Regression:
    """Without what was seen, in which there may be numbers too large to compute with."""
    nothing = {name: jnp.zeros_like(getattr(state, name)) for name in ("count", "window", "calm")}
    return dataclasses.replace(
        state,
        **nothing,
        memory=jax.tree.map(jnp.zeros_like, state.memory),
        finishing=jnp.zeros_like(state.finishing),
        last=jnp.full_like(state.last, jnp.inf),
        radius=jnp.ones_like(state.radius),
        lead=jnp.zeros_like(state.lead),
    )


def _moved(
    state: Regression,
    model: Model,
    seen: Whitened,
    base: Float[Array, ""],
    reliable: Bool[Array, ""],
) -> Regression:
    """q with the precision I + K and the mean moved by Newton's step, within bounds.

    The bound on the step is widened while it binds and models are `reliable`.
    """
    family, d, radius = state.family, state.family.dim, state.radius
    values, U = symmetric_eigen(model.excess)
    fall = jnp.minimum(1, (1 - SMALLEST) / jnp.maximum(-values.min(), 1e-30))
    largest = LARGEST_GAIN[jnp.dtype(values.dtype).itemsize]
    precision = 1 + jnp.where(values > 0, jnp.minimum(values, largest), values * fall)
    scale = jax.lax.rsqrt(precision)
    turned = matmul(model.gradient, U)
    step = matmul(U, scale * turned)
    radius = jnp.where(base > 4 * state.last, jnp.maximum(1, radius / 4), radius)
    length = jnp.linalg.norm(step)
    shrink = jnp.minimum(1, radius * jnp.sqrt(d) / jnp.maximum(length, 1e-30))
    factor = family.factor + matmul(U * (scale - 1), matmul(U.T, family.factor))
    inverse = state.inverse + matmul(U * (1 / scale - 1), matmul(U.T, state.inverse))
    product = matmul(factor.T, inverse)  # I, but for rounding: one step of Newton's method
    better = 2 * inverse - matmul(inverse, product)
    near = jnp.abs(product - jnp.eye(d, dtype=product.dtype)).max() < 0.5 / d
    inverse = jnp.where(near, better, inverse)
    mean = family.mean - matmul(shrink * step, factor)
    log_det = family.log_det - jnp.log(precision).sum()
    widened = 0.25 * jnp.sum((precision - 1) ** 2 / precision)  # the mean of both divergences
    moved = widened + 0.5 * jnp.sum((shrink * step) ** 2)
    family = dataclasses.replace(family, mean=mean, factor=factor, log_det=log_det)
    age = jnp.where(state.finishing, state.calm - CALM, 0).astype(moved.dtype)
    radius = jnp.where((shrink < 1) & reliable, 2 * radius, radius)
    radius = jnp.where(shrink < 1, radius, jnp.maximum(1, radius / 2))
    return dataclasses.replace(
        state,
        family=family,
        inverse=inverse,
        radius=radius,
        moved=moved,
        drift=drift.with_q(state.drift, family, inverse, age, state.scale.curvature),
        last=base,
        lead=seen.gradients.mean(0),
        narrowed=jnp.zeros_like(state.narrowed),
    )
