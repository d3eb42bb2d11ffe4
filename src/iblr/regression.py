"""A Gaussian fitted by regressing gradients on points, without a step size.

By Stein's lemma the optimum of the ELBO over Gaussians is where the regression of grad lbar(z) on
z under q, lbar = -log p, has the slope S = E_q[hess lbar], the precision, and is 0 at the mean.
For a quadratic target any d independent points give that regression exactly, wherever they lie. So
instead of following natural gradients with a step size, every step solves for the Gaussian that the
gradients seen so far ask for, and the only question is which of them still count.

A step draws P antithetic pairs mu +- x in orthogonal directions. In whitened coordinates, where q
is N(0, I), a pair gives D = (H - I) e exactly for a quadratic with Hessian H, and the mean of its
gradients estimates the gradient y at the mean. From a set of pairs with G = sum e e' and
C = sum D e' there are two models K of H - I, both from one eigendecomposition of G:

    least squares     min |K E - D|^2 + rho |K|^2 over symmetric K
    quasi-Newton      H on the span of the pairs, and elsewhere a multiple of I: positive definite
                      where the curvatures seen are, the block form of the BFGS update

and the gradient at the mean is averaged over batches after moving each along the model.

*Approach.* Candidates are both models over the latest 1, 2, ... batches; the newest batch, which
none of them has seen, is the judge, in nats: |y - yhat|^2/2 + |D - K E|^2/(4P). The longest window
within a tenth of the best is taken, with the newest batch, and solved for. *Finish.* Once no model
predicts the newest batch better than the current q does (three times), what is left is noise, and
the moments are averaged over all batches with weights c/(c + k), extreme pairs trimmed. A younger
average runs beside the older and takes its place if it predicts better: the older had begun too
early. The residuals of a batch under a model that has not seen it tell how much noise the average
still has: the gap.
"""

import dataclasses
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from iblr.families.gaussian import Gaussian
from iblr.linalg import matmul
from iblr.target import Target

FORGETTING = 2.0  # c
RIDGES = (1e-3, 0.03, 0.3)  # rho over the number of pairs (or d)
SLACK = 0.1
CALM = 3  # batches that no model predicts better than q, before the finish
MEASURED = 3  # batches of the finish before their noise tells the gap
SMALLEST = 0.25  # what a precision may fall to in one step
RELAPSE = 1e3
TRIM = 20.0  # over the number of pairs, what squared residuals may be in units of their mean


class Pairs(NamedTuple):
    """Batches of antithetic pairs mu +- x, the latest last.

    Attributes:
        offset: x.
        change: half the difference of the gradients of a pair.
        centre: mu.
        gradient: mean of all gradients of a batch.
    """

    offset: Float[Array, "*n P d"]
    change: Float[Array, "*n P d"]
    centre: Float[Array, "*n d"]
    gradient: Float[Array, "*n d"]


class Moments(NamedTuple):
    """Averages over batches, in the coordinates of the problem; `age` of them."""

    offset_offset: Float[Array, "d d"]
    change_offset: Float[Array, "d d"]
    centre: Float[Array, " d"]
    gradient: Float[Array, " d"]
    age: Float[Array, ""]


class Whitened(NamedTuple):
    """A batch seen from q: noise e, D of every pair, and the gradient at the mean pair by pair."""

    noise: Float[Array, "P d"]
    excess: Float[Array, "P d"]
    gradients: Float[Array, "P d"]


class Model(NamedTuple):
    """What the gradient is like around the mean: gradient + (I + excess) e at the noise e."""

    excess: Float[Array, "*k d d"]
    gradient: Float[Array, "*k d"]


