"""Fits whose answer is known: how near they come, and in how many gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow

import iblr


def ill_conditioned(d, condition, seed):
    """A Gaussian target with eigenvalues spread evenly in the logarithm, and its optimum."""
    key = jax.random.key(seed)
    basis, _ = jnp.linalg.qr(jax.random.normal(key, (d, d)))
    half = 0.5 * np.log10(condition)
    precision = (basis * jnp.logspace(-half, half, d)) @ basis.T
    centre = jax.random.normal(key, (d,))

    def log_density(z):
        return -0.5 * (z - centre) @ precision @ (z - centre)

    return log_density, iblr.Gaussian.from_precision(centre, 0.5 * (precision + precision.T))


@pytest.mark.slow
@pytest.mark.parametrize("trust_region", [False, True])
def test_stl_converges_to_rounding_on_a_gaussian_with_and_without_the_trust_region(
    trust_region, x64
):
    log_density, optimum = ill_conditioned(200, 100, seed=0)
    posterior = iblr.fit(
        log_density,
        iblr.Gaussian.standard(200),
        key=jax.random.key(1),
        estimator=iblr.Stl(pairs=8),
        step_size=0.1,
        num_steps=2000,
        trust_region=trust_region,
        chunk_size=500,
    )
    assert posterior.status == iblr.Status.ok
    assert abs(posterior.family.kl(optimum)) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_secant_then_stl_solves_condition_ten_to_the_four_in_six_thousand_gradients(seed, x64):
    log_density, optimum = ill_conditioned(100, 1e4, seed)
    options = {"trust_region": True, "chunk_size": 105, "elbo_draws": 3}
    approach = iblr.fit(
        log_density,
        iblr.Gaussian.standard(100),
        key=jax.random.key(10 + seed),
        estimator=iblr.Secant(pairs=17),
        step_size=0.5,
        num_steps=105,
        **options,
    )
    finish = iblr.fit(
        log_density,
        approach.family,
        key=jax.random.key(20 + seed),
        estimator=iblr.Stl(pairs=17),
        step_size=0.2,
        num_steps=71,
        **options,
    )
    assert approach.num_gradients + finish.num_gradients <= 6000
    assert abs(finish.family.kl(optimum)) < 1e-6


def murphy():
    """The 2-D logistic regression of figure 2a and its negative ELBO by quadrature."""
    data = iblr.datasets.murphy()
    x, y = jnp.asarray(data.x), jnp.asarray(data.y)
    prior = iblr.Gaussian.from_covariance(jnp.zeros(2), 100 * jnp.eye(2))
    target = iblr.Target(
        log_likelihood=lambda w: jax.nn.log_sigmoid(y * (x @ w)).sum(), prior=prior.log_prob
    )
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)

    def neg_elbo(q):
        centre, scale = x @ q.mean, jnp.linalg.norm(x @ q.factor.T, axis=1)
        margins = y[:, None] * (centre[:, None] + scale[:, None] * nodes)
        expected = (jax.nn.log_sigmoid(margins) @ (weights / weights.sum())).sum()
        return float(q.kl(prior) - expected)

    return target, neg_elbo


MURPHY_OPTIMUM = 3.3075939329862853


def test_the_quadrature_is_right_at_the_known_optimum(x64):
    _, neg_elbo = murphy()
    covariance = np.array(
        [[10.819326107613154, 3.005052453699495], [3.005052453699495, 2.5865547526788792]]
    )
    q = iblr.Gaussian.from_covariance(np.array([12.145211149162206, 4.881718650948431]), covariance)
    assert neg_elbo(q) == pytest.approx(MURPHY_OPTIMUM, abs=1e-9)


@pytest.mark.parametrize(
    ("num_steps", "gap"), [(10_000, 0.02), pytest.param(50_000, 0.005, marks=pytest.mark.slow)]
)
def test_stl_reaches_the_optimum_of_the_logistic_toy(num_steps, gap, x64):
    target, neg_elbo = murphy()
    posterior = iblr.fit(
        target,
        iblr.Gaussian.standard(2),
        key=jax.random.split(jax.random.key(5), 5),
        estimator=iblr.Stl(pairs=8),
        step_size=lambda k: jnp.minimum(0.1, 2 / (10 + k)),
        num_steps=num_steps,
        chunk_size=1000,
    )
    gaps = [neg_elbo(posterior[i].family) - MURPHY_OPTIMUM for i in range(5)]
    assert -1e-9 < np.median(gaps) < gap


def rosenbrock(z):
    return -((1 - z[0]) ** 2) - 100 * (z[1] - z[0] ** 2) ** 2


def saddle(z):
    return -(z[0] ** 4) / 4 + z[0] ** 2 / 2 - z[1] ** 2 / 2


@pytest.mark.parametrize(
    ("log_density", "start"),
    [(rosenbrock, [-1.2, 1.0]), (rosenbrock, [10.0, -10.0]), (saddle, [1e-6, 3.0])],
)
@pytest.mark.parametrize("step_size", [slow(0.3), 1.0])
def test_at_mean_reaches_a_local_minimiser_with_the_precision_always_positive_definite(
    log_density, start, step_size, x64
):
    family = iblr.Gaussian.from_precision(jnp.array(start), jnp.eye(2))

    def body(state, _):
        state, info = iblr.step(
            state, log_density, estimator=iblr.AtMean(), step_size=step_size, trust_region=True
        )
        return state, (state.family.factor, info.refused)

    run = jax.jit(lambda state: jax.lax.scan(body, state, None, length=1500))
    state, (factors, refused) = run(iblr.init(family, jax.random.key(0)))
    mode = state.family.mean
    assert jnp.linalg.norm(jax.grad(log_density)(mode)) < 1e-6
    assert np.linalg.eigvalsh(-jax.hessian(log_density)(mode)).min() > 0
    assert not refused.any()
    covariances = np.swapaxes(factors, 1, 2) @ factors
    assert np.linalg.eigvalsh(np.linalg.inv(covariances)).min() > 0
    assert np.allclose(state.family.precision, -jax.hessian(log_density)(mode), rtol=1e-5)


@pytest.mark.parametrize("family_type", [iblr.Gaussian, iblr.DiagonalGaussian])
def test_laplace_is_the_mode_with_the_curvature_there(family_type, x64):
    def valley(z):
        return -((1 - z[0]) ** 2) - 10 * (z[1] - z[0] ** 2) ** 2

    posterior = iblr.laplace(valley, family_type.standard(2), key=jax.random.key(0))
    hessian = -np.asarray(jax.hessian(valley)(jnp.ones(2)))
    expected = hessian if family_type is iblr.Gaussian else np.diag(np.diag(hessian))
    assert posterior.status == iblr.Status.ok
    assert np.allclose(posterior.mean, 1, atol=1e-3)
    assert np.allclose(posterior.precision, expected, rtol=1e-2)


def test_laplace_says_when_it_did_not_converge():
    with pytest.raises(iblr.FitError, match="not_converged") as error:
        iblr.laplace(rosenbrock, iblr.Gaussian.standard(2), key=jax.random.key(0), num_steps=2)
    assert error.value.posterior.num_steps == 2
    posterior = iblr.laplace(
        rosenbrock, iblr.Gaussian.standard(2), key=jax.random.key(0), num_steps=2, throw=False
    )
    assert posterior.status == iblr.Status.not_converged
