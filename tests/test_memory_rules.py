"""Rules with a memory in the loop: batches, resumption, refusals, growth; fits by every method."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, quick_fit, slow

import iblr
from iblr import DiagonalGaussian, Gaussian, GaussianMixture
from iblr.baselines import Bbvi, Salimbeni, Vadam, Vogn, blr_step, song_step, tran_step, vadam_step
from iblr.rule import AbstractMemoryRule

KEY = jax.random.key(0)
H = np.array([[1.5, 0.6], [0.6, 0.9]])
CENTRE = np.array([1.0, -0.5])


def log_density(z):
    return -0.5 * (z - CENTRE) @ H @ (z - CENTRE)


class Counting(AbstractMemoryRule):
    """The improved rule, and a count of the steps it took."""

    def init(self, family):
        return {"steps": jnp.zeros((), jnp.int32), "last": family.mean}

    def __call__(self, family, tangent, step_size, memory):
        after, info = iblr.improved_step(family, tangent, step_size)
        return after, info, {"steps": memory["steps"] + 1, "last": after.mean}


def stop_at(step):
    return lambda progress: progress.step >= step


@pytest.mark.parametrize("rule", [Counting(), Bbvi(), slow(Salimbeni())])
def test_a_stopped_fit_goes_on_with_the_same_bits_after_pickling(rule):
    start = Gaussian.standard(2) if isinstance(rule, Salimbeni) else DiagonalGaussian.standard(2)
    whole = quick_fit(log_density, start, rule=rule)
    half = quick_fit(log_density, start, rule=rule, callback=stop_at(20))
    assert int(half.state.step) == 20
    state = pickle.loads(pickle.dumps(half.state))
    rest = quick_fit(log_density, start, rule=rule, state=state)
    assert_same_bits(rest.state, whole.state)
    assert_same_bits(rest.family, whole.family)
    if isinstance(rule, Counting):
        assert int(whole.state.memory["steps"]) == 40


def test_every_run_of_a_batch_has_a_memory_of_its_own():
    keys, rule = jax.random.split(KEY, 3), Bbvi()
    batch = quick_fit(log_density, DiagonalGaussian.standard(2), key=keys, rule=rule)
    for i in range(2):
        alone = quick_fit(log_density, DiagonalGaussian.standard(2), key=keys[i], rule=rule)
        for a, b in zip(
            jax.tree.leaves(batch.state[i].memory), jax.tree.leaves(alone.state.memory), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    theta = batch.state.memory[0]
    assert theta[1].shape == (3, 2) and not np.allclose(theta[1][0], theta[1][1], atol=1e-6)


def test_the_memory_of_a_refused_step_is_that_before_it():
    state = iblr.init(DiagonalGaussian.standard(2), KEY, Counting())
    options = {"estimator": iblr.Rep(), "step_size": 0.1, "rule": Counting()}

    @eqx.filter_jit
    def step(state, number):
        return iblr.step(state, lambda z: jnp.log(number) - z @ z, **options)

    good, info = step(state, jnp.ones(()))
    assert not info.refused and int(good.memory["steps"]) == 1
    bad, info = step(good, -jnp.ones(()))
    assert info.refused and int(bad.memory["steps"]) == 1 and int(bad.step) == 2


def test_a_plain_rule_has_no_memory():
    assert iblr.init(DiagonalGaussian.standard(2), KEY).memory == ()
    assert iblr.init(DiagonalGaussian.standard(2), KEY, blr_step).memory == ()


def test_a_state_goes_with_its_rule():
    state = iblr.init(DiagonalGaussian.standard(2), KEY)
    with pytest.raises(ValueError, match="same family, rule and number of keys"):
        quick_fit(log_density, DiagonalGaussian.standard(2), rule=Bbvi(), state=state)
    with pytest.raises(ValueError, match="a state without one. Make the state with the same rule"):
        iblr.step(state, log_density, estimator=iblr.Rep(), step_size=0.1, rule=Bbvi())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rule": Bbvi}, "`fit\\(rule=...\\)` needs a rule such as"),
        ({"rule": Bbvi(), "trust_region": True}, "belongs to the improved rule"),
    ],
)
def test_a_rule_that_is_none_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        quick_fit(log_density, DiagonalGaussian.standard(2), **options)


@pytest.mark.slow
def test_a_mixture_that_grows_keeps_a_memory_of_its_size():
    def two_modes(z):
        far = jnp.array([3.0, 0.0])
        return jnp.logaddexp(-0.5 * ((z - far) ** 2).sum(), -0.5 * ((z + far) ** 2).sum())

    start = GaussianMixture.init(KEY, "auto", 2, most=8)
    options = {"rule": Bbvi(), "num_steps": 150, "step_size": 0.03, "key": KEY}
    options |= {"chunk_size": 75, "elbo_draws": 50}
    whole = iblr.fit(two_modes, start, **options)
    sizes = whole.state.state.memory[0]["logits"].shape
    assert sizes == whole.state.state.family.log_weights.shape
    assert float(whole.elbo) > np.log(4 * np.pi) - 1
    half = iblr.fit(two_modes, start, callback=lambda progress: True, **options)
    rest = iblr.fit(two_modes, start, state=half.state, **options)
    assert_same_bits(rest.family, whole.family)


# A fit with every method, to an answer that is known. The data are such that the square of the
# gradient of a row is its Hessian on average: a linear model whose noise is as it says.

N = 400
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2)) @ np.array([[1.0, 0.0], [0.5, 0.8]])
Y = X @ np.array([0.7, -0.4]) + RNG.normal(size=N)
PRECISION = X.T @ X + 0.5 * np.eye(2)
MEAN = np.linalg.solve(PRECISION, X.T @ Y)


def regression(batch_size=None):
    return iblr.Target(
        log_likelihood=lambda w, rows: -0.5 * ((rows[1] - rows[0] @ w) ** 2).sum(),
        data=(jnp.asarray(X, float), jnp.asarray(Y, float)),
        batch_size=batch_size,
        prior=DiagonalGaussian.from_variances(jnp.zeros(2), jnp.full(2, 2.0)),
    )


START = Gaussian.from_precision(jnp.array([0.5, 0.0]), 200.0 * jnp.eye(2))
EXACT = {
    "BBVI-hess": (Bbvi(), iblr.Hess(), 0.01, 400),
    "BLR": (blr_step, iblr.Stl(pairs=4), 0.2, 100),
    "Salimbeni": (Salimbeni(), iblr.Hess(), 0.2, 100),
    "Tran": (tran_step, iblr.Stl(pairs=4), 0.2, 100),
    "Song": (song_step, iblr.Stl(pairs=4), 0.2, 100),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_a_fit_comes_to_the_exact_posterior(name):
    rule, estimator, step_size, num_steps = EXACT[name]
    decays = lambda k: step_size * jnp.minimum(1.0, 10.0 / (1 + k))  # noqa: E731
    posterior = iblr.fit(
        regression(),
        START,
        key=KEY,
        rule=rule,
        estimator=estimator,
        step_size=decays if isinstance(estimator, iblr.Hess) else step_size,
        num_steps=num_steps,
        elbo_draws=20,
    )
    scale = np.sqrt(np.diag(np.linalg.inv(PRECISION)))
    assert np.abs((np.asarray(posterior.mean) - MEAN) / scale).max() < 0.2
    ratio = np.linalg.eigvals(posterior.covariance @ PRECISION).real
    np.testing.assert_allclose(ratio, 1, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["VOGN", "Vadam"])
def test_a_fit_of_gauss_newton_comes_near_the_posterior(name):
    rules = {"VOGN": (iblr.natural_gradient_step, Vogn()), "Vadam": (vadam_step, Vadam())}
    rule, estimator = rules[name]
    posterior = iblr.fit(
        regression(40),
        START,
        key=KEY,
        rule=rule,
        estimator=estimator,
        step_size=lambda k: jnp.minimum(0.05, 2.0 / (1 + k)),
        num_steps=1000,
        elbo_draws=20,
    )
    scale = np.sqrt(np.diag(np.linalg.inv(PRECISION)))
    assert np.abs((np.asarray(posterior.mean) - MEAN) / scale).max() < 1.0
    if name == "VOGN":
        ratio = np.linalg.eigvals(posterior.covariance @ PRECISION).real
        assert 0.7 < ratio.min() and ratio.max() < 1.4


@pytest.mark.slow
def test_bbvi_fits_gammas():
    prior = iblr.Gamma(jnp.array([1.0, 2.0]), 1.0)
    counts = lambda rate: (jnp.array([7.0, 0.0]) * jnp.log(rate) - 3 * rate).sum()  # noqa: E731
    posterior = iblr.fit(
        iblr.Target(log_likelihood=counts, prior=prior),
        prior,
        key=KEY,
        rule=Bbvi(),
        step_size=0.1,
        num_steps=600,
        elbo_draws=20,
    )
    assert float(posterior.family.kl(iblr.Gamma(jnp.array([8.0, 2.0]), 4.0))) < 0.02