class Regression(eqx.Module):
    """A fit on its way.

    Attributes:
        family: q.
        inverse: A^-T, so that x is the noise x inverse'.
        memory: the latest batches.
        count: batches there are in `memory`.
        window: how many of them the last model was made of.
        calm: batches in a row that no model predicted better than q, and those of the finish.
        finishing: whether noise is all that is left.
        older: moments of the finish.
        younger: moments begun later.
        advantage: number, mean and sum of squares of what the younger predicts better, in nats.
        effective: number of batches whose plain average is as noisy as the older moments.
        noise: of one pair, in nats: of the gradient, and of the excess.
        usual: score of q in the finish.
        last: score of q one step before.
        radius: bound on a step of the mean, in units of sqrt(d) standard deviations.
        lead: the last gradient, whitened: the direction to look into.
    """

    family: Gaussian
    inverse: Float[Array, "d d"]
    memory: Pairs
    count: Int[Array, ""]
    window: Int[Array, ""]
    calm: Int[Array, ""]
    finishing: Bool[Array, ""]
    older: Moments
    younger: Moments
    advantage: Float[Array, "3"]
    effective: Float[Array, ""]
    noise: Float[Array, "2"]
    usual: Float[Array, ""]
    last: Float[Array, ""]
    radius: Float[Array, ""]
    lead: Float[Array, " d"]

    @property
    def gap(self) -> Float[Array, ""]:
        """Nats that q is estimated to lack of the best Gaussian; infinite before the finish."""
        pairs = self.effective * self.memory.offset.shape[1]
        d = self.family.dim
        gap = 0.5 * self.noise[0] / pairs + 0.125 * (d + 1) * self.noise[1] / pairs
        return jnp.where(self.calm >= CALM + MEASURED, gap, jnp.inf)


def num_pairs(dim: int) -> int:
    """Pairs of a batch: a sixth of d, at least 4 (or d), at most 64."""
    return min(max(math.ceil(dim / 6), min(4, dim)), 64)


def begin(family: Gaussian) -> Regression:
    """Nothing seen yet."""
    d, dtype = family.dim, family.dtype
    P = num_pairs(d)
    n = max(4, math.ceil(3 * d / P))
    zero = jnp.zeros((), dtype)
    vector, matrix = jnp.zeros(d, dtype), jnp.zeros((d, d), dtype)
    none = Moments(matrix, matrix, vector, vector, zero)
    batches = jnp.zeros((n, P, d), dtype)
    whole = jnp.zeros((), jnp.int32)
    return Regression(
        family=family,
        inverse=jnp.linalg.inv(family.factor).T,
        memory=Pairs(batches, batches, jnp.zeros((n, d), dtype), jnp.zeros((n, d), dtype)),
        count=whole,
        window=whole,
        calm=whole,
        finishing=jnp.zeros((), bool),
        older=none,
        younger=none,
        advantage=jnp.zeros(3, dtype),
        effective=zero + 1,
        noise=jnp.zeros(2, dtype),
        usual=zero,
        last=zero + jnp.inf,
        radius=zero + 1,
        lead=vector,
    )


def advance(state: Regression, target: Target, key: Key[Array, ""]) -> Regression:
    """One batch of pairs, and the Gaussian they ask for."""
    batch, seen, usable = look(state, target, key)
    base = _score(Model(jnp.zeros_like(state.inverse), jnp.zeros_like(state.lead)), seen)
    before = state
    state, model, reliable = jax.lax.cond(
        state.finishing, _finish, _approach, state, batch, seen, base
    )
    moved = _moved(state, model, seen, base, reliable)
    narrow = _narrowed(before)
    return jax.tree.map(lambda a, b: jnp.where(usable >= 0.5, a, b), moved, narrow)


