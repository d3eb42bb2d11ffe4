"""The optimisers of `iblr.optax` against listings in NumPy, known posteriors, and optax's tools."""

import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, counter_bits, no_type_hook, slow
from scipy.special import ndtri

import iblr.optax as ib
from iblr.optax import noise

PARAMS = {"b": jnp.array(0.5), "w": jnp.array([[1.0, -2.0, 0.3], [0.0, 4.0, -1.0]])}
CENTRE = jax.tree.map(lambda p: 1 - p, PARAMS)


def quadratic(params, centre=CENTRE, curvature=2.0):
    """A quadratic with a small term that couples the leaves."""
    square = jax.tree.map(lambda p, c: 0.5 * curvature * ((p - c) ** 2).sum(), params, centre)
    return sum(jax.tree.leaves(square)) + 0.1 * params["b"] * jnp.cos(params["w"]).sum()


def sines(params):
    return jax.tree.map(jnp.sin, params)


def stepper(optimiser, slope=sines):
    """One step as a user takes it, compiled; `slope` gives the gradients at the sample."""

    @jax.jit
    def step(key, params, state, **extra_args):
        sample, state = ib.sample_params(key, params, state)
        updates, state = optimiser.update(slope(sample), state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def train(optimiser, params, keys, loss=quadratic, state=None):
    """Steps in one scan; returns parameters and state."""
    step = stepper(optimiser, jax.grad(loss))
    state = optimiser.init(params) if state is None else state
    run = jax.jit(lambda *start: jax.lax.scan(lambda c, key: (step(key, *c), None), start, keys)[0])
    return run(params, state)


def keys(seed, number):
    words = np.random.default_rng(seed).integers(2**32, size=(number, 2), dtype=np.uint32)
    return jax.random.wrap_key_data(words)


def each(keys):
    """The keys one by one, with nothing compiled for it."""
    return [jax.random.wrap_key_data(words) for words in np.asarray(jax.random.key_data(keys))]


def drawn_noise(params):
    """A function of a key: the noise of a call of `sample_params` on a state of its own."""

    @jax.jit
    def draw(key):
        (seed,) = noise.seeds(key, 0, 1)
        leaves = jax.tree.leaves(params)
        return [noise.leaf_noise(seed, i, x.shape) for i, x in enumerate(leaves)]

    return draw


def flat(tree):
    """The entries of a tree in NumPy's float64."""
    return np.concatenate([np.ravel(np.asarray(x, float)) for x in jax.tree.leaves(tree)])


@jax.jit
def slope(vector):
    """The gradient of `quadratic` at parameters laid out as `flat` does."""
    return jax.grad(quadratic)({"b": vector[0], "w": vector[1:].reshape(2, 3)})


def listing(rule, steps, *, lr, ess, delta, b1, b2, hess_init, clip=np.inf, mu0=0.0):
    """A rule written naively in float64, over the entries of a vector; returns every (mu, s)."""
    mu = flat(PARAMS)
    m, s = np.zeros_like(mu), np.full_like(mu, hess_init + delta)
    mus, ss, draw = [mu], [s], drawn_noise(PARAMS)
    for k, key in enumerate(each(keys(0, steps)), start=1):
        z = mu + flat(draw(key)) / np.sqrt(ess * s)
        g = flat(slope(z.astype(np.float32)))
        mu, m, s = rule(mu, m, s, g, z, k, lr, ess, delta, b1, b2, hess_init, clip, mu0)
        mus.append(mu)
        ss.append(s)
    return np.array(mus), np.array(ss)


def figure_1(mu, m, s, g, z, k, lr, ess, delta, b1, b2, hess_init, clip, mu0):
    """Lines 4 to 8 of the right-hand box, as printed."""
    m = b1 * m + (1 - b1) * (delta * (mu - mu0) + g)
    g_s = delta - s + ess * s * (z - mu) * g
    mu = mu - lr * np.clip(m / (1 - b1**k) / (s / (1 - b2**k)), -clip, clip)
    return mu, m, s + (1 - b2) * g_s + 0.5 * (1 - b2) ** 2 * g_s / s * g_s


def ivon_listing(mu, m, s, g, z, k, lr, ess, delta, b1, b2, hess_init, clip, mu0):
    """With h = s - delta as the variable and the new h in the step of the mean."""
    h, hhat = s - delta, g * (z - mu) * ess * s
    m = b1 * m + (1 - b1) * g
    h = b2 * h + (1 - b2) * hhat + 0.5 * (1 - b2) ** 2 * (h - hhat) ** 2 / (h + delta)
    step = (m / (1 - b1**k) + delta * (mu - mu0)) / (h + delta)
    return mu - lr * (hess_init + delta) * np.clip(step, -clip, clip), m, h + delta


def vogn_listing(mu, m, s, g, z, k, lr, ess, delta, b1, b2, hess_init, clip, mu0):
    """The left-hand box, for a minibatch of two examples with gradients g - 1 and g + 1."""
    m = b1 * m + (1 - b1) * (delta * (mu - mu0) + g)
    s = s + (1 - b2) * (delta - s + ((g - 1) ** 2 + (g + 1) ** 2) / 2)
    return mu - lr * m / (1 - b1**k) / (s / (1 - b2**k)), m, s


def vadam_listing(mu, m, s, g, z, k, lr, ess, delta, b1, b2, hess_init, clip, mu0):
    m = b1 * m + (1 - b1) * (delta * (mu - mu0) + g)
    v = b2 * (s - delta) + (1 - b2) * g * g
    return mu - lr * m / (1 - b1**k) / (np.sqrt(v / (1 - b2**k)) + delta), m, v + delta


SETTINGS = {"ess": 50.0, "b1": 0.8, "b2": 0.97, "hess_init": 0.7}


def test_noise_is_the_quantiles_of_the_bits_of_the_generator():
    first, second, leaf = 4_000_000_000, 7, 5
    key, offset, m, n = (counter_bits(4 * leaf + j, 1, first, second, 0) for j in range(4))
    drawn = np.array([counter_bits(index, key | 1, offset, m, n) for index in range(24 * 25)])
    p = ((drawn & 0x7FFFFFFF) + 0.5) / 2**32
    expected = np.where(drawn >> 31, ndtri(p), -ndtri(p)).reshape(4, 6, 25)
    seed = jnp.array([first, second], jnp.uint32)
    np.testing.assert_allclose(noise.leaf_noise(seed, leaf, (4, 6, 25)), expected, atol=4e-6)
    assert noise.leaf_noise(seed, 0, ()).shape == () and noise.leaf_noise(seed, 0, (0, 3)).size == 0


def test_a_leaf_of_too_many_entries_is_refused():
    seed = jnp.zeros(2, jnp.uint32)
    shape = jax.eval_shape(lambda: noise.leaf_noise(seed, 0, (2**20, 2**12))).shape
    assert shape == (2**20, 2**12)
    with pytest.raises(ValueError, match=r"up to 2\^32 entries, .*\(1048577, 4096\)"):
        jax.eval_shape(lambda: noise.leaf_noise(seed, 0, (2**20 + 1, 2**12)))


def test_noise_is_normal_and_differs_between_states_samples_and_leaves():
    @jax.jit
    def draw(key):
        rows = [row for state in range(2) for row in noise.seeds(key, state, 2)]
        return jnp.stack([noise.leaf_noise(row, i, (4000,)) for row in rows for i in range(2)])

    eps = np.asarray(draw(jax.random.key(0)), float)
    correlations = eps @ eps.T / 4000
    assert eps.shape == (8, 4000) and np.abs(eps.mean(1)).max() < 4.5 / np.sqrt(4000)
    np.testing.assert_allclose(correlations, np.eye(8), atol=0.1)
    assert np.abs((eps**4).mean() - 3) < 0.3


@pytest.mark.parametrize(
    ("variant", "rule", "more"),
    [
        ("icml2020", figure_1, {}),
        ("ivon", ivon_listing, {"clip": 0.3, "mu0": 0.4}),
    ],
)
def test_ivon_takes_the_steps_of_the_listing(variant, rule, more):
    mus, ss = listing(rule, 40, lr=0.05, delta=0.02, **SETTINGS, **more)
    named = {"clip": "clip_radius", "mu0": "prior_mean"}
    options = {named[name]: value for name, value in more.items()}
    optimiser = ib.ivon(0.05, weight_decay=0.02, variant=variant, **SETTINGS, **options)
    params, state = train(optimiser, PARAMS, keys(0, 40))
    np.testing.assert_allclose(flat(params), mus[-1], rtol=0, atol=2e-5)
    np.testing.assert_allclose(flat(state.precision), ss[-1], rtol=2e-5)
    assert np.abs(mus[-1] - mus[0]).max() > 0.2 and int(state.count) == 40


def test_the_figure_is_the_natural_momentum_form_of_appendix_e3():
    # mu_{k+1} from mu_k and mu_{k-1} alone, with no momentum stored; `ivon` takes the same steps
    # as this listing by the test above.
    lr, b1, b2 = 0.05, SETTINGS["b1"], SETTINGS["b2"]
    mus, ss = listing(figure_1, 12, lr=lr, delta=0.02, **SETTINGS)
    mu, before, draw = mus[0], mus[0], drawn_noise(PARAMS)
    for k, key in enumerate(each(keys(0, 12)), start=1):
        s = ss[k - 1]
        z = mu + flat(draw(key)) / np.sqrt(SETTINGS["ess"] * s)
        g = flat(slope(z.astype(np.float32))) + 0.02 * mu
        t1 = lr * (1 - b1) * (1 - b2**k) / (1 - b1**k)
        after = mu - t1 / s * g
        if k > 1:
            t2 = b1 * (1 - b2**k) / (1 - b1**k) * (1 - b1 ** (k - 1)) / (1 - b2 ** (k - 1))
            after = after + t2 * ss[k - 2] / s * (mu - before)
        mu, before = after, mu
        np.testing.assert_allclose(mu, mus[k], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("make", "rule"), [(ib.vogn, vogn_listing), (ib.vadam, vadam_listing)])
def test_vogn_and_vadam_take_the_steps_of_their_listings(make, rule):
    mus, ss = listing(rule, 20, lr=0.05, delta=0.02, **SETTINGS)
    optimiser = make(0.05, weight_decay=0.02, **SETTINGS)
    params, state = PARAMS, optimiser.init(PARAMS)

    @jax.jit
    def step(params, state, key):
        sample, state = ib.sample_params(key, params, state)
        gradients = jax.grad(quadratic)(sample)
        squares = jax.tree.map(lambda g: g * g + 1, gradients)
        updates, state = optimiser.update(gradients, state, params, squares=squares)
        return optax.apply_updates(params, updates), state

    for key in each(keys(0, 20)):
        params, state = step(params, state, key)
    np.testing.assert_allclose(flat(params), mus[-1], rtol=0, atol=2e-5)
    np.testing.assert_allclose(flat(state.precision), ss[-1], rtol=2e-5)


@pytest.mark.parametrize("variant", ["ivon", slow("icml2020")])
def test_on_quadratics_the_exact_posterior_is_found_and_serves_as_the_next_prior(variant):
    # Entries of one leaf are independent runs, of which the mean is compared. The noise of the
    # curvature biases it by about 3 (1 - b2) here.
    @jax.jit
    def fitted(centre, curvature, ess, prior_mean, prior_precision):
        def loss(w):
            return 0.5 * curvature * ((w - centre) ** 2).sum()

        schedule = optax.linear_schedule(0.1, 0.001, 4000)
        prior = {"prior_mean": prior_mean, "prior_precision": prior_precision}
        optimiser = ib.ivon(schedule, ess, b2=0.998, variant=variant, **prior)
        return ib.posterior(*train(optimiser, jnp.zeros(400), keys(1, 4000), loss))

    def agrees(q, mean, precision):
        assert abs(float(q.mean.mean()) - mean) < 0.01
        assert abs(float(q.precision.mean()) / precision - 1) < 0.02
        assert float(q.precision.std()) < 0.2 * precision

    first = fitted(2.0, 3.0, 100.0, jnp.zeros(400), jnp.full(400, 20.0, jnp.float32))
    agrees(first, 300 * 2 / 320, 320)
    both = fitted(1.5, 0.5, 400.0, first.mean, first.precision)
    agrees(both, (320 * 1.875 + 200 * 1.5) / 520, 520)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("ivon", jnp.float32),
        ("ivon", jnp.bfloat16),
        ("icml2020", jnp.float32),
        slow("icml2020", jnp.bfloat16),
    ],
)
def test_the_precision_never_falls_below_half_and_stays_finite(variant, dtype, monkeypatch):
    # 10 000 cases, each with settings, 20 gradients and noise of its own; keys carry the noise.
    monkeypatch.setattr(noise, "seeds", lambda key, *_: jax.random.key_data(key)[None])
    as_float = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
    monkeypatch.setattr(noise, "leaf_noise", lambda seed, *_: as_float(seed[0]))
    rng = np.random.default_rng(3)
    cases, steps = 10_000, 20
    b2 = 1 - 10 ** rng.uniform(-7, 0, cases)
    ess, hess_init = 10 ** rng.uniform(0, 12, cases), 10 ** rng.uniform(-6, 3, cases)
    delta = 10 ** rng.uniform(-10, 0, cases)
    g = 10 ** rng.uniform(-8, 6, (cases, steps)) * rng.choice([-1, 1], (cases, steps))
    g[: cases // 4] = np.abs(g[: cases // 4, :1])
    eps = rng.normal(size=(cases, steps, 2)).astype(np.float32)

    def case(keys, b2, ess, hess_init, delta, g):
        optimiser = ib.ivon(
            0.1, ess, b2=b2, hess_init=hess_init, weight_decay=delta, variant=variant
        )
        params = jnp.ones((), dtype)

        def step(carry, inputs):
            params, state = carry
            sample, state = ib.sample_params(inputs[0], params, state)
            updates, after = optimiser.update(inputs[1], state, params)
            params = optax.apply_updates(params, updates)
            return (params, after), (state.precision, after.precision, params)

        (_, state), history = jax.lax.scan(step, (params, optimiser.init(params)), (keys, g))
        return history, state

    arrays = [jnp.asarray(x, jnp.float32) for x in (b2, ess, hess_init, delta)]
    (before, after, params), state = jax.jit(jax.vmap(case))(
        jax.random.wrap_key_data(eps.view(np.uint32)), *arrays, jnp.asarray(g, dtype)
    )
    before, after = np.asarray(before, float), np.asarray(after, float)
    assert params.dtype == dtype and np.isfinite(np.asarray(params, float)).all()
    assert np.isfinite(after).all() and (after > 0).all()
    assert (after >= 0.5 * before * (1 - 1e-6)).all()
    assert int(state.refused.sum()) == 0 and int(state.count.min()) == steps
    assert (after < 0.51 * before).any(), "no case comes near the bound"


def test_gradients_that_overflow_give_the_largest_precision():
    optimiser, params = ib.ivon(0.1, 1e12, b2=0.0), jnp.zeros(3)
    step = stepper(optimiser, lambda sample: jnp.full_like(sample, 1e30))
    params, state = step(jax.random.key(0), params, optimiser.init(params))
    assert (state.precision == jnp.finfo(jnp.float32).max).all() and int(state.refused) == 0
    assert jnp.isfinite(ib.posterior(params, state).precision).all()


@pytest.mark.slow
def test_runs_of_several_seeds_by_vmap_are_the_single_runs():
    optimiser, start = ib.ivon(0.05, 50.0, b2=0.9), jnp.array([0.5, -1.0])
    words = np.random.default_rng(0).integers(2**32, size=(3, 5, 2), dtype=np.uint32)

    def run(words):
        return train(optimiser, start, jax.random.wrap_key_data(words), lambda w: jnp.cos(w).sum())

    params, state = jax.vmap(run)(words)
    alone, state_alone = run(words[1])
    np.testing.assert_allclose(params[1], alone, rtol=1e-6)
    np.testing.assert_allclose(state.precision[1], state_alone.precision, rtol=1e-6)
    assert np.ptp(params[:, 0]) > 1e-3


def data_loss(params, batch):
    x, y = batch
    return 0.5 * ((x @ params["w"] + params["b"] - y) ** 2).mean()


LINE = {"b": jnp.array(0.5), "w": jnp.array([1.0, -2.0])}


DATA = (
    jnp.asarray(np.random.default_rng(0).normal(size=(12, 2)), jnp.float32),
    jnp.asarray(np.random.default_rng(1).normal(size=12), jnp.float32),
)


def test_accumulation_by_multisteps_is_one_big_batch():
    inner = ib.ivon(0.1, 20.0, b2=0.9)
    many = optax.MultiSteps(inner, 3)

    def taken(optimiser):
        @jax.jit
        def step(key, params, state, batch):
            sample, state = ib.sample_params(key, params, state)
            updates, state = optimiser.update(jax.grad(data_loss)(sample, batch), state, params)
            return optax.apply_updates(params, updates), state

        return step

    small, whole = taken(many), taken(inner)
    params, state = LINE, many.init(LINE)
    big, big_state = LINE, inner.init(LINE)
    for step, key in enumerate(each(keys(0, 2))):
        for i in range(3):
            batch = tuple(x[4 * i : 4 * i + 4] for x in DATA)
            # A key of its own for every minibatch: only the first of a step counts.
            params, state = small(key if i == 0 else jax.random.key(99), params, state, batch)
        big, big_state = whole(key, big, big_state, DATA)
        assert int(state.inner_opt_state.count) == step + 1
    for x, y in zip(
        jax.tree.leaves((params, state.inner_opt_state.precision)),
        jax.tree.leaves((big, big_state.precision)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=2e-6)


def test_scheduled_hyperparameters():
    schedule = optax.linear_schedule(0.1, 0.02, 10)
    plain = ib.ivon(schedule, 50.0, b2=0.9)
    injected = optax.inject_hyperparams(ib.ivon)(learning_rate=schedule, ess=50.0, b2=0.9)
    start = jnp.array([0.5, -1.0])
    params, state = start, plain.init(start)
    same, injected_state = start, jax.jit(injected.init)(start)
    step, injected_step = stepper(plain), stepper(injected)
    for key in each(keys(0, 10)):
        params, state = step(key, params, state)
        same, injected_state = injected_step(key, same, injected_state)
    np.testing.assert_allclose(params, same, rtol=1e-5)
    # The sample of a step has the ess noted by the step before, and is used with that one.
    injected_state.hyperparams["ess"] = jnp.float32(200.0)
    assert float(injected_state.inner_state.ess) == 50.0
    s, eps = flat(injected_state.inner_state.precision), flat(drawn_noise(start)(jax.random.key(0)))
    g = np.sin(flat(same) + eps / np.sqrt(50 * s))
    x = 0.1 * (np.sqrt(50 * s) * eps * g + 1e-4 - s) / s
    _, injected_state = injected_step(jax.random.key(0), same, injected_state)
    assert float(injected_state.inner_state.ess) == 200.0
    expected = s * (1 + (1 + x) ** 2) / 2
    np.testing.assert_allclose(injected_state.inner_state.precision, expected, rtol=1e-5)
    assert int(injected_state.inner_state.count) == 11


@pytest.mark.slow
def test_masked_leaves_stay_and_partitions_have_noise_of_their_own():
    mask, sampled = {"b": False, "w": True}, jax.jit(ib.sample_params)
    plain, masked = ib.ivon(0.1, 10.0, b2=0.9), optax.masked(ib.ivon(0.1, 10.0, b2=0.9), mask)
    state = masked.init(PARAMS)
    assert len(jax.tree.leaves(state.inner_state.precision)) == 1
    sample, state = sampled(jax.random.key(0), PARAMS, state)
    assert float(sample["b"]) == 0.5 and np.all(flat(sample["w"]) != flat(PARAMS["w"]))
    updates, _ = jax.jit(masked.update)(PARAMS, state, PARAMS)
    only, alone = sampled(jax.random.key(0), PARAMS["w"], plain.init(PARAMS["w"]))
    np.testing.assert_array_equal(sample["w"], only)
    expected, _ = jax.jit(plain.update)(PARAMS["w"], alone, PARAMS["w"])
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)
    q = ib.posterior(PARAMS, state)
    assert np.isinf(q.precision["b"]) and np.isfinite(q.precision["w"]).all()
    assert float(q.sample(jax.random.key(1))["b"]) == 0.5

    pair = {"u": jnp.zeros(5), "v": jnp.zeros(5), "x": jnp.zeros(5)}
    split = optax.partition(
        {1: ib.ivon(0.1, 10.0), 2: ib.vadam(0.1, 10.0), 3: optax.adam(0.1)},
        {"u": 1, "v": 2, "x": 3},
    )
    sample, state = sampled(jax.random.key(0), pair, split.init(pair))
    assert np.all(flat(sample["u"]) != flat(sample["v"])) and not flat(sample["x"]).any()
    updates, state = jax.jit(split.update)(jax.tree.map(jnp.ones_like, pair), state, pair)
    assert flat(updates).all()


@pytest.mark.slow
def test_priors_and_squares_are_cut_to_the_leaves_that_a_mask_leaves():
    tree = jax.tree.map(jnp.ones_like, PARAMS)
    inner = ib.vogn(0.1, 10.0, prior_mean=tree, prior_precision=tree)
    masked = optax.masked(inner, {"b": False, "w": True})
    step = stepper(masked)
    _, state = step(jax.random.key(0), PARAMS, masked.init(PARAMS), squares=tree)
    assert int(state.inner_state.count) == 1
    np.testing.assert_allclose(state.inner_state.precision["w"], 1.1, rtol=1e-6)


def test_a_chain_clips_the_gradients_before_they_are_used():
    chained = optax.chain(optax.clip_by_global_norm(0.5), ib.ivon(0.1, 10.0, b2=0.9))
    plain = ib.ivon(0.1, 10.0, b2=0.9)
    ones = jax.tree.map(jnp.ones_like, PARAMS)  # of norm sqrt(7)
    clipped = jax.tree.map(lambda x: x * float(0.5 / np.sqrt(7)), ones)
    after, _ = stepper(chained, lambda _: ones)(jax.random.key(0), PARAMS, chained.init(PARAMS))
    expected, _ = stepper(plain, lambda _: clipped)(jax.random.key(0), PARAMS, plain.init(PARAMS))
    np.testing.assert_allclose(flat(after), flat(expected), rtol=1e-6)


def test_a_state_can_be_mapped_over_like_those_of_optax():
    optimiser = ib.ivon(0.1, 10.0, prior_precision=jax.tree.map(jnp.ones_like, PARAMS))
    specs = {"b": "spec of b", "w": "spec of w"}
    mapped = optax.tree_map_params(
        optimiser, lambda _, s: s, optimiser.init(PARAMS), specs, transform_non_params=lambda _: 0
    )
    assert mapped.momentum == mapped.precision == specs and mapped.ess == 0


@pytest.mark.slow
def test_a_run_goes_on_from_a_saved_state_bit_for_bit(tmp_path):
    optimiser = optax.chain(optax.clip(1.0), ib.ivon(optax.linear_schedule(0.1, 0.0, 60), 50.0))
    step, keys_of_steps = stepper(optimiser), each(keys(0, 60))

    def run(at, keys):
        for key in keys:
            at = step(key, *at)
        return at

    half = run((PARAMS, optimiser.init(PARAMS)), keys_of_steps[:30])
    leaves, structure = jax.tree.flatten(half)
    np.savez(tmp_path / "half.npz", *leaves)
    with np.load(tmp_path / "half.npz") as saved:
        resumed = jax.tree.unflatten(structure, [jnp.asarray(x) for x in saved.values()])
    whole = run(half, keys_of_steps[30:])
    assert_same_bits(run(resumed, keys_of_steps[30:]), whole)
    assert int(whole[1][1].count) == 60


RESUMED = """
import os, pickle, sys
import jax, jax.numpy as jnp, optax
import iblr.optax as ib
path, die = sys.argv[1], int(sys.argv[2])
optimiser = ib.ivon(0.05, 50.0, b2=0.99)

@jax.jit
def step(key, params, state):
    sample, state = ib.sample_params(key, params, state)
    gradients = jax.grad(lambda w: jnp.cos(w).sum() + (w**4).sum())(sample)
    updates, state = optimiser.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

at = (0, jnp.linspace(-1.0, 1.0, 100))
at = (*at, optimiser.init(at[1]))
if os.path.exists(path):
    at = pickle.load(open(path, "rb"))
for i in range(at[0], 200):
    at = (i + 1, *step(jax.random.fold_in(jax.random.key(0), i), *at[1:]))
    if i + 1 == 100:
        pickle.dump(at, open(path, "wb"))
    if i + 1 == die:
        os._exit(9)
print([x.tobytes().hex() for x in map(jax.device_get, jax.tree.leaves(at[1:]))])
"""


@pytest.mark.slow
def test_a_killed_process_resumes_bit_for_bit(tmp_path):
    def run(name, die):
        command = [sys.executable, "-c", RESUMED, str(tmp_path / name), str(die)]
        return subprocess.run(command, capture_output=True, text=True, check=die == 0)

    assert run("killed", 130).returncode == 9
    assert run("killed", 0).stdout == run("whole", 0).stdout != ""


SHARDED = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
import iblr.optax as ib
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert jax.device_count() == 2
optimiser = ib.ivon(0.1, 20.0, b2=0.9)

@jax.jit
def step(key, params, state):
    sample, state = ib.sample_params(key, params, state)
    updates, state = optimiser.update(jnp.sin(sample), state, params)
    return sample, optax.apply_updates(params, updates), state

params = jnp.linspace(-1.0, 1.0, 24).reshape(4, 6)
split = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
outcome = []
for here in (params, jax.device_put(params, split)):
    state = optimiser.init(here)
    for i in range(3):
        sample, here, state = step(jax.random.key(i), here, state)
    is_split = [leaf.sharding.is_equivalent_to(split, leaf.ndim)
                for leaf in jax.tree.leaves((here, state.precision, state.momentum))]
    arrays = jax.tree.leaves((sample, here, state.precision))
    outcome.append((is_split, [np.asarray(x).ravel().tolist() for x in arrays]))
print(json.dumps(outcome))
"""


def test_sharded_parameters_get_the_same_numbers():
    flags = "--xla_force_host_platform_device_count=2"
    run = subprocess.run(
        [sys.executable, "-c", SHARDED],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    (_, whole), (is_split, shards) = json.loads(run.stdout)
    assert all(is_split)
    for x, y in zip(whole, shards, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_several_samples_are_averaged():
    S, settings = 4, {"hess_init": 0.5, "b2": 0.9, "b1": 0.0, "weight_decay": 0.1}
    optimiser = ib.ivon(0.1, 10.0, mc_samples=S, **settings)
    params = jnp.array([1.0, -1.0])
    sampled = jax.jit(ib.sample_params)
    sample, state = sampled(jax.random.key(0), params, optimiser.init(params))
    assert sample.shape == (S, 2) and len(np.unique(sample)) == 2 * S
    g = jnp.sin(3 * sample)
    updates, state = jax.jit(optimiser.update)(g, state, params)
    s, eps = 0.6, (np.asarray(sample) - np.asarray(params)) * np.sqrt(10 * 0.6)
    x = 0.1 * ((np.sqrt(10 * s) * eps * np.asarray(g)).mean(0) - 0.5) / s
    s = s * (1 + (1 + x) ** 2) / 2
    np.testing.assert_allclose(state.precision, s, rtol=1e-5)
    direction = np.asarray(g).mean(0) + 0.1 * np.asarray(params)
    np.testing.assert_allclose(updates, -0.1 * 0.6 * direction / s, rtol=1e-5)


@pytest.mark.parametrize("make", [ib.ivon, ib.vogn, ib.vadam])
def test_a_step_that_is_not_finite_is_refused_as_a_whole(make):
    optimiser, params = make(0.1, 10.0), {"u": jnp.ones(2), "v": jnp.ones(2)}
    sampled, update = jax.jit(ib.sample_params), jax.jit(optimiser.update)
    state = optimiser.init(params)
    for count, bad in enumerate([np.nan, np.inf, -np.inf], start=1):
        _, state = sampled(jax.random.key(count), params, state)
        g = params | {"v": jnp.array([1.0, bad])}
        updates, after = update(g, state, params, squares=params)
        assert not flat(updates).any()
        expected = state._replace(refused=jnp.int32(count), pending=jnp.array(False))
        assert_same_bits(after, expected)
        state = after
    _, state = sampled(jax.random.key(9), params, state)
    updates, state = update(params, state, params, squares=params)
    assert (int(state.count), int(state.refused)) == (1, 3) and flat(updates).all()


def test_an_update_without_a_sample_is_refused():
    optimiser = ib.ivon(0.1, 10.0)
    state = optimiser.init(PARAMS)
    with pytest.raises(ValueError, match="none was drawn since the last update"):
        optimiser.update(PARAMS, state, PARAMS)
    updates, state = jax.jit(optimiser.update)(PARAMS, state, PARAMS)
    assert not flat(updates).any()
    assert (int(state.count), int(state.refused)) == (0, 1)


def test_parameters_of_few_bits_have_a_state_of_float32():
    params = {"w": jnp.ones(1000, jnp.bfloat16)}
    optimiser = ib.ivon(0.5, 10.0, b2=0.9)
    sample, state = jax.jit(ib.sample_params)(jax.random.key(0), params, optimiser.init(params))
    updates, state = jax.jit(optimiser.update)(sample, state, params)
    assert {x["w"].dtype for x in (sample, updates)} == {jnp.dtype(jnp.bfloat16)}
    assert {state.precision["w"].dtype, state.momentum["w"].dtype} == {jnp.dtype(jnp.float32)}
    expected = 1 + flat(drawn_noise(params)(jax.random.key(0))) / np.sqrt(10 * 1.0001)
    np.testing.assert_allclose(np.asarray(sample["w"], float), expected, atol=0.01)


def test_vadam_keeps_a_second_moment_far_below_the_prior():
    # s = v + delta in float32 would hold nothing of v = 1e-12.
    optimiser = ib.vadam(0.1, 10.0, b1=0.0, b2=0.9, hess_init=0.0, weight_decay=1e-4)
    params = jnp.zeros(1)
    state = optimiser.init(params)
    step = stepper(optimiser, lambda _: jnp.full(1, 1e-6))
    for i in range(3):
        params, state = step(jax.random.key(i), jnp.zeros(1), state)
    np.testing.assert_allclose(params, -0.1 * 1e-6 / (1e-6 + 1e-4), rtol=1e-5)


@pytest.mark.parametrize("chunk", [None, 5, slow(4), slow(12)])
def test_squares_are_those_of_an_explicit_loop(chunk):
    def one(params, example):
        return data_loss(params, jax.tree.map(lambda x: x[None], example))

    loss, mean, squares = jax.jit(ib.grad_and_squares(one, chunk=chunk))(LINE, DATA)
    slope = jax.jit(jax.grad(one))
    slopes = [slope(LINE, example) for example in zip(*DATA, strict=True)]
    for name in LINE:
        rows = np.array([g[name] for g in slopes], float)
        np.testing.assert_allclose(mean[name], rows.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(squares[name], (rows**2).mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(loss, data_loss(LINE, DATA), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ess": 0.0}, r"ivon\(ess=...\).*positive"),
        ({"ess": float("nan")}, r"ivon\(ess="),
        ({"learning_rate": -1.0}, r"ivon\(learning_rate="),
        ({"b1": 1.0}, r"ivon\(b1=...\).*\[0, 1\)"),
        ({"b2": -0.1}, r"ivon\(b2="),
        ({"b2": jnp.bfloat16(0.5)}, "hyperparam_dtype=jnp.float32"),
        ({"hess_init": -1.0}, r"ivon\(hess_init="),
        ({"weight_decay": -1.0}, r"ivon\(weight_decay="),
        ({"clip_radius": 0.0}, r"ivon\(clip_radius="),
        ({"mc_samples": 0}, r"ivon\(mc_samples="),
        ({"mc_samples": 1.5}, r"ivon\(mc_samples="),
        ({"variant": "adam"}, '"ivon" or "icml2020"'),
    ],
)
def test_bad_settings_are_named(options, message):
    with no_type_hook(), pytest.raises(ValueError, match=message):
        ib.ivon(**{"learning_rate": 0.1, "ess": 10.0} | options)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"w": jnp.ones(2, jnp.complex64)}, {}, "complex64"),
        ({"w": jnp.ones(2, jnp.int32)}, {}, "int32"),
        ({"w": jnp.ones(2)}, {"hess_init": 0.0, "weight_decay": 0.0}, "positive hess_init"),
        ({"w": jnp.ones(2)}, {"prior_precision": {"w": jnp.array([1.0, -1.0])}}, "finite and >= 0"),
        ({"w": jnp.ones(2)}, {"prior_precision": {"w": jnp.ones(3)}}, r"shape \(2,\) at"),
        ({"w": jnp.ones(2)}, {"prior_mean": {"v": jnp.ones(2)}}, "nothing is there"),
        ({"w": jnp.ones(2)}, {"prior_mean": jnp.nan}, r"ivon\(prior_mean=...\)` must be finite"),
    ],
)
def test_bad_parameters_and_priors_are_named(params, options, message):
    with pytest.raises(ValueError, match=message):
        ib.ivon(0.1, 10.0, **options).init(params)


def test_bad_calls_are_named():
    optimiser, params = ib.ivon(0.1, 10.0, mc_samples=2), jnp.ones(3)
    blank = optimiser.init(params)
    _, state = ib.sample_params(jax.random.key(0), params, blank)
    with pytest.raises(ValueError, match="needs the parameters"):
        optimiser.update(jnp.ones((2, 3)), state)
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*2 samples in front"):
        optimiser.update(jnp.ones(3), state, params)
    with pytest.raises(ValueError, match=r"sample_params\(params=...\).*not a sample"):
        ib.sample_params(jax.random.key(0), jnp.ones((2, 3)), blank)
    with pytest.raises(ValueError, match="no state of"):
        ib.sample_params(jax.random.key(0), params, optax.adam(0.1).init(params))
    with pytest.raises(ValueError, match="two mean-field optimisers"):
        ib.sample_params(jax.random.key(0), params, (blank, blank))
    with no_type_hook(), pytest.raises(ValueError, match="one typed key"):
        ib.sample_params(jnp.zeros(2, jnp.uint32), params, blank)
    vogn = ib.vogn(0.1, 10.0)
    _, state = ib.sample_params(jax.random.key(0), params, vogn.init(params))
    with pytest.raises(ValueError, match="grad_and_squares"):
        vogn.update(params, state, params)
    injected = optax.inject_hyperparams(ib.ivon)(learning_rate=0.1, ess=10.0, mc_samples=2)
    with pytest.raises(ValueError, match='static_args="mc_samples"'):
        jax.jit(injected.init)(params)
    with pytest.raises(ValueError, match=r"grad_and_squares\(chunk="):
        ib.grad_and_squares(data_loss, chunk=0)
    with pytest.raises(ValueError, match="first axis"):
        ib.grad_and_squares(data_loss)(PARAMS, (jnp.ones((3, 2)), jnp.ones(2)))


def test_the_package_is_not_optax_itself():
    assert ib is not optax and ib.__name__ == "iblr.optax" and optax.__name__ == "optax"
