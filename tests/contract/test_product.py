"""Products: what is that of the parts, what is of the whole, and what cannot be a product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import agrees, assert_same_bits, no_type_hook, quick_fit, slow, stacked
from scipy import special, stats

import iblr
from iblr import DiagonalGaussian, Exponential, Gamma, Gaussian, InverseGaussian, Product, Status

KEY = jax.random.key(0)


def make(seed=0):
    """A product of five parts, one of them on a support; 8 coordinates, 9 numbers."""
    rng = np.random.default_rng(seed)
    uniform = lambda *shape: jnp.asarray(rng.uniform(0.5, 2.0, shape), float)  # noqa: E731
    root = rng.normal(size=(2, 2))
    covariance = jnp.asarray(root @ root.T + np.eye(2), float)
    simplex = DiagonalGaussian.from_variances(uniform(2), uniform(2)).with_support(iblr.simplex)
    return Product(
        {
            "w": Gaussian.from_covariance(jnp.asarray(rng.normal(size=2), float), covariance),
            "tau": Exponential(uniform()),
            "ig": InverseGaussian(uniform(), uniform()),
            "rate": Exponential({"a": uniform(2)}),
            "p": simplex,
        }
    )


def target(z):
    """Couples all parts, and has no posterior in the family."""
    residual = z["w"][0] * z["ig"] + z["w"][1] - z["p"] @ jnp.arange(3.0)
    rates = z["rate"]["a"].sum()
    coupled = -z["tau"] * (1 + residual**2) - rates * (1 + z["tau"])
    return coupled - z["ig"] - 1 / z["ig"] - 0.5 * z["w"] @ z["w"] + jnp.log(z["p"]).sum()


# What is that of the parts.


def test_parts_are_kept_by_name_and_in_the_order_of_the_names():
    q = make()
    assert list(q.parts) == ["ig", "p", "rate", "tau", "w"]
    assert q["tau"] is q.parts["tau"] and isinstance(q["ig"], InverseGaussian)
    assert q.dim == 8 and q.structure.point_dim == 9 and q.name == "Product"
    assert q.gradient_size == sum(part.gradient_size for part in q.parts.values())
    assert q.structure.labels() == [
        *("ig", "p[0]", "p[1]", "p[2]", "rate.a[0]", "rate.a[1]", "tau", "w[0]", "w[1]")
    ]


@pytest.mark.slow
def test_a_draw_has_a_point_of_every_part():
    q = make()
    z = q.sample(KEY, 5)
    assert jax.tree.map(jnp.shape, z) == {
        "ig": (5,),
        "p": (5, 3),
        "rate": {"a": (5, 2)},
        "tau": (5,),
        "w": (5, 2),
    }
    np.testing.assert_allclose(z["p"].sum(-1), 1, rtol=1e-6)
    assert jax.tree.map(jnp.shape, q.sample(KEY))["w"] == (2,)


@pytest.mark.slow
def test_draws_are_those_of_the_parts_and_independent_of_one_another():
    q = make()
    z = q.sample(KEY, 40_000)
    exact = {
        "ig": (q["ig"].mean[0], q["ig"].standard_deviations[0]),
        "tau": (q["tau"].mean[0], q["tau"].standard_deviations[0]),
    }
    for name, (mean, deviation) in exact.items():
        assert agrees(z[name], float(mean))
        assert agrees((z[name] - mean) ** 2, float(deviation) ** 2)
    assert agrees(z["w"], q["w"].mean)
    tau, ig = ((z[name] - mean) / deviation for name, (mean, deviation) in exact.items())
    assert agrees(tau * ig, 0.0)
    assert agrees(tau[:, None] * (z["w"] - q["w"].mean), 0.0)
    # The same comparison can fail: the two numbers of w are correlated.
    assert not agrees(np.prod(np.asarray(z["w"] - q["w"].mean), -1), 0.0)


@pytest.mark.slow
def test_the_log_density_is_the_sum_over_parts():
    q = make()
    z = q.sample(KEY, 7)
    parts = sum(part.log_prob(z[name]) for name, part in q.parts.items())
    np.testing.assert_allclose(q.log_prob(z), parts, rtol=1e-5, atol=1e-5)
    one = jax.tree.map(lambda leaf: leaf[0], z)
    np.testing.assert_allclose(q.log_prob(one), parts[0], rtol=1e-5, atol=1e-5)
    rows, log_q = q.sample_with_log_prob(KEY, 7)
    np.testing.assert_allclose(q.log_prob_rows(rows), log_q, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_log_density_is_that_of_scipy(x64):
    q = make()
    z = q.sample(KEY, 6)
    mu, shape = 1 / np.sqrt(float(q["ig"].blocks[0][0])), float(q["ig"].shape)
    expected = (
        stats.expon.logpdf(z["tau"], scale=1 / q["tau"].rate)
        + stats.invgauss.logpdf(z["ig"], mu / shape, scale=shape)
        + stats.expon.logpdf(z["rate"]["a"], scale=1 / q["rate"].rate["a"]).sum(-1)
        + stats.multivariate_normal.logpdf(z["w"], q["w"].mean, q["w"].covariance)
        + q["p"].log_prob(z["p"])
    )
    np.testing.assert_allclose(q.log_prob(z), expected, rtol=1e-10)


def test_entropy_divergence_and_expected_log_density_are_sums():
    q, p = make(0), make(1)
    total = lambda f: sum(float(f(name, part)) for name, part in q.parts.items())  # noqa: E731
    np.testing.assert_allclose(q.entropy(), total(lambda _, part: part.entropy()), rtol=1e-5)
    np.testing.assert_allclose(q.kl(p), total(lambda n, part: part.kl(p[n])), rtol=1e-5)
    expected = total(lambda n, part: p[n].expected_log_prob(part))
    np.testing.assert_allclose(p.expected_log_prob(q), expected, rtol=1e-5)
    assert q.kl(p) > 0.1 and abs(float(q.kl(q))) < 1e-5


@pytest.mark.slow
def test_a_product_has_an_entropy_only_where_all_parts_have():
    silent = iblr.custom(
        blocks={"rate": 1.0},
        log_prob=lambda z, b: jnp.log(b["rate"]) - b["rate"] * z,
        log_partition=lambda b: -jnp.log(b["rate"]),
        sampler=lambda key, b: jax.random.exponential(key) / b["rate"],
        constraints={"rate": iblr.positive},
    )
    q = Product({"a": silent, "b": Exponential(1.0)})
    assert q.entropy() is None
    posterior = quick_fit(lambda z: -2 * z["a"] - 3 * z["b"], q)
    np.testing.assert_allclose(posterior.family["a"].blocks["rate"], 2, rtol=0.1)


@pytest.mark.slow
def test_moments_are_block_by_block():
    q = make()
    mean, deviation = q["w"].moments()
    z = q.moments()
    np.testing.assert_array_equal(q.mean[-2:], mean)
    np.testing.assert_array_equal(q.standard_deviations[-2:], deviation)
    np.testing.assert_allclose(q.covariance[-2:, -2:], q["w"].covariance, rtol=1e-6)
    np.testing.assert_array_equal(q.covariance[:-2, -2:], 0)
    np.testing.assert_allclose(np.asarray(q.precision) @ q.covariance, np.eye(8), atol=1e-5)
    # On the support of a part all are from draws; of the others' moments they are estimates.
    assert agrees(np.asarray(q.sample(KEY, 4000)["tau"]), float(q["tau"].mean[0]))
    np.testing.assert_allclose(z[0]["p"].sum(), 1, rtol=1e-5)
    real = Product({name: q[name] for name in ("tau", "w")})
    np.testing.assert_array_equal(real.moments()[0]["tau"], q["tau"].mean[0])
    np.testing.assert_array_equal(real.moments()[1]["w"], deviation)


@pytest.mark.slow
def test_products_may_be_nested():
    q = make()
    inner = Product({"tau": q["tau"], "w": q["w"]})
    nested = Product({"inner": inner, "ig": q["ig"]})
    flat = Product({"tau": q["tau"], "w": q["w"], "ig": q["ig"]})
    z = nested.sample(KEY, 3)
    assert jax.tree.map(jnp.shape, z) == {"ig": (3,), "inner": {"tau": (3,), "w": (3, 2)}}
    flat_z = {"ig": z["ig"], **z["inner"]}
    np.testing.assert_allclose(nested.log_prob(z), flat.log_prob(flat_z), rtol=1e-5)
    np.testing.assert_allclose(nested.entropy(), flat.entropy(), rtol=1e-6)
    assert nested["inner"]["tau"].name == "Exponential"
    where = {"inner": {"w": iblr.positive}}
    assert (nested.with_support(where).sample(KEY, 50)["inner"]["w"] > 0).all()


@pytest.mark.slow
def test_nested_products_are_fitted():
    q = make()
    inner = Product({"tau": q["tau"], "w": q["w"]})
    nested = Product({"inner": inner, "ig": q["ig"]})
    log_density = lambda z: -z["ig"] - 1 / z["ig"] + inner.log_prob(z["inner"])  # noqa: E731
    posterior = quick_fit(log_density, nested, num_steps=200, chunk_size=100)
    assert posterior.status == Status.ok
    assert posterior.family["inner"].kl(inner) < 1e-2


# Steps.


def parts_stepped(q, tangent, rule, *arguments, **options):
    return {
        name: rule(part, tangent.parts[name], *arguments, **options)[0]
        for name, part in q.parts.items()
    }


RULES = {
    "improved": (iblr.improved_step, {}),
    "trust region": (iblr.improved_step, {"trust_region": True}),
    "original": (iblr.natural_gradient_step, {}),
    "line search": (iblr.line_search_step, {}),
    "another curvature step": (iblr.improved_step, {"curvature_step_size": 0.02}),
}


@pytest.mark.parametrize("estimator", [iblr.Stl(pairs=4), slow(iblr.Rep(samples=8))])
@pytest.mark.parametrize(
    "rule, options",
    [
        slow(*row) if name in ("improved", "trust region", "original", "line search") else row
        for name, row in RULES.items()
    ],
    ids=RULES,
)
def test_a_step_is_that_of_every_part_bit_for_bit(rule, options, estimator):
    q = make()
    tangent = estimator(q, iblr.Target(target), KEY)
    new, info = rule(q, tangent, 0.01, **options)
    assert not info.refused
    assert_same_bits(new.parts, parts_stepped(q, tangent, rule, 0.01, **options))
    assert all((a != b).any() for a, b in zip(*map(jax.tree.leaves, (q, new)), strict=True))


def test_a_tangent_has_the_slopes_of_the_joint_draws():
    q = make()
    draws = q.draw(KEY, 8, antithetic=True)
    slopes = jax.random.normal(jax.random.key(1), (8, 8))
    values = jnp.zeros(8)
    tangent = q.stl(draws, slopes, values)
    columns = {"ig": [0], "p": [1, 2], "rate": [3, 4], "tau": [5], "w": [6, 7]}
    for name, part in q.parts.items():
        alone = part.stl(draws.noise[name], slopes[:, jnp.array(columns[name])], values)
        assert_same_bits(tangent.parts[name], alone)
    assert tangent.gradient.shape == (q.gradient_size,)
    again = q.with_gradient(tangent, tangent.gradient)
    np.testing.assert_allclose(again.gradient, tangent.gradient, rtol=1e-6)


def test_the_parameterisation_concerns_the_gaussian_parts_alone():
    q = make()
    tangent = iblr.Stl(pairs=4)(q, iblr.Target(target), KEY)
    choice = {"parameterisation": iblr.Parameterisation.covariance}
    new, _ = iblr.improved_step(q, tangent, 0.1, **choice)
    plain, _ = iblr.improved_step(q, tangent, 0.1)
    assert_same_bits(new["w"], iblr.improved_step(q["w"], tangent.parts["w"], 0.1, **choice)[0])
    assert_same_bits(new["tau"], plain["tau"])
    assert (new["w"].factor != plain["w"].factor).any()


@pytest.mark.slow
def test_a_line_search_cuts_all_parts_alike_where_one_would_leave():
    q = make()
    tangent = iblr.Stl(pairs=4)(q, iblr.Target(target), KEY)
    left, info = iblr.natural_gradient_step(q, tangent, 50.0)
    assert info.status == Status.left_set
    assert_same_bits(left, q)
    new, info = iblr.line_search_step(q, tangent, 50.0)
    assert not info.refused and info.shrunk < 1
    own = {
        name: iblr.line_search_step(part, tangent.parts[name], 50.0)[1].shrunk
        for name, part in q.parts.items()
    }
    assert info.shrunk == min(own.values()) < max(own.values())
    t = info.shrunk * 50.0
    assert_same_bits(new.parts, parts_stepped(q, tangent, iblr.line_search_step, t))
    assert jnp.isfinite(new.log_prob(new.sample(KEY, 10))).all()


@pytest.mark.slow
def test_a_line_search_halves_all_parts_where_a_custom_one_would_leave():
    rate = iblr.custom(
        name="rate",
        blocks={"rate": 3.0},
        log_prob=lambda z, b: jnp.log(b["rate"]) - b["rate"] * z,
        log_partition=lambda b: -jnp.log(b["rate"]),
        sampler=lambda key, b: jax.random.exponential(key) / b["rate"],
        constraints={"rate": iblr.positive},
    )
    q = Product({"a": rate, "b": Exponential(3.0)})
    tangent = iblr.Stl(pairs=4)(q, iblr.Target(lambda z: -0.1 * z["a"] - 2.9 * z["b"]), KEY)
    new, info = iblr.line_search_step(q, tangent, 4.0)
    assert info.shrunk == 0.25 and not info.refused
    assert_same_bits(new.parts, parts_stepped(q, tangent, iblr.natural_gradient_step, 1.0))


def test_a_part_that_refuses_keeps_the_whole():
    q = make()
    tangent = iblr.Stl(pairs=4)(q, iblr.Target(target), KEY)
    bad = q["w"].with_gradient(tangent.parts["w"], jnp.full(2, jnp.nan))
    broken = type(tangent)({**tangent.parts, "w": bad})
    new, info = iblr.improved_step(q, broken, 0.1)
    assert info.status == Status.nonfinite and info.limited == 0
    assert_same_bits(new, q)
    moved, info = iblr.improved_step(q, tangent, 0.1)
    assert not info.refused and (moved["w"].mean != q["w"].mean).any()


def test_a_geodesic_needs_one_of_every_part():
    q = make()
    tangent = iblr.Stl(pairs=4)(q, iblr.Target(target), KEY)
    new, info = iblr.geodesic_step(q, tangent, 0.1)
    assert not info.refused
    assert_same_bits(new.parts, parts_stepped(q, tangent, iblr.geodesic_step, 0.1))
    with pytest.raises(ValueError, match="geodesic_step.*Gamma"):
        iblr.fit(normal_gamma, mean_field_start(), key=KEY, rule=iblr.geodesic_step)


# An exact prior.


def likelihood(z):
    return -0.3 * z["tau"] * (z["w"] ** 2).sum() + jnp.log(z["tau"])


@pytest.mark.slow
def test_a_product_is_an_exact_prior_of_a_product():
    q = Product({"tau": Exponential(1.5), "w": make(0)["w"]})
    prior = Product({"tau": Gamma(1.2, 3.0), "w": make(1)["w"]})
    exact = iblr.Target(log_likelihood=likelihood, prior=prior, temperature=2.0)
    sampled = iblr.Target(log_likelihood=likelihood, prior=prior.log_prob, temperature=2.0)
    only_prior = iblr.Target(log_likelihood=lambda z: 0.0 * z["tau"], prior=prior)

    @jax.jit
    @jax.vmap
    def gradients(key):
        return [
            iblr.Rep(samples=16)(q, goal, key).gradient for goal in (exact, sampled, only_prior)
        ]

    known, noisy, prior_alone = map(np.asarray, gradients(jax.random.split(KEY, 300)))
    assert agrees(known - noisy, 0.0)
    assert (noisy.std(0) > known.std(0)).any()
    np.testing.assert_allclose(prior_alone.std(0), 0, atol=1e-5)  # no noise: it is exact
    assert np.abs(prior_alone).min() > 1e-2
    estimate = iblr.elbo(only_prior, q, KEY, draws=100)
    np.testing.assert_allclose(estimate.value, -q.kl(prior), rtol=1e-4)
    assert estimate.standard_error < 1e-4


def test_a_prior_of_other_parts_is_refused():
    q = Product({"a": Gaussian.standard(1), "b": Gamma(1.0, 1.0)})
    other = Product({"a": Gaussian.standard(1), "c": Gamma(1.0, 1.0)})
    for prior in (other, Gaussian.standard(2)):
        goal = iblr.Target(log_likelihood=lambda z: -z["b"] - (z["a"] ** 2).sum(), prior=prior)
        with pytest.raises(ValueError, match=r"Target\(prior"):
            iblr.fit(goal, q, key=KEY, num_steps=1)
    with pytest.raises(ValueError, match=r"kl\(other\).*\['a', 'b'\]"):
        q.kl(other)
    with pytest.raises(ValueError, match=r"kl\(other\).*Gaussian"):
        q.kl(Gaussian.standard(2))
    with pytest.raises(ValueError, match=r"expected_log_prob\(q\)"):
        q.expected_log_prob(other)


# Fits.

NUM, X_MEAN, X_SQUARES = 20, 1.3, 15.0
PRIOR = {"mean": 0.5, "precision": 0.2, "shape": 2.0, "rate": 1.0}


def normal_gamma(z):
    """x_i ~ N(mu, 1/tau), mu ~ N and tau ~ Ga; the data as their mean and sum of squares."""
    mu, tau = z["mu"], z["tau"]
    log_lik = 0.5 * NUM * jnp.log(tau) - 0.5 * tau * (X_SQUARES + NUM * (X_MEAN - mu) ** 2)
    log_tau = (PRIOR["shape"] - 1) * jnp.log(tau) - PRIOR["rate"] * tau
    return log_lik - 0.5 * PRIOR["precision"] * (mu - PRIOR["mean"]) ** 2 + log_tau


def coordinate_ascent():
    """The fixed point of mean-field variational Bayes: mean and precision, shape and rate."""
    shape, rate = PRIOR["shape"] + 0.5 * NUM, 1.0
    for _ in range(200):
        precision = PRIOR["precision"] + NUM * shape / rate
        mean = (PRIOR["precision"] * PRIOR["mean"] + NUM * shape / rate * X_MEAN) / precision
        square = X_SQUARES + NUM * ((X_MEAN - mean) ** 2 + 1 / precision)
        rate = PRIOR["rate"] + 0.5 * square
    return mean, precision, shape, rate


def mean_field_start():
    return Product({"mu": Gaussian.standard(like=0.0), "tau": Gamma(1.0, 1.0)})


@pytest.fixture(scope="module")
def mean_field():
    return iblr.fit(normal_gamma, mean_field_start(), key=KEY, num_steps=2000)


def test_a_fit_finds_the_fixed_point_of_coordinate_ascent(mean_field):
    mean, precision, shape, rate = coordinate_ascent()
    best = Product(
        {
            "mu": Gaussian.from_precision(jnp.asarray(mean), jnp.array([[precision]])),
            "tau": Gamma(shape, rate),
        }
    )
    assert mean_field.status == Status.ok
    assert mean_field.family["mu"].kl(best["mu"]) < 1e-3
    assert mean_field.family["tau"].kl(best["tau"]) < 1e-3
    start = mean_field_start()
    assert start.kl(best) > 1  # so that there was a way to go


def test_the_elbo_of_a_fit_is_that_of_coordinate_ascent(mean_field):
    mean, precision, shape, rate = coordinate_ascent()
    tau, log_tau = shape / rate, special.digamma(shape) - np.log(rate)
    square = X_SQUARES + NUM * ((X_MEAN - mean) ** 2 + 1 / precision)
    expected = (
        (0.5 * NUM + PRIOR["shape"] - 1) * log_tau
        - tau * (0.5 * square + PRIOR["rate"])
        - 0.5 * PRIOR["precision"] * ((mean - PRIOR["mean"]) ** 2 + 1 / precision)
        + stats.norm(scale=precision**-0.5).entropy()
        + stats.gamma(shape, scale=1 / rate).entropy()
    )
    assert abs(float(mean_field.elbo) - expected) < 4 * float(mean_field.elbo_se) + 1e-3
    assert float(mean_field.elbo_se) < 0.05


@pytest.mark.slow
def test_a_posterior_shows_its_parts(mean_field):
    mean, _, shape, rate = coordinate_ascent()
    assert abs(float(mean_field.mean["mu"]) - mean) < 0.02
    assert abs(float(mean_field.mean["tau"]) * rate / shape - 1) < 0.02
    np.testing.assert_allclose(
        mean_field.standard_deviation["tau"], np.sqrt(shape) / rate, rtol=0.03
    )
    text = str(mean_field)
    assert text.startswith("Product over 2 parameters") and "\nmu " in text and "\ntau " in text
    prediction = mean_field.predict(lambda z: z["mu"] * z["tau"], KEY, draws=4000)
    assert agrees(prediction.draws, float(mean_field.mean["mu"] * mean_field.mean["tau"]))
    low, high = prediction.interval(0.9)
    assert 0 < low < prediction.mean < high
    assert mean_field.log_prob(mean_field.sample(KEY, 3)).shape == (3,)


def test_a_product_survives_its_leaves(mean_field):
    leaves, treedef = jax.tree.flatten(mean_field.family)
    again = jax.tree.unflatten(treedef, [np.asarray(leaf) for leaf in leaves])
    again = jax.tree.map(jnp.asarray, again)
    z = again.sample(KEY, 3)
    assert_same_bits(z, mean_field.family.sample(KEY, 3))
    assert_same_bits(again.log_prob(z), mean_field.family.log_prob(z))


OPTIONS = {
    "momentum": {"momentum": 0.9},
    "trust region": {"trust_region": True},
    "line search": {"rule": iblr.line_search_step},
    "Rep": {"estimator": iblr.Rep(samples=16)},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_way_to_fit_reaches_the_fixed_point(options):
    mean, precision, shape, rate = coordinate_ascent()
    posterior = iblr.fit(
        normal_gamma,
        mean_field_start(),
        key=KEY,
        step_size=lambda k: jnp.minimum(0.1, 4 / (10.0 + k)),
        num_steps=1000,
        **options,
    )
    best = Gamma(shape, rate)
    assert posterior.status == Status.ok and posterior.refused == 0
    assert posterior.family["tau"].kl(best) < 1e-2
    assert abs(float(posterior.family["mu"].mean[0]) - mean) < 0.1 / np.sqrt(precision)


def pair(seed=0):
    q = make(seed)
    return Product({"ig": q["ig"], "p": q["p"]})


def pair_target(z):
    return -z["ig"] * (1 + z["p"][0]) - 1 / z["ig"] + 2 * jnp.log(z["p"]).sum()


def small_pair(start=None, **options):
    return quick_fit(pair_target, pair() if start is None else start, momentum=0.5, **options)


@pytest.mark.slow
def test_a_batch_of_keys_is_a_loop_over_keys():
    keys = jax.random.split(KEY, 3)
    batch = small_pair(key=keys)
    assert len(batch) == 3 and batch.elbo.shape == (3,)
    alone = small_pair(key=keys[1])
    for a, b in zip(*map(jax.tree.leaves, (batch[1].family, alone.family)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert len(set(np.asarray(batch.family["p"].mean[:, 0]).tolist())) == 3
    assert jax.tree.map(jnp.shape, batch.mean) == {"ig": (3,), "p": (3, 3)}
    starts = small_pair(stacked([pair(0), pair(1), pair(2)]), key=keys)
    np.testing.assert_allclose(starts[0].family.mean, batch[0].family.mean, rtol=1e-5)
    assert (starts[1].family.mean != batch[1].family.mean).all()


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_with_the_same_bits():
    whole, half = small_pair(), small_pair(num_steps=20)
    resumed = small_pair(state=half.state)
    assert_same_bits(resumed.state, whole.state)
    assert half.num_steps == 20 and resumed.num_steps == 40
    leaves, treedef = jax.tree.flatten(half.state)
    again = small_pair(state=jax.tree.unflatten(treedef, leaves))
    assert_same_bits(again.state, whole.state)


# What cannot be.

UNFIT = {
    "an empty dictionary": ({}, {}, r"Product\(parts\)"),
    "no dictionary": ([Gamma(1.0, 1.0)], {}, r"Product\(parts\)"),
    "a part that is no family": ({"a": 3.0}, {}, r"Product\(parts\).*'a': 3.0"),
    "a name that is none": ({1: Gamma(1.0, 1.0)}, {}, r"Product\(parts\).*1"),
    "an unknown support": (
        {"a": Gaussian.standard(1)},
        {"support": {"b": iblr.positive}},
        r"Product\(support=...\).*\['b'\].*\['a'\]",
    ),
    "a support of a Gamma": (
        {"a": Gamma(1.0, 1.0)},
        {"support": {"a": iblr.positive}},
        r"Product\(support=...\).*part 'a'.*a Gamma lives where",
    ),
    "parts of unlike batches": (
        {"a": stacked([Gamma(1.0, 1.0)] * 2), "b": Gamma(1.0, 1.0)},
        {},
        r"Product\(parts\).*'a': \(2,\), 'b': \(\)",
    ),
    "a support without names": (
        {"a": Gaussian.standard(1)},
        {"support": iblr.positive},
        r"Product\(support=...\).*dictionary",
    ),
}


@pytest.mark.parametrize("parts, options, says", UNFIT.values(), ids=UNFIT)
def test_what_is_no_product_is_refused(parts, options, says):
    with no_type_hook(), pytest.raises(ValueError, match=says):
        Product(parts, **options)


def test_parts_have_one_precision(x64):
    parts = {"a": Gaussian.standard(1, dtype=jnp.float32), "b": Gamma(1.0, 1.0)}
    with pytest.raises(ValueError, match=r"Product\(parts\).*one precision.*float32.*float64"):
        Product(parts)
    assert Product({"a": Gaussian.standard(1), "b": Gamma(1.0, 1.0)}).dtype == jnp.float64


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(ValueError, match=r"product\['nope'\].*\['ig', 'p', 'rate', 'tau', 'w'\]"):
        make()["nope"]


@pytest.mark.parametrize("estimator", [iblr.Secant(), iblr.Hess(), iblr.AtMean()])
@pytest.mark.parametrize("start", [mean_field_start, lambda: Gamma({"mu": 1.0, "tau": 1.0}, 1.0)])
def test_an_estimator_of_gaussians_says_that_it_is_one(estimator, start):
    name = type(estimator).__name__
    with no_type_hook(), pytest.raises(ValueError, match=f"`{name}`.*a {start().name}"):
        iblr.fit(normal_gamma, start(), key=KEY, estimator=estimator)