def look(
    state: Regression, target: Target, key: Key[Array, ""]
) -> tuple[Pairs, Whitened, Float[Array, ""]]:
    """A batch of pairs in orthogonal directions, the first along the last gradient.

    Pairs at which a gradient is not finite are left out; what share is usable comes last.
    """
    family = state.family
    P, d = state.memory.offset.shape[1:]
    noise_key, batch_key = jax.random.split(key)
    rough, other = jax.random.normal(noise_key, (2, d, P), family.dtype)
    lead = jnp.where(~state.finishing & (state.lead != 0).any(), state.lead, rough[:, 0])
    Q, R = jnp.linalg.qr(rough.at[:, 0].set(lead))
    noise = (Q * jnp.sign(jnp.diagonal(R)) * jnp.linalg.norm(other, axis=0)).T
    offset = family.colour(noise)
    log_density = target.whole(family.structure, target.batch(batch_key))
    slope = jax.vmap(jax.grad(lambda x: -log_density(x)))
    up, down = slope(family.mean + offset), slope(family.mean - offset)
    fine = jnp.isfinite(up + down).all(1, keepdims=True)
    mean, change = jnp.where(fine, 0.5 * (up + down), 0), jnp.where(fine, 0.5 * (up - down), 0)
    average = mean.sum(0) / jnp.maximum(fine.sum(), 1)
    mean = jnp.where(fine, mean, average)
    noise, offset = jnp.where(fine, noise, 0), jnp.where(fine, offset, 0)
    seen = Whitened(noise, family.whiten(change) - noise, family.whiten(mean))
    return Pairs(offset, change, family.mean, average), seen, fine.astype(noise.dtype).mean()


def _narrowed(state: Regression) -> Regression:
    """Half the standard deviations: where they are is mostly outside of the target's domain."""
    q = state.family
    log_det = q.log_det - 2 * q.dim * math.log(2)
    family = dataclasses.replace(q, factor=0.5 * q.factor, log_det=log_det)
    return dataclasses.replace(state, family=family, inverse=2 * state.inverse)


