"""Families that a user writes: which are accepted, what they do, and which are refused and why."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LARGEST_Z, agrees, assert_same_bits, no_type_hook, quick_fit
from jax.scipy.special import gammaln
from jax.scipy.stats import norm
from scipy import special, stats

import iblr
from iblr import Gamma, Gaussian, InverseGaussian, Product, Status, geometry
from iblr.families.custom import MOST_HALVINGS, CustomTangent

KEY = jax.random.key(0)

# Families by hand. Functions are shared between tests, so that each is compiled once.


def gamma_log_partition(b):
    return gammaln(b["shape"]) - b["shape"] * jnp.log(b["shape"] * b["inverse_mean"])


GAMMA = {
    "log_prob": lambda z, b: (
        (b["shape"] - 1) * jnp.log(z) - b["shape"] * b["inverse_mean"] * z - gamma_log_partition(b)
    ),
    "log_partition": gamma_log_partition,
    "sampler": lambda key, b: jax.random.gamma(key, b["shape"]) / (b["shape"] * b["inverse_mean"]),
    "constraints": {"shape": iblr.positive, "inverse_mean": iblr.positive},
    "name": "My Gamma",
}


def gamma(shape, inverse_mean, **options):
    return iblr.custom(blocks={"shape": shape, "inverse_mean": inverse_mean}, **GAMMA, **options)


INVERSE_GAUSSIAN = {
    "log_prob": lambda z, b: (
        -0.5 * (z * b["alpha"] * b["square"] + b["alpha"] / z + jnp.log(2 * jnp.pi * z**3))
        + 0.5 * jnp.log(b["alpha"])
        + b["alpha"] * jnp.sqrt(b["square"])
    ),
    "log_partition": lambda b: -0.5 * jnp.log(b["alpha"]) - b["alpha"] * jnp.sqrt(b["square"]),
    "sampler": lambda key, b: InverseGaussian(b["square"] ** -0.5, b["alpha"]).sample(key),
    "constraints": {"square": iblr.positive, "alpha": iblr.positive},
    "name": "My inverse Gaussian",
}


def inverse_gaussian(mean, alpha):
    return iblr.custom(blocks={"square": mean**-2.0, "alpha": alpha}, **INVERSE_GAUSSIAN)


EXPONENTIAL = {
    "log_prob": lambda z, b: jnp.log(b["rate"]) - b["rate"] * z,
    "log_partition": lambda b: -jnp.log(b["rate"]),
    "sampler": lambda key, b: jax.random.exponential(key) / b["rate"],
    "constraints": {"rate": iblr.positive},
    "name": "My exponential",
}


def exponential(rate, **changes):
    return iblr.custom(blocks={"rate": rate}, **EXPONENTIAL | changes)


def half_log_det(matrix):
    return jnp.log(jnp.diagonal(jnp.linalg.cholesky(matrix))).sum()


def correlated_noise(key, precision):
    noise = jax.random.normal(key, precision.shape[:1])
    L = jnp.linalg.cholesky(precision)
    return jax.scipy.linalg.solve_triangular(L, noise, lower=True, trans=1)


def normal_log_prob(z, mean, precision):
    x = z - mean
    return half_log_det(precision) - 0.5 * x @ precision @ x - 0.5 * x.size * jnp.log(2 * jnp.pi)


NORMAL = {
    "log_prob": lambda z, b: normal_log_prob(z, b["mean"], b["precision"]),
    "log_partition": lambda b: (
        0.5 * b["mean"] @ b["precision"] @ b["mean"] - half_log_det(b["precision"])
    ),
    "sampler": lambda key, b: b["mean"] + correlated_noise(key, b["precision"]),
    "constraints": {"precision": iblr.positive_definite},
    "name": "My Gaussian",
}


def normal(mean, precision):
    return iblr.custom(blocks={"mean": mean, "precision": precision}, **NORMAL)


def beta_log_partition(b):
    # Not `betaln`, whose second derivatives in JAX are those of a minimum where a = b.
    return gammaln(b["ab"]).sum() - gammaln(b["ab"].sum())


BETA = {
    "log_prob": lambda z, b: (
        (b["ab"] - 1) @ jnp.stack([jnp.log(z), jnp.log1p(-z)]) - beta_log_partition(b)
    ),
    "log_partition": beta_log_partition,
    "sampler": lambda key, b: jax.random.beta(key, b["ab"][0], b["ab"][1]),
    "constraints": {"ab": iblr.positive},
    "name": "My Beta",
}


def beta(a, b):
    return iblr.custom(blocks={"ab": jnp.array([a, b], float)}, **BETA)


def dirichlet_log_partition(b):
    return gammaln(b["a"]).sum() - gammaln(b["a"].sum())


DIRICHLET = {
    "log_prob": lambda z, b: (b["a"] - 1) @ jnp.log(z) - dirichlet_log_partition(b),
    "log_partition": dirichlet_log_partition,
    "sampler": lambda key, b: jax.random.dirichlet(key, b["a"]),
    "constraints": {"a": iblr.positive},
    "name": "My Dirichlet",
}


def dirichlet(*a):
    return iblr.custom(blocks={"a": jnp.array(a, float)}, **DIRICHLET)


LOGNORMAL = {
    "log_prob": lambda z, b: (
        (0.5 * jnp.log(b["s"] / (2 * jnp.pi)) - 0.5 * b["s"] * (jnp.log(z) - b["mu"]) ** 2)
        - jnp.log(z)
    ),
    "log_partition": lambda b: 0.5 * b["s"] * b["mu"] ** 2 - 0.5 * jnp.log(b["s"]),
    "sampler": lambda key, b: jnp.exp(b["mu"] + jax.random.normal(key) / jnp.sqrt(b["s"])),
    "constraints": {"s": iblr.positive},
    "name": "My lognormal",
}


def lognormal_entropy(b):
    return b["mu"] + 0.5 * (1 + jnp.log(2 * jnp.pi / b["s"]))


def lognormal(mu=0.0, s=1.0, **options):
    return iblr.custom(blocks={"mu": mu, "s": s}, **LOGNORMAL, **options)


def inverse_gamma_log_partition(b):
    return gammaln(b["a"]) - b["a"] * jnp.log(b["a"] * b["ratio"])


INVERSE_GAMMA = {
    "log_prob": lambda z, b: (
        -(b["a"] + 1) * jnp.log(z) - b["a"] * b["ratio"] / z - inverse_gamma_log_partition(b)
    ),
    "log_partition": inverse_gamma_log_partition,
    "sampler": lambda key, b: b["a"] * b["ratio"] / jax.random.gamma(key, b["a"]),
    "constraints": {"a": iblr.positive, "ratio": iblr.positive},
    "name": "My inverse Gamma",
}


def inverse_gamma(a, ratio):
    return iblr.custom(blocks={"a": a, "ratio": ratio}, **INVERSE_GAMMA)


# Accepted, wherever they start.

STARTS = {
    "Gamma": (gamma, [(0.3, 1.0), (0.3, 30.0), (1.0, 1.0), (5.0, 0.01), (50.0, 2.0)]),
    "inverse Gaussian": (inverse_gaussian, [(0.1, 1.0), (1.0, 0.1), (1.0, 30.0), (10.0, 1.0)]),
    "exponential": (exponential, [(0.01,), (1.0,), (100.0,)]),
    "Beta": (beta, [(1.0, 1.0), (2.0, 5.0), (50.0, 50.0), (0.5, 30.0)]),
    "Dirichlet": (dirichlet, [(0.3, 0.3, 0.3), (1.0, 2.0, 3.0), (50.0, 1.0, 0.5)]),
    "lognormal": (lognormal, [(0.0, 1.0), (-3.0, 0.1), (3.0, 10.0), (30.0, 0.5), (0.0, 1e3)]),
    "inverse Gamma": (inverse_gamma, [(0.3, 1.0), (1.0, 0.1), (3.0, 10.0), (50.0, 1.0)]),
}
# Compiling the derivative of a Gamma sampler takes long.
QUICK = ["inverse Gaussian", "exponential", "lognormal"]
starts = pytest.mark.parametrize(
    "make, where",
    [
        pytest.param(*STARTS[name], id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name in STARTS
    ],
)


@starts
def test_a_valid_family_is_accepted_wherever_it_starts(make, where):
    for start in where:
        assert make(*start).dtype == jnp.float32


@pytest.mark.slow
@starts
def test_a_valid_family_is_accepted_in_float64_too(make, where, x64):
    for start in where:
        assert make(*start).dtype == jnp.float64


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_mean_and_precision_of_a_gaussian_are_accepted(scale, mean):
    normal(mean * jnp.array([1.0, -0.5]), scale * jnp.array([[2.0, 0.5], [0.5, 1.0]]))


# The rule is that of the families of the package.


def tangent_of(q, *gradients):
    """The natural gradient of given dL / dlambda, one row of copies a block."""
    rows = zip(gradients, q.vectors, strict=True)
    return q._tangent(tuple(jnp.asarray(g, q.dtype).reshape(v.shape) for g, v in rows))


HAND_WRITTEN = {
    "Gamma": (lambda: gamma(1.7, 0.4), lambda: Gamma(1.7, 1.7 * 0.4)),
    "inverse Gaussian": (lambda: inverse_gaussian(2.0, 3.0), lambda: InverseGaussian(2.0, 3.0)),
    "exponential": (lambda: exponential(0.7), lambda: iblr.Exponential(0.7)),
}


@pytest.mark.parametrize("step_size", [0.01, 0.5, 3.0])
@pytest.mark.parametrize(
    "mine, theirs",
    [
        pytest.param(*pair, id=name, marks=pytest.mark.slow if name != "exponential" else ())
        for name, pair in HAND_WRITTEN.items()
    ],
)
def test_one_step_is_that_of_the_hand_written_family(mine, theirs, step_size, x64):
    mine, theirs = mine(), theirs()
    slopes = jnp.array([0.8, -0.3])[: len(theirs.blocks)]  # dL / dlog lambda
    hand, info = iblr.improved_step(theirs, theirs.tangent(slopes), step_size)
    gradients = [slope / block for slope, block in zip(slopes, theirs.blocks, strict=True)]
    new, mine_info = iblr.improved_step(mine, tangent_of(mine, *gradients), step_size)
    assert not info.refused and not mine_info.refused and mine_info.halvings == 0
    for a, b, start in zip(new.vectors, hand.blocks, theirs.blocks, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-8)
        assert abs(float(a[0, 0] / start[0]) - 1) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("step_size", [0.1, 2.0])
def test_one_step_of_a_matrix_block_is_that_of_the_gaussian(step_size, x64):
    mean, S = jnp.array([1.0, -0.5]), jnp.array([[2.0, 0.5], [0.5, 1.0]])
    P, m = jnp.array([[1.0, -0.3], [-0.3, 3.0]]), jnp.array([0.2, 0.4])
    theirs, mine = Gaussian.from_precision(mean, S), normal(mean, S)
    target = iblr.Target(lambda z: -0.5 * (z - m) @ P @ (z - m))
    hand, _ = iblr.improved_step(theirs, iblr.AtMean()(theirs, target, KEY), step_size)
    # The natural gradients are Sigma E[grad lbar] and G = S - E[hess lbar].
    directions = (jnp.linalg.solve(S, P @ (mean - m)), geometry.pack_symmetric(S - P))
    tangent = CustomTangent(tuple(ghat[None] for ghat in directions))
    new, info = iblr.improved_step(mine, tangent, step_size)
    assert not info.refused
    np.testing.assert_allclose(new.blocks["mean"], hand.mean, rtol=1e-8)
    np.testing.assert_allclose(new.blocks["precision"], hand.precision, rtol=1e-8)


def test_estimates_are_those_of_the_hand_written_family():
    mine, theirs = exponential(0.7), iblr.Exponential(0.7)
    target, keys = iblr.Target(lambda z: -2 * z - 0.3 * z**2), jax.random.split(KEY, 300)
    both = [
        jax.jit(jax.vmap(lambda key, q=q: iblr.Stl(pairs=8)(q, target, key).directions[0]))(keys)
        for q in (mine, theirs)
    ]
    relative = np.asarray(both[0])[:, 0, 0] / 0.7  # theirs is ghat / lambda
    assert agrees(relative - np.asarray(both[1])[:, 0], 0.0)
    assert not agrees(relative, 0.0)


def test_draws_and_densities_are_those_of_the_definition():
    q = lognormal(0.4, 2.0, entropy=lognormal_entropy)
    exact = stats.lognorm(np.sqrt(0.5), scale=np.exp(0.4))
    z = q.sample(KEY, 20_000)
    assert agrees(np.log(z), 0.4) and agrees((np.log(z) - 0.4) ** 2, 0.5)
    np.testing.assert_allclose(q.log_prob(z[:9]), exact.logpdf(z[:9]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(q.entropy(), exact.entropy(), rtol=1e-6)
    assert abs(float(q.mean[0]) - exact.mean()) < LARGEST_Z * exact.std() / np.sqrt(4000)
    np.testing.assert_allclose(q.standard_deviations[0], exact.std(), rtol=0.1)
    np.testing.assert_allclose(q.covariance[0, 0] * q.precision[0, 0], 1, rtol=1e-5)
    assert q.sample(KEY).shape == () and q.name == "My lognormal"
    assert q.blocks["mu"].shape == () and q.dim == 1
    assert lognormal().entropy() is None


# Copies.


@pytest.mark.slow
def test_copies_are_independent_members():
    one, three = lognormal(0.4, 2.0), lognormal(0.4, 2.0, copies=(3,))
    z = three.sample(KEY, 10_000)
    assert z.shape == (10_000, 3) and three.dim == 3 and three.blocks["mu"].shape == (3,)
    logs = np.log(z) - 0.4
    assert agrees(logs, 0.0) and agrees(logs[:, 0] * logs[:, 1], 0.0)
    np.testing.assert_allclose(three.log_prob(z[0]), one.log_prob(z[0]).sum(), rtol=1e-5)
    gradients = jnp.array([[0.3, -0.2, 1.0], [0.1, 0.4, -0.6]])
    stepped, info = iblr.improved_step(three, tangent_of(three, *gradients), 0.5)
    assert not info.refused
    for copy in range(3):
        alone, _ = iblr.improved_step(one, tangent_of(one, *gradients[:, copy, None]), 0.5)
        for a, b in zip(stepped.vectors, alone.vectors, strict=True):
            np.testing.assert_allclose(a[copy], b[0], rtol=1e-6)
    assert lognormal(copies=2).copies == (2,)
    assert lognormal(copies=(2, 3)).structure.shapes == ((2, 3),)


MEANS, PRECISIONS = np.array([0.5, -1.0, 2.0]), np.array([1.0, 3.0, 0.5])


def lognormals(z):
    """Three lognormals, normalised."""
    x, s = jnp.log(z) - jnp.asarray(MEANS, z.dtype), jnp.asarray(PRECISIONS, z.dtype)
    return (0.5 * jnp.log(s / (2 * jnp.pi)) - 0.5 * s * x**2 - jnp.log(z)).sum()


@pytest.mark.slow
def test_copies_are_fitted_each_to_its_own_target():
    posterior = iblr.fit(lognormals, lognormal(copies=(3,)), key=KEY)
    np.testing.assert_allclose(posterior.family.blocks["mu"], MEANS, atol=1e-3)
    np.testing.assert_allclose(posterior.family.blocks["s"], PRECISIONS, rtol=1e-3)
    assert abs(float(posterior.elbo)) < 1e-3
    assert "My lognormal over 3 parameters" in str(posterior) and "\nz[2] " in str(posterior)


# Fits with a known answer.


@pytest.mark.slow
def test_a_gamma_by_hand_reaches_the_conjugate_posterior():
    # Counts of 7 in 3 intervals, with the prior Ga(2, 1).
    posterior = iblr.fit(lambda z: 8 * jnp.log(z) - 4 * z, gamma(1.0, 1.0), key=KEY)
    blocks = posterior.family.blocks
    found = Gamma(blocks["shape"], blocks["shape"] * blocks["inverse_mean"])
    assert found.kl(Gamma(9.0, 4.0)) < 1e-5
    assert Gamma(1.0, 1.0).kl(Gamma(9.0, 4.0)) > 1
    evidence = special.gammaln(9) - 9 * np.log(4)
    assert abs(float(posterior.elbo) - evidence) < 1e-3


def beta_divergence(q, p):
    """KL between two Betas, given as pairs."""
    q, p = np.asarray(q, float), np.asarray(p, float)
    mean = special.digamma(q) - special.digamma(q.sum())
    return special.betaln(*p) - special.betaln(*q) + (q - p) @ mean


@pytest.mark.slow
def test_a_beta_target_is_found_from_a_beta_start():
    target = lambda z: 2 * jnp.log(z) + 6 * jnp.log1p(-z)  # noqa: E731
    posterior = iblr.fit(target, beta(1.0, 1.0), key=KEY)
    assert beta_divergence(posterior.family.blocks["ab"], [3, 7]) < 1e-5
    assert beta_divergence([1, 1], [3, 7]) > 0.1
    assert posterior.status == Status.ok
    assert abs(float(posterior.mean) - 0.3) < LARGEST_Z * 0.14 / np.sqrt(4000)
    # One entry of a block that would leave its constraint halves the step of the block.
    tangent = CustomTangent((jnp.array([[5.0, -5.0]]),))
    left, info = iblr.natural_gradient_step(beta(1.0, 1.0), tangent, 1.0)
    assert info.status == Status.left_set and (left.blocks["ab"] == 1).all()
    searched, info = iblr.line_search_step(left, tangent, 1.0)
    assert info.halvings == 3
    np.testing.assert_allclose(searched.blocks["ab"], [1 - 5 / 8, 1 + 5 / 8], rtol=1e-6)


# Steps that would leave the set.

BOUNDED = {"constraints": {"rate": iblr.interval(0, 2)}, "name": "Bounded"}


def test_a_step_that_would_leave_is_halved_and_counted():
    q = exponential(1.0, **BOUNDED)
    tangent = CustomTangent((jnp.array([[-3.0]]),))
    rate = lambda t: 1 + 3 * t + 4.5 * t**2  # noqa: E731  of the rule for an exponential
    for step_size, halvings in ((0.1, 0), (0.2, 0), (0.5, 2), (4.0, 5)):
        t = step_size * 0.5**halvings
        assert rate(t) < 2 and (halvings == 0 or rate(2 * t) >= 2)
        new, info = iblr.improved_step(q, tangent, step_size)
        assert not info.refused and info.halvings == halvings
        np.testing.assert_allclose(new.blocks["rate"], rate(t), rtol=1e-6)


def test_only_the_original_rule_leaves_without_a_search():
    q = exponential(1.0)
    tangent = CustomTangent((jnp.array([[3.0]]),))
    left, info = iblr.natural_gradient_step(q, tangent, 1.0)
    assert info.status == Status.left_set and info.halvings == 0
    assert_same_bits(left, q)
    searched, info = iblr.line_search_step(q, tangent, 1.0)
    assert not info.refused and info.halvings == 2  # 1 - 3/4
    np.testing.assert_allclose(searched.blocks["rate"], 0.25, rtol=1e-6)
    improved, info = iblr.improved_step(q, tangent, 1.0)
    assert info.halvings == 0
    np.testing.assert_allclose(improved.blocks["rate"], 1 - 3 + 4.5, rtol=1e-6)


def test_a_step_that_no_halving_keeps_inside_is_refused():
    q = exponential(1.0)
    tangent = CustomTangent((jnp.array([[1e30]]),))  # its square is infinite
    new, info = iblr.improved_step(q, tangent, 1.0)
    assert info.status == Status.left_set and info.halvings == MOST_HALVINGS
    assert_same_bits(new, q)


def test_a_direction_that_is_not_finite_is_refused_without_halving():
    q = exponential(1.0)
    tangent = CustomTangent((jnp.array([[jnp.nan]]),))
    new, info = iblr.improved_step(q, tangent, 1.0)
    assert info.status == Status.nonfinite and info.halvings == 0
    assert_same_bits(new, q)


@pytest.mark.slow
def test_halvings_are_counted_over_a_fit_and_said():
    posterior = quick_fit(lambda z: -4.0 * z, exponential(1.0, **BOUNDED), step_size=1.0)
    assert posterior.halvings > 0
    assert f"{posterior.halvings} halvings" in str(posterior)
    assert 1.5 < float(posterior.family.blocks["rate"]) < 2
    calm = quick_fit(lambda z: -1.5 * z, exponential(1.0, **BOUNDED))
    assert calm.halvings == 0 and "halvings" not in str(calm)


def test_a_trust_region_bounds_the_length_of_a_step():
    q = exponential(1.0)
    tangent = CustomTangent((jnp.array([[-30.0]]),))
    new, info = iblr.improved_step(q, tangent, 1.0, trust_region=True)
    np.testing.assert_allclose(new.blocks["rate"], 1 + 1 + 0.5, rtol=1e-5)
    np.testing.assert_allclose(info.shrunk, 1 / 30, rtol=1e-5)


# The loop.


def one_lognormal(z):
    return -0.5 * 3.0 * (jnp.log(z) + 1.0) ** 2 - jnp.log(z)


def test_an_interrupted_fit_goes_on_with_the_same_bits():
    whole = quick_fit(one_lognormal, lognormal())
    half = quick_fit(one_lognormal, lognormal(), num_steps=20)
    resumed = quick_fit(one_lognormal, lognormal(), state=half.state)
    assert_same_bits(resumed.state, whole.state)
    assert half.state.step == 20 and resumed.state.step == 40


@pytest.mark.slow
def test_a_batch_of_keys_is_a_loop_over_keys():
    keys = jax.random.split(KEY, 3)
    batch = quick_fit(one_lognormal, lognormal(), key=keys)
    alone = quick_fit(one_lognormal, lognormal(), key=keys[2])
    assert len(batch) == 3 and batch.mean.shape == (3,) and batch.halvings.shape == (3,)
    for name, block in batch[2].family.blocks.items():
        np.testing.assert_allclose(block, alone.family.blocks[name], rtol=1e-5, atol=1e-6)
    assert len(set(np.asarray(batch.family.vectors[0]).ravel().tolist())) == 3


def test_momentum_is_for_gaussians():
    for start in (lognormal(), Gamma.standard(1), Product({"a": Gamma.standard(1)})):
        with pytest.raises(ValueError, match=r"fit\(momentum=...\)"):
            iblr.fit(lambda z: 0.0, start, key=KEY, momentum=0.5)


@pytest.mark.slow
def test_a_step_may_be_compiled():
    state = iblr.init(lognormal(), KEY)
    options = {"estimator": iblr.Stl(pairs=2), "step_size": 0.1}
    step = lambda state: iblr.step(state, one_lognormal, **options)[0]  # noqa: E731
    a, b = step(state), jax.jit(step)(state)
    for x, y in zip(a.family.vectors, b.family.vectors, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert (a.family.vectors[0] != state.family.vectors[0]).all()


def test_a_family_survives_its_leaves():
    q = lognormal(0.4, 2.0)
    leaves, treedef = jax.tree.flatten(q)
    again = jax.tree.unflatten(treedef, leaves)
    assert_same_bits(again.sample(KEY, 3), q.sample(KEY, 3))


@pytest.mark.slow
def test_with_an_entropy_rep_works():
    q = lognormal(0.3, 2.0, entropy=lognormal_entropy)
    target, keys = iblr.Target(one_lognormal), jax.random.split(KEY, 500)
    gradients = [
        jax.jit(jax.vmap(lambda key, e=estimator: e(q, target, key).gradient))(keys)
        for estimator in (iblr.Rep(samples=16), iblr.Stl(pairs=8))
    ]
    assert agrees(np.asarray(gradients[0]) - np.asarray(gradients[1]), 0.0)
    assert not agrees(gradients[0], 0.0)
    known, noisy = (iblr.elbo(target, p, KEY) for p in (q, lognormal(0.3, 2.0)))
    expected = -1.5 * (1.3**2 + 0.5) + 0.5 * (1 + np.log(np.pi))
    for estimate in (known, noisy):
        distance = abs(float(estimate.value) - expected)
        assert distance < LARGEST_Z * float(estimate.standard_error) + 1e-4


def test_without_an_entropy_rep_says_what_it_needs():
    with pytest.raises(ValueError, match=r"`Rep` needs the entropy of My lognormal"):
        quick_fit(one_lognormal, lognormal(), estimator=iblr.Rep(samples=2))


def test_what_has_no_closed_form_says_so():
    q = lognormal()
    tangent = tangent_of(q, [0.1], [0.1])
    with pytest.raises(ValueError, match="`geodesic_step`.*My lognormal.*improved_step"):
        iblr.geodesic_step(q, tangent, 0.1)
    with pytest.raises(ValueError, match=r"`kl\(other\)`.*My lognormal"):
        q.kl(q)
    with pytest.raises(ValueError, match="My lognormal.*prior"):
        q.expected_log_prob(q)
    with pytest.raises(ValueError, match="`parameterisation=covariance`.*My lognormal"):
        iblr.improved_step(q, tangent, 0.1, parameterisation=iblr.Parameterisation.covariance)


@pytest.mark.slow
def test_a_prior_that_is_a_custom_family_goes_in_as_a_function():
    prior = lognormal(0.5, 1.0)
    likelihood = lambda z: -0.5 * jnp.log(z) ** 2  # noqa: E731
    exact = iblr.Target(log_likelihood=likelihood, prior=prior)
    with pytest.raises(ValueError, match="prior"):
        quick_fit(exact, lognormal(entropy=lognormal_entropy), estimator=iblr.Rep())
    posterior = iblr.fit(
        iblr.Target(log_likelihood=likelihood, prior=prior.log_prob), lognormal(), key=KEY
    )
    np.testing.assert_allclose(posterior.family.blocks["mu"], 0.25, atol=1e-3)
    np.testing.assert_allclose(posterior.family.blocks["s"], 2, rtol=1e-3)


# Refused: blocks that are not block-coordinate natural.


def natural_normal(e1, e2):
    """A Gaussian in its natural parameters, which are not block-coordinate."""
    A = lambda b: -0.25 * b["e1"] ** 2 / b["e2"] - 0.5 * jnp.log(-2 * b["e2"])  # noqa: E731

    def sampler(key, b):
        return (jax.random.normal(key) * jnp.sqrt(-2 * b["e2"]) - b["e1"]) / (2 * b["e2"])

    def log_prob(z, b):
        return b["e1"] * z + b["e2"] * z**2 - A(b) - 0.5 * jnp.log(2 * jnp.pi)

    return iblr.custom(
        blocks={"e1": e1, "e2": e2},
        log_prob=log_prob,
        log_partition=A,
        sampler=sampler,
        constraints={"e2": iblr.interval(-1e6, 0)},
    )


def natural_normal_2d(e1, S):
    A = lambda b: 0.5 * b["e1"] @ jnp.linalg.solve(b["S"], b["e1"]) - half_log_det(b["S"])  # noqa: E731
    return iblr.custom(
        blocks={"e1": e1, "S": S},
        log_prob=lambda z, b: (
            b["e1"] @ z - 0.5 * z @ b["S"] @ z - A(b) - 0.5 * z.size * jnp.log(2 * jnp.pi)
        ),
        log_partition=A,
        sampler=lambda key, b: jnp.linalg.solve(b["S"], b["e1"]) + correlated_noise(key, b["S"]),
        constraints={"S": iblr.positive_definite},
    )


@pytest.mark.parametrize("mean", [2.0, 0.0])
def test_natural_parameters_of_a_gaussian_are_refused(mean):
    # With the mean at zero they are block-coordinate at the start, and nowhere else.
    says = "'e2' and 'e1' .*is not zero.*not block-coordinate.*Assumption 2.*mean and precision"
    with pytest.raises(ValueError, match=says):
        natural_normal(mean, -0.5)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [2.0, 0.0])
def test_natural_parameters_of_a_gaussian_of_two_numbers_are_refused(mean):
    S = jnp.array([[2.0, 0.5], [0.5, 1.0]])
    with pytest.raises(ValueError, match="'S' and 'e1' .*is not zero.*not block-coordinate"):
        natural_normal_2d(mean * jnp.array([1.0, -0.5]), S)


MEAN_ABS = np.sqrt(2 / np.pi)


def skew_log_partition(b):
    """The part of the skew Gaussian's log density that is free of z, on average over w."""
    mu, alpha, s = b["mu"], b["alpha"], b["s"]
    return 0.5 * s * (mu**2 + 2 * MEAN_ABS * mu * alpha + alpha**2) - 0.5 * jnp.log(s)


