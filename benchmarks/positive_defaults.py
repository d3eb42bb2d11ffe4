"""How far do the defaults of `iblr.fit` get on the positive families, beside other settings.

    python benchmarks/positive_defaults.py [--steps 2000]

Every row is a problem whose optimum is known: in closed form where the family holds the target, by
coordinate ascent for the product, by quadrature and a quasi-Newton method elsewhere. A cell is
KL(q || optimum) in nats after the given number of steps, the largest of three keys, and `failed`
where a fit raised. The first column has `num_steps` for its only setting; without any, a fit
takes rounds of such steps until they gain nothing (`family_defaults.py`).
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from reporting import whole_number
from scipy import optimize, stats

import iblr

SETTINGS = {
    "default": {},
    "Stl(2)": {"estimator": iblr.Stl(pairs=2)},
    "Rep(16)": {"estimator": iblr.Rep(samples=16)},
    "no region": {"trust_region": False},
    "t = 0.1": {"step_size": 0.1},
    "2/(10+k)": {"step_size": lambda k: jnp.minimum(0.1, 2 / (10.0 + k))},
}


def gamma_optimum(log_density):
    """The best Gamma for a density of one positive number, by quadrature in its quantiles."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    probabilities, weights = 0.5 * (nodes + 1), 0.5 * weights

    def neg_elbo(log_parameters):
        q = stats.gamma(np.exp(log_parameters[0]), scale=np.exp(-log_parameters[1]))
        z = q.ppf(probabilities)
        return -weights @ log_density(z) - q.entropy()

    best = optimize.minimize(neg_elbo, [1.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9})
    return iblr.Gamma(*jnp.exp(jnp.asarray(best.x, float)))


def normal_gamma():
    """x_i ~ N(mu, 1/tau), mu ~ N(0, 100), tau ~ Ga(1, 1), and the optimum by coordinate ascent."""
    x = np.random.default_rng(0).normal(3.0, 0.5, size=30)
    shape, rate, mean, precision = 1 + 0.5 * len(x), 1.0, 0.0, 1.0
    for _ in range(200):
        tau = shape / rate
        precision = 0.01 + len(x) * tau
        mean = tau * x.sum() / precision
        rate = 1 + 0.5 * (((x - mean) ** 2).sum() + len(x) / precision)
    data = jnp.asarray(x, float)

    def log_density(z):
        squares = 0.5 * len(x) * jnp.log(z["tau"]) - 0.5 * z["tau"] * ((data - z["mu"]) ** 2).sum()
        return squares - z["tau"] - 0.005 * z["mu"] ** 2

    start = iblr.Product({"mu": iblr.Gaussian.standard(like=0.0), "tau": iblr.Gamma(1.0, 1.0)})
    normal = iblr.Gaussian.from_precision(jnp.asarray(mean, float), jnp.array([[precision]]))
    return log_density, start, iblr.Product({"mu": normal, "tau": iblr.Gamma(shape, rate)})


def problems():
    """Name: (log density, start, optimum)."""
    inside = {
        "Gamma, conjugate": iblr.Gamma(jnp.array([8.0, 2.0, 30.0]), jnp.array([4.0, 3.0, 10.0])),
        "Gamma, mean 10^4 away": iblr.Gamma(200.0, 0.02),
        "Gamma, shape 0.05": iblr.Gamma(0.05, 50.0),
        "Gamma, shape 10^4": iblr.Gamma(1e4, 1e4),
        "Gamma, a count of 10^5": iblr.Gamma(1e5, 1.0),
        "inverse Gaussian": iblr.InverseGaussian(jnp.array([2.0, 0.5]), jnp.array([3.0, 10.0])),
        "inverse Gaussian, mean 20": iblr.InverseGaussian(20.0, 3.0),
        "Exponential": iblr.Exponential(jnp.array([4.0, 0.2])),
        "Exponential, rate 10^-3": iblr.Exponential(1e-3),
    }
    for name, optimum in inside.items():
        start = type(optimum).standard(like=optimum.moments()[0])
        yield name, optimum.log_prob, start, optimum
    counts = lambda z, log: 7 * log(z) - 2 * z - 0.5 * (log(z) - 1) ** 2  # noqa: E731
    optimum = gamma_optimum(lambda z: counts(z, np.log))
    yield "Gamma, not conjugate", lambda z: counts(z, jnp.log), iblr.Gamma(1.0, 1.0), optimum
    yield ("Gaussian x Gamma", *normal_gamma())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=whole_number, default=2000, help="steps of every fit")
    steps = parser.parse_args().steps
    print(f"KL(q || optimum) in nats after {steps} steps, the largest of three keys")
    print(f"{'':<26}" + "".join(f"{name:>12}" for name in SETTINGS))
    for name, log_density, start, optimum in problems():
        cells, started = [], time.perf_counter()
        for settings in SETTINGS.values():
            keys = jax.random.split(jax.random.key(0), 3)
            try:
                posterior = iblr.fit(log_density, start, key=keys, num_steps=steps, **settings)
                kls = jax.vmap(lambda q, p=optimum: q.kl(p))(posterior.family)
                fine = bool((posterior.status == iblr.Status.ok).all())
                cells.append(f"{float(kls.max()):.1e}" if fine else "failed")
            except iblr.FitError:
                cells.append("failed")
        seconds = time.perf_counter() - started
        print(f"{name:<26}" + "".join(f"{cell:>12}" for cell in cells) + f"   ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
