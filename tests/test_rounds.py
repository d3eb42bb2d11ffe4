"""Mixtures that choose the number of their components."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, no_type_hook

import iblr
from iblr import GaussianMixture, Status, rounds
from iblr.families.mixture_growth import NEGLIGIBLE_WEIGHT

KEY = jax.random.key(0)
STEPS = 200


def log_density(z, radius):
    """A ring, or, of radius zero, a Gaussian of variance one quarter."""
    return -2.0 * ((jnp.sqrt((z**2).sum() + 1e-6) - radius) ** 2).sum()


RING = iblr.Target(log_likelihood=log_density, data=jnp.array([6.0]))
GAUSSIAN = iblr.Target(log_likelihood=log_density, data=jnp.array([0.0]))


def start(key=KEY, most=16):
    return GaussianMixture.init(key, "auto", 2, spread=4.0, most=most)


def fit(start, key=KEY, target=RING, **options):
    return iblr.fit(target, start, key=key, num_steps=STEPS, **options)


@pytest.fixture(scope="module")
def whole():
    """Two rounds, of eight and of sixteen components."""
    return fit(start())


@pytest.mark.slow
def test_components_are_added_as_long_as_they_help(whole):
    assert whole.status == Status.ok
    assert 8 < whole.family.num_components <= 16
    of_eight, of_more = whole.trace.elbo[[1, -1]]
    assert of_more > of_eight + 0.01
    assert (whole.family.weights >= NEGLIGIBLE_WEIGHT).all()
    assert np.isclose(whole.family.weights.sum(), 1, atol=1e-5)


@pytest.mark.slow
def test_the_history_is_that_of_all_rounds(whole):
    assert whole.num_steps == 2 * STEPS
    assert whole.trace.step.tolist() == [100, 200, 300, 400]
    assert whole.num_gradients == STEPS * 2 * (8 + 16)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_stopped_fit_goes_on_with_the_same_bits(whole, chunks):
    told = []
    stopped = fit(start(), callback=lambda progress: told.append(progress) or len(told) == chunks)
    assert stopped.num_steps == 100 * chunks
    assert_same_bits(fit(start(), state=stopped.state).family, whole.family)


@pytest.mark.slow
def test_an_interrupt_between_rounds_loses_nothing(whole, monkeypatch):
    look, calls = rounds._pruned, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return look(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "_pruned", interrupted)
        part = fit(start())
    assert part.status == Status.interrupted and part.num_steps == 2 * STEPS
    assert_same_bits(fit(start(), state=part.state).family, whole.family)


@pytest.mark.slow
def test_a_state_of_another_kind_of_start_is_refused(whole):
    narrow = GaussianMixture.init(KEY, "auto", 1, most=16)
    for other in (narrow, GaussianMixture.init(KEY, "auto", 2, diagonal=True)):
        with pytest.raises(ValueError, match="state"):
            iblr.fit(lambda z: -(z**2).sum(), other, key=KEY, state=whole.state, num_steps=300)


@pytest.mark.slow
def test_rounds_that_do_not_help_are_undone_and_two_of_them_end_the_fit():
    posterior = fit(start(), target=GAUSSIAN)
    assert posterior.status == Status.ok
    assert posterior.num_steps == 3 * STEPS
    assert posterior.family.num_components <= 8
    assert abs(posterior.elbo - np.log(2 * np.pi / 4)) < 0.02


@pytest.mark.slow
def test_several_starts_are_one_fit():
    keys = jax.random.split(KEY, 3)
    runs = fit(jax.vmap(start)(keys), keys)
    assert runs.family.log_weights.shape[0] == len(runs) == 3
    assert runs.best.elbo == runs.elbo.max()
    assert runs[1].family.num_components == runs.family.log_weights.shape[1] <= 16
    told = []
    stopped = fit(jax.vmap(start)(keys), keys, callback=lambda _: told.append(1) or len(told) == 3)
    assert_same_bits(fit(jax.vmap(start)(keys), keys, state=stopped.state).family, runs.family)


def test_new_components_start_where_mass_is_missing():
    """p has a second mode, of the same weight, that q does not cover."""
    modes = jnp.array([[-2.0, 0.0], [2.0, 0.0]])
    log_density = lambda z: jax.nn.logsumexp(-0.5 * ((z - modes) ** 2).sum(1))  # noqa: E731
    growth = start().growth
    q = GaussianMixture.from_moments(modes[:1], jnp.eye(2)[None])
    q = GaussianMixture(q.components, q.log_weights, q.structure, growth=growth)
    grown = jax.jit(lambda key: q.grown(log_density, key, 8))(KEY)
    assert grown.num_components == 9
    new = grown.components.mean[1:]
    assert (new[:6, 0] > -0.5).all() and abs(new[:6, 0].mean() - 2) < 1  # the last two are scouts
    np.testing.assert_allclose(grown[1].covariance, 0.25 * np.eye(2), atol=1e-6)
    np.testing.assert_allclose(grown[1].log_det, np.log(0.25**2), rtol=1e-5)
    np.testing.assert_allclose(grown[8].covariance, np.eye(2), atol=1e-6)
    added = float(grown.weights[1:].sum())
    assert 0.3 < added <= 0.5  # the missing mass is Phi(2) - Phi(-2) halves, 0.48
    assert np.isclose(grown.weights.sum(), 1, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: GaussianMixture.init(KEY, "many", 2),
        lambda: GaussianMixture.init(KEY, "auto", 2, most=0),
        lambda: GaussianMixture.init(KEY, "auto", 2, learn_weights=False),
        lambda: iblr.Product({"z": start()}),
        lambda: start().grown(RING, KEY, 0),
        lambda: start().heaviest(9),
        lambda: jax.vmap(start)(jax.random.split(KEY, 2)).pruned(),
        lambda: fit(start(), state=iblr.init(GaussianMixture.init(KEY, 4, 2), KEY)),
    ],
    ids=["word", "most", "weights", "product", "grown", "heaviest", "batch", "state"],
)
def test_bad_input_is_named(wrong):
    with (
        no_type_hook(),
        pytest.raises(ValueError, match="GaussianMixture.init|fit|Product|grown|heaviest|pruned"),
    ):
        wrong()


@pytest.mark.slow
def test_without_settings_rounds_end_when_they_gain_less_than_tol():
    """On a ring more components gain something, but not ten nats."""
    far, near = (iblr.fit(RING, start(), key=KEY, tol=tol) for tol in (10.0, 0.01))
    assert far.stopped_by == near.stopped_by == "tol"
    assert far.family.num_components < near.family.num_components
    assert near.elbo > far.elbo + 0.01