def skew_draw(key, b):
    keys = jax.random.split(key)
    w = jax.random.normal(keys[0])
    return b["mu"] + jnp.abs(w) * b["alpha"] + jax.random.normal(keys[1]) / jnp.sqrt(b["s"]), w


def skew_joint_log_prob(zw, b):
    z, w = zw
    x = z - b["mu"] - jnp.abs(w) * b["alpha"]
    return 0.5 * (jnp.log(b["s"]) - b["s"] * x**2 - w**2) - jnp.log(2 * jnp.pi)


def skew_log_prob(z, b):
    """2 N(z | mu, 1/s + alpha^2) Phi(...)."""
    x, variance = z - b["mu"], 1 / b["s"] + b["alpha"] ** 2
    reach = b["alpha"] * b["s"] / jnp.sqrt(1 + b["s"] * b["alpha"] ** 2)
    return jnp.log(2.0) + norm.logpdf(x, 0, jnp.sqrt(variance)) + norm.logcdf(reach * x)


def test_the_skew_densities_are_densities():
    # So that what is refused below is a family, in unfit blocks.
    b = {"mu": 0.3, "alpha": 1.5, "s": 2.0}
    z = np.linspace(-8, 14, 4001)
    mass = np.trapezoid(np.exp(jax.vmap(lambda z: skew_log_prob(z, b))(z)), z)
    assert abs(mass - 1) < 1e-4
    draws = jax.vmap(lambda key: skew_draw(key, b)[0])(jax.random.split(KEY, 20_000))
    assert agrees(draws, 0.3 + MEAN_ABS * 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_mean_skew_and_precision_of_a_skew_gaussian_are_refused(alpha):
    blocks = {"mu": 0.3, "alpha": alpha, "s": 2.0}
    options = {"log_partition": skew_log_partition, "constraints": {"s": iblr.positive}}
    says = "'alpha' and 'mu' .*is not zero.*not block-coordinate.*not affine in the block .*'alpha'"
    with pytest.raises(ValueError, match=says):
        iblr.custom(blocks=blocks, log_prob=skew_joint_log_prob, sampler=skew_draw, **options)
    with pytest.raises(ValueError, match=says):
        iblr.custom(
            blocks=blocks,
            log_prob=skew_log_prob,
            sampler=lambda key, b: skew_draw(key, b)[0],
            **options,
        )


def test_the_mean_of_an_inverse_gaussian_is_refused_as_not_natural():
    # {1/beta, alpha} is block-coordinate, but log q is not affine in 1/beta.
    inverse = lambda b: {"square": b["mean"] ** -2, "alpha": b["alpha"]}  # noqa: E731
    of = {name: INVERSE_GAUSSIAN[name] for name in ("log_prob", "log_partition", "sampler")}
    with pytest.raises(ValueError, match="not affine in the block 'mean'.*Assumption 3") as error:
        iblr.custom(
            blocks={"mean": 1.5, "alpha": 2.0},
            log_prob=lambda z, b: of["log_prob"](z, inverse(b)),
            log_partition=lambda b: of["log_partition"](inverse(b)),
            sampler=lambda key, b: of["sampler"](key, inverse(b)),
            constraints={"mean": iblr.positive, "alpha": iblr.positive},
        )
    assert "block-coordinate" not in str(error.value) and "Assumption 2" not in str(error.value)


# Refused: functions that do not belong together.

FUNCTIONS = {
    "a density that is not normalised": (
        {
            "log_prob": lambda z, b: 2 * jnp.log(b["rate"]) - b["rate"] * z,
            "log_partition": lambda b: -2 * jnp.log(b["rate"]),
        },
        "do not describe one density.*normalisation",
    ),
    "a log-partition of another density": (
        {"log_partition": lambda b: -2 * jnp.log(b["rate"])},
        "not affine in the block 'rate'",
    ),
    "a sampler of another density": (
        {"sampler": lambda key, b: 1.2 * jax.random.exponential(key) / b["rate"]},
        "do not describe one density.*sampler",
    ),
    "a sampler without derivative": (
        {"sampler": lambda key, b: jax.lax.stop_gradient(jax.random.exponential(key) / b["rate"])},
        r"custom\(sampler=\.\.\.\).*not differentiable in 'rate'",
    ),
    "a log-partition that is not convex": (
        {
            "log_prob": lambda z, b: -b["rate"] * z - jnp.log(b["rate"]),
            "log_partition": lambda b: jnp.log(b["rate"]),
        },
        r"custom\(log_partition=\.\.\.\).*not strictly convex in the block 'rate'",
    ),
    "a density that is not finite": (
        {"log_prob": lambda z, b: jnp.log(b["rate"] * (z - 1)) - b["rate"] * z},
        "not finite",
    ),
    "an entropy of another density": (
        {"entropy": lambda b: 1.2 - jnp.log(b["rate"])},
        r"custom\(entropy=\.\.\.\)` of My exponential is 1.2, but.*-log_prob",
    ),
    "a density with another constant": (
        {
            "log_prob": lambda z, b: jnp.log(2 * b["rate"]) - b["rate"] * z,
            "entropy": lambda b: 1 - jnp.log(b["rate"]),
        },
        r"custom\(entropy=\.\.\.\).*normalisation",
    ),
    "a density of many": (
        {"log_prob": lambda z, b: jnp.ones(2) * b["rate"] * z},
        r"custom\(log_prob=\.\.\.\).*scalar.*\(2,\)",
    ),
    "a log-partition of many": (
        {"log_partition": lambda b: -jnp.log(b["rate"])[None]},
        r"custom\(log_partition=\.\.\.\).*scalar.*\(1,\)",
    ),
    "an entropy of many": (
        {"entropy": lambda b: jnp.ones(3)},
        r"custom\(entropy=\.\.\.\).*scalar.*\(3,\)",
    ),
    "a sampler of whole numbers": (
        {"sampler": lambda key, b: jax.random.poisson(key, b["rate"])},
        r"custom\(sampler=\.\.\.\).*floating-point",
    ),
    "a function that raises": (
        {"log_prob": lambda z, b: b["nope"]},
        r"custom\(log_prob=\.\.\.\).*KeyError",
    ),
    "a number for a function": ({"log_prob": 3.0}, r"custom\(log_prob=\.\.\.\).*function"),
    "a number for an entropy": ({"entropy": 3.0}, r"custom\(entropy=\.\.\.\).*function"),
    "a constraint of no block": (
        {"constraints": {"nope": iblr.positive}},
        r"custom\(constraints=\.\.\.\).*\['nope'\].*\['rate'\]",
    ),
    "a constraint that is none": (
        {"constraints": {"rate": "positive"}},
        r"custom\(constraints=\.\.\.\).*'rate'.*'positive'",
    ),
    "no copies": ({"copies": (0,)}, r"custom\(copies=\.\.\.\)"),
}


@pytest.mark.parametrize("changes, says", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_that_do_not_belong_together_are_refused(changes, says):
    with no_type_hook(), pytest.raises(ValueError, match=says):
        exponential(1.0, **changes)


def test_a_redundant_block_is_refused():
    # Two rates of which only the sum matters, and one that does not matter at all.
    for total in (lambda r: r.sum(), lambda r: r[0]):
        with pytest.raises(ValueError, match="not strictly convex in the block 'rates'.*redundant"):
            iblr.custom(
                blocks={"rates": jnp.array([0.5, 0.7])},
                log_prob=lambda z, b: jnp.log(total(b["rates"])) - total(b["rates"]) * z,  # noqa: B023
                log_partition=lambda b: -jnp.log(total(b["rates"])),  # noqa: B023
                sampler=lambda key, b: jax.random.exponential(key) / total(b["rates"]),  # noqa: B023
                constraints={"rates": iblr.positive},
            )


BLOCKS = {
    "no blocks": ({}, r"custom\(blocks=\.\.\.\).*dictionary"),
    "no dictionary": ([1.0], r"custom\(blocks=\.\.\.\).*dictionary"),
    "an empty block": ({"rate": jnp.zeros(0)}, r"custom\(blocks=\.\.\.\).*'rate'.*empty"),
    "a start outside": ({"rate": -1.0}, r"custom\(blocks=\.\.\.\).*'rate'.*-1.*positive"),
    "a start that is nan": ({"rate": jnp.nan}, r"custom\(blocks=\.\.\.\).*'rate'.*nan"),
}


@pytest.mark.parametrize("blocks, says", BLOCKS.values(), ids=BLOCKS)
def test_unfit_blocks_are_refused(blocks, says):
    options = EXPONENTIAL if "rate" in blocks else {**EXPONENTIAL, "constraints": None}
    with no_type_hook(), pytest.raises(ValueError, match=says):
        iblr.custom(blocks=blocks, **options)


@pytest.mark.parametrize(
    "precision, says",
    [
        (jnp.array([[1.0, 2.0], [2.0, 1.0]]), "inside the constraints.*'precision'.*definite"),
        (jnp.ones((2, 3)), r"square matrix for 'precision'.*\(2, 3\)"),
    ],
)
def test_a_matrix_that_is_not_positive_definite_is_refused(precision, says):
    with pytest.raises(ValueError, match=says):
        normal(jnp.zeros(2), precision)


# Every family of the package.

EVERY = {
    "Gaussian": (lambda: Gaussian.standard(2), lambda z: -((z - 1) ** 2).sum()),
    "DiagonalGaussian": (
        lambda: iblr.DiagonalGaussian.standard(2),
        lambda z: -((z - 1) ** 2).sum(),
    ),
    "Gamma": (lambda: Gamma.standard(2), lambda z: (jnp.log(z) - z).sum()),
    "InverseGaussian": (lambda: InverseGaussian.standard(2), lambda z: -(z + 1 / z).sum()),
    "Exponential": (lambda: iblr.Exponential.standard(2), lambda z: -2 * z.sum()),
    "Product": (
        lambda: Product({"a": Gaussian.standard(1), "b": Gamma(1.0, 1.0)}),
        lambda z: -((z["a"] - 1) ** 2).sum() - z["b"],
    ),
    "My lognormal": (lognormal, one_lognormal),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "Exponential" else pytest.mark.slow) for name in EVERY],
)
def test_every_family_is_fitted_without_another_argument_and_printed(name):
    make, target = EVERY[name]
    start = make()
    posterior = iblr.fit(target, start, key=KEY)
    assert posterior.status == Status.ok and posterior.stopped_by == "tol"
    before = iblr.elbo(target, start, KEY)
    assert posterior.elbo > before.value - LARGEST_Z * before.standard_error - 1e-4
    text = str(posterior)
    assert f"\n{name} over " in text and "ELBO" in text and "5 %" in text
    assert "Stopped by tol" in text and "Log evidence" in text
    assert len(text.splitlines()) == 6 + posterior.family.structure.point_dim