def _approach(
    state: Regression, batch: Pairs, seen: Whitened, base: Float[Array, ""]
) -> tuple[Regression, Model, Bool[Array, ""]]:
    """The longest window of batches that predicts the newest one well, solved with it."""
    n, P, d = state.memory.offset.shape
    old = _whiten(state, state.memory)
    W, count = state.window, state.count
    lengths = jnp.stack([jnp.int32(1), W // 2, W + 1, 2 * W]).clip(1, n)
    kinds = len(RIDGES) + 1

    def judge(length: Int[Array, ""]) -> Float[Array, " k"]:
        models = _models(old, jnp.arange(n) >= n - length)
        scores = jax.vmap(_score, (0, None))(models, seen)
        return jnp.where(_allowed(length, P, d) & (length <= count), scores, jnp.inf)

    scores = jax.lax.map(judge, lengths)
    best = jnp.minimum(scores.min(), base)
    near = scores <= (1 + SLACK) * best
    chosen = jnp.max(jnp.where(near, lengths[:, None], 0))
    among = jnp.where(near & (lengths[:, None] == chosen), scores, jnp.inf)
    place = jnp.argmin(among)
    score = jnp.where(chosen > 0, among.ravel()[place], base)
    kind = jnp.where(chosen > 0, place % kinds, 0)
    models = _models(_with(old, _whiten(state, batch)), jnp.arange(n) >= n - 1 - chosen)
    calm = jnp.where((score > 0.5 * base) & (chosen > 0), state.calm + 1, 0)
    count = jnp.minimum(count + 1, n)
    enough = count * P >= d
    finishing = (calm >= CALM) & enough
    wanted = jnp.maximum(chosen, math.ceil(d / P))
    memory = _with(state.memory, batch)
    started = _averaged(memory, jnp.arange(n) >= n - wanted)
    fresh = dataclasses.replace(
        state,
        memory=memory,
        count=count,
        window=chosen,
        calm=calm,
        finishing=finishing,
        older=jax.tree.map(lambda new, kept: jnp.where(finishing, new, kept), started, state.older),
        younger=jax.tree.map(jnp.zeros_like, state.younger),
        advantage=jnp.zeros_like(state.advantage),
        effective=jnp.asarray(wanted, state.effective.dtype),
        noise=jnp.zeros_like(state.noise),
        usual=base,
    )
    return fresh, jax.tree.map(lambda x: x[kind], models), (score < 0.3 * base) & (chosen > 0)


def _finish(
    state: Regression, batch: Pairs, seen: Whitened, base: Float[Array, ""]
) -> tuple[Regression, Model, Bool[Array, ""]]:
    """All moments with the new ones among them, solved."""
    P, d = seen.noise.shape
    trimmed = _trimmed(state, batch, seen)
    new = _averaged(jax.tree.map(lambda x: x[None], trimmed), jnp.ones(1, bool))
    gain = jnp.where(
        state.younger.age * P >= d, base - _score(_solved(state, state.younger), seen), jnp.nan
    )
    number, mean, squares = state.advantage
    shifted = mean + (gain - mean) / (number + 1)
    told = jnp.stack([number + 1, shifted, squares + (gain - mean) * (gain - shifted)])
    advantage = jnp.where(jnp.isfinite(gain), told, state.advantage)
    number, mean, squares = advantage
    error = jnp.sqrt(squares / jnp.maximum(number - 1, 1) / jnp.maximum(number, 1))
    younger = _blended(state.younger, new)
    swap = (number >= 4) & (mean > error)
    older = jax.tree.map(lambda y, o: jnp.where(swap, y, o), state.younger, state.older)
    effective = jnp.where(swap, jnp.maximum(0.75 * older.age, 1), state.effective)
    rate = _rate(older)
    effective = 1 / (rate**2 + (1 - rate) ** 2 / effective)
    restart = swap | (younger.age >= jnp.maximum(0.5 * older.age, d / P + 6))
    spread = jnp.sum((seen.gradients - seen.gradients.mean(0)) ** 2) / max(P - 1, 1)
    noise = jnp.stack([spread, jnp.sum(seen.excess**2) / P])
    first = swap | (state.noise == 0).all()
    usual = 0.9 * state.usual + 0.1 * jnp.minimum(base, 3 * state.usual)
    relapsed = (base > RELAPSE * usual) & (base > 1)
    older = _blended(older, new)
    fresh = dataclasses.replace(
        state,
        count=jnp.where(relapsed, 0, state.count),
        window=jnp.where(relapsed, 0, state.window),
        calm=jnp.where(relapsed, 0, state.calm + 1),
        finishing=~relapsed,
        older=older,
        younger=jax.tree.map(lambda x: jnp.where(restart, 0, x), younger),
        advantage=jnp.where(restart, 0, advantage),
        effective=effective,
        noise=jnp.where(first, noise, state.noise + rate * (noise - state.noise)),
        usual=usual,
    )
    return fresh, _solved(state, older), jnp.zeros((), bool)


def _trimmed(state: Regression, batch: Pairs, seen: Whitened) -> Pairs:
    """A batch whose extreme pairs count for less, the less so the more batches there are.

    With a bound on the squared residuals of n/20 times their mean, the average of n of them is that
    of all in the end, and no rare pair throws it off before.
    """
    residual = jnp.sum(seen.excess**2, axis=1)
    pairs = jnp.maximum(state.effective * len(residual), 4)
    bound = jnp.where(state.noise[1] > 0, state.noise[1] * pairs / TRIM, jnp.inf)
    weight = jnp.minimum(1, jnp.sqrt(bound / jnp.where(residual > 0, residual, 1)))
    root = jnp.sqrt(weight)[:, None]
    gradient = matmul(weight / weight.sum(), seen.gradients)
    return Pairs(
        root * batch.offset, root * batch.change, batch.centre, matmul(gradient, state.inverse)
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
    values, U = jnp.linalg.eigh(model.excess)
    fall = jnp.minimum(1, (1 - SMALLEST) / jnp.maximum(-values.min(), 1e-30))
    precision = 1 + jnp.where(values > 0, values, values * fall)
    scale = jax.lax.rsqrt(precision)
    turned = matmul(model.gradient, U)
    step = matmul(U, scale * turned)
    radius = jnp.where(base > 4 * state.last, jnp.maximum(1, radius / 4), radius)
    length = jnp.linalg.norm(step)
    shrink = jnp.minimum(1, radius * jnp.sqrt(d) / jnp.maximum(length, 1e-30))
    factor = family.factor + matmul(U * (scale - 1), matmul(U.T, family.factor))
    inverse = state.inverse + matmul(U * (1 / scale - 1), matmul(U.T, state.inverse))
    mean = family.mean - matmul(shrink * step, factor)
    log_det = family.log_det - jnp.log(precision).sum()
    radius = jnp.where((shrink < 1) & reliable, 2 * radius, radius)
    radius = jnp.where(shrink < 1, radius, jnp.maximum(1, radius / 2))
    return dataclasses.replace(
        state,
        family=dataclasses.replace(family, mean=mean, factor=factor, log_det=log_det),
        inverse=inverse,
        radius=radius,
        last=base,
        lead=seen.gradients.mean(0),
    )


def _score(model: Model, seen: Whitened) -> Float[Array, ""]:
    """Nats by which a model is off on a batch."""
    wrong = seen.excess - matmul(seen.noise, model.excess)
    missed = seen.gradients.mean(0) - model.gradient
    return 0.5 * jnp.sum(missed**2) + jnp.sum(wrong**2) / (4 * len(seen.noise))


def _whiten(state: Regression, batches: Pairs) -> Pairs:
    """Batches seen from q: noise, all of length sqrt(d), and as `centre` the way from it to mu."""
    noise = matmul(batches.offset, state.inverse.T)
    length = jnp.linalg.norm(noise, axis=-1, keepdims=True)
    scale = math.sqrt(noise.shape[-1]) / jnp.where(length > 0, length, 1)
    factor = state.family.factor
    return Pairs(
        scale * noise,
        scale * matmul(batches.change, factor.T),
        matmul(state.family.mean - batches.centre, state.inverse.T),
        matmul(batches.gradient, factor.T),
    )


def _with(batches: Pairs, newest: Pairs) -> Pairs:
    """The newest in, the oldest out."""
    return jax.tree.map(lambda m, b: jnp.concatenate([m[1:], b[None]]), batches, newest)


def _models(batches: Pairs, inside: Bool[Array, " n"]) -> Model:
    """The quasi-Newton model and those of least squares."""
    _, P, d = batches.offset.shape
    keep = inside.astype(batches.offset.dtype)
    noise = (batches.offset * keep[:, None, None]).reshape(-1, d)
    excess = (batches.change * keep[:, None, None]).reshape(-1, d) - noise
    gram, cross = matmul(noise.T, noise), matmul(excess.T, noise)
    pairs = jnp.maximum(keep.sum() * P, d)
    values, U = jnp.linalg.eigh(gram)
    models = [quasi_newton(values, U, cross)]
    models += [least_squares(values, U, cross, ridge * pairs) for ridge in RIDGES]
    share = keep / jnp.maximum(keep.sum(), 1)
    return _around(
        jnp.stack(models), matmul(share, batches.gradient), matmul(share, batches.centre)
    )


def _around(
    K: Float[Array, "*k d d"], gradient: Float[Array, " d"], way: Float[Array, " d"]
) -> Model:
    """A model whose gradient was seen on average a `way` off the mean."""
    return Model(K, gradient + way + matmul(K, way))


def _allowed(length: Int[Array, ""], P: int, d: int) -> Bool[Array, " k"]:
    """Models worth a look at such a window."""
    few, many = length * P <= 1.5 * d, length * P >= d
    return jnp.stack([few, *[many] * (len(RIDGES) - 1), jnp.ones((), bool)])


def least_squares(
    values: Float[Array, " d"],
    U: Float[Array, "d d"],
    cross: Float[Array, "d d"],
    ridge: Float[Array, ""] | float,
) -> Float[Array, "d d"]:
    """The symmetric K that minimises |K E - D|^2 + ridge |K|^2; G = U values U', cross = D E'."""
    turned = matmul(U.T, matmul(cross + cross.T, U))
    positive = jnp.maximum(values, 0)
    return matmul(U, matmul(turned / (positive[:, None] + positive + 2 * ridge), U.T))


def quasi_newton(
    values: Float[Array, " d"], U: Float[Array, "d d"], cross: Float[Array, "d d"]
) -> Float[Array, "d d"]:
    """H - I with H as seen on the span of the pairs; elsewhere the mean curvature seen.

    With U a basis of the span, H = gamma (I - U U') + H U (U'H U)^-1 U'H. Directions without
    positive curvature get a quarter of gamma.
    """
    d = len(values)
    tiny = 1e-10 if values.dtype == jnp.float64 else 1e-5
    known = (values > tiny * values[-1]).astype(values.dtype)
    per = known / jnp.where(known > 0, values, 1)
    gram = matmul(U * values, U.T)
    HU = matmul(cross + gram, U * per)  # columns outside of the span are zero
    inner = matmul(U.T, HU) * known[:, None]
    curvature, V = jnp.linalg.eigh(0.5 * (inner + inner.T))
    inside = jnp.einsum("i,ij->j", known, V**2) > 0.5
    good = inside & (curvature > 1e-6 * jnp.max(jnp.where(inside, curvature, 0)))
    number = jnp.maximum(good.sum(), 1)
    gamma = jnp.exp(jnp.sum(jnp.where(good, jnp.log(jnp.where(good, curvature, 1)), 0)) / number)
    HQ, Q = matmul(HU, V), matmul(U * known, V)
    rest = jnp.eye(d, dtype=values.dtype) - matmul(U * known, U.T)
    bad = (inside & ~good).astype(values.dtype)
    seen = matmul(HQ * (good / jnp.where(good, curvature, 1)), HQ.T)
    H = gamma * (rest + 0.25 * matmul(Q * bad, Q.T)) + seen
    return H - jnp.eye(d, dtype=values.dtype)


def _averaged(batches: Pairs, inside: Bool[Array, " n"]) -> Moments:
    keep = inside.astype(batches.offset.dtype)
    share = keep / jnp.maximum(keep.sum(), 1)
    P = batches.offset.shape[1]
    weighted = share[:, None, None] * batches.offset / P
    return Moments(
        jnp.einsum("npi,npj->ij", weighted, batches.offset, precision="highest"),
        jnp.einsum("npi,npj->ij", batches.change, weighted, precision="highest"),
        matmul(share, batches.centre),
        matmul(share, batches.gradient),
        keep.sum(),
    )


def _rate(old: Moments) -> Float[Array, ""]:
    return FORGETTING / (FORGETTING + old.age + 1)


def _blended(old: Moments, new: Moments) -> Moments:
    """With the weight c/(c + k) for the new ones."""
    rate = jnp.where(old.age > 0, _rate(old), 1.0)
    mixed = jax.tree.map(lambda o, n: o + rate * (n - o), old, new)
    return mixed._replace(age=old.age + 1)


def _solved(state: Regression, moments: Moments) -> Model:
    """Least squares from moments."""
    factor, inverse = state.family.factor, state.inverse
    gram = matmul(inverse, matmul(moments.offset_offset, inverse.T))
    cross = matmul(factor, matmul(moments.change_offset, inverse.T)) - gram
    values, U = jnp.linalg.eigh(0.5 * (gram + gram.T))
    K = least_squares(values, U, cross, RIDGES[0])
    way = matmul(inverse, state.family.mean - moments.centre)
    return _around(K, matmul(factor, moments.gradient), way)
