"""The best Gaussian of each of ten posteriors, over the coordinates of `posteriordb_models.py`.

    python benchmarks/posteriordb_best.py --path CHECKOUT [--only NAME ...]

What it finds goes into posteriordb_references.json: mean and standard deviation of the parameters
under that Gaussian, its ELBO (of log densities without constants), and mean and standard deviation
of the reference draws. In float64: `iblr.regression` gives a first Gaussian, in whose whitened
coordinates L-BFGS maximises the ELBO over the mean and a Cholesky factor on a fixed sample, a
scrambled Sobol sequence with mean 0 and covariance I. A second, independent sample is solved too.
`noise` says how far the two are apart: in means (in standard deviations), in standard deviations
(as a ratio less one), and in nats, by which the first lacks the second on the second's sample.
"""

import argparse
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gaussian_peers import advance, around
from posteriordb_models import Checkout, Model, columns, path_argument
from scipy.optimize import minimize
from scipy.stats import norm, qmc

import iblr

REFERENCES = Path(__file__).with_name("posteriordb_references.json")
POINTS = 2**15
FEW = {"diamonds-diamonds": 2**12}  # 5000 rows of data, and nearly Gaussian
ADVANCES = 400


def noise(dim: int, points: int, seed: int) -> np.ndarray:
    """Standard normal rows with mean 0 and covariance I."""
    uniform = qmc.Sobol(dim, rng=np.random.default_rng(seed)).random(points)
    rows = norm.ppf(np.clip(uniform, 1e-12, 1 - 1e-12))
    rows = rows - rows.mean(0)
    return rows @ np.linalg.inv(np.linalg.cholesky(rows.T @ rows / points)).T


def first_guess(model: Model) -> tuple[jax.Array, jax.Array]:
    family = iblr.Gaussian.standard(like=model.init, support=model.support)
    state = around(family, model.start, jax.random.key(0))
    target = iblr.Target(model.log_density)
    for _ in range(ADVANCES):
        state = advance(state, target)
    return state.family.mean, state.family.factor.T


def solve(model: Model, mean, root, rows: np.ndarray):
    """The best Gaussian on a sample, and the ELBO on a sample as a function of (mean, root)."""
    d = model.dim
    lower, upper = np.tril_indices(d)
    diagonal = jnp.asarray(lower == upper)

    def average(mean, root, rows):
        value = jax.lax.map(lambda e: model.flat(mean + root @ e), rows, batch_size=256).mean()
        return value + jnp.linalg.slogdet(root)[1] + 0.5 * d * (1 + math.log(2 * math.pi))

    def gaussian(theta):
        entries = jnp.where(diagonal, jnp.exp(jnp.where(diagonal, theta[d:], 0)), theta[d:])
        turn = jnp.zeros((d, d)).at[lower, upper].set(entries)
        return mean + root @ theta[:d], root @ turn

    elbo = jax.jit(average)
    both = jax.jit(jax.value_and_grad(lambda theta, rows: -average(*gaussian(theta), rows)))
    rows = jnp.asarray(rows)
    found = minimize(
        lambda t: [np.asarray(part, float) for part in both(t, rows)],
        np.zeros(d + len(lower)), jac=True, method="L-BFGS-B",
        options={"maxiter": 500, "maxcor": 30, "ftol": 1e-14, "gtol": 1e-6},
    )  # fmt: skip
    return gaussian(found.x), elbo, float(np.abs(found.jac).max())


def moments(model: Model, mean, root) -> tuple[np.ndarray, np.ndarray]:
    """Of the parameters as reported, under N(mean, root root')."""
    rows = jnp.asarray(noise(model.dim, 2**17, seed=9))
    numbers = np.asarray(jax.jit(lambda e: model.numbers(mean + e @ root.T))(rows))
    return numbers.mean(0), numbers.std(0)


def find(model: Model) -> dict:
    points = FEW.get(model.name, POINTS)
    mean, root = first_guess(model)
    samples = [noise(model.dim, points, seed) for seed in (1, 2)]
    (mean, root), elbo, left = solve(model, mean, root, samples[0])
    other, _, _ = solve(model, mean, root, samples[1])
    second = jnp.asarray(samples[1])
    (m, s), (m_other, s_other) = moments(model, mean, root), moments(model, *other)
    return {
        "mean": dict(zip(model.names, m.tolist(), strict=True)),
        "sd": dict(zip(model.names, s.tolist(), strict=True)),
        "elbo": float(elbo(mean, root, second)),
        "noise": {
            "mean": float(np.max(np.abs(m - m_other) / s)),
            "sd": float(np.max(np.abs(s / s_other - 1))),
            "elbo": float(elbo(*other, second) - elbo(mean, root, second)),
        },
        "how": f"L-BFGS on {points} quasi-random points, largest gradient {left:.1e}",
        "coordinates": {"mean": mean.tolist(), "root": root.tolist()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    path_argument(parser)
    parser.add_argument("--only", nargs="+", help="names of posteriors")
    options = parser.parse_args()
    if options.path is None:
        print("posteriordb_best: no --path CHECKOUT: nothing to find")
        return
    checkout = Checkout(options.path)
    kept = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
    for name in options.only or checkout.names():
        with jax.enable_x64(True):
            model, draws = checkout.model(name), checkout.draws(name)
            found = find(model)
            numbers, names = np.asarray(columns(draws)), model.names
        found["draws"] = {
            "mean": dict(zip(names, numbers.mean(0).tolist(), strict=True)),
            "sd": dict(zip(names, numbers.std(0).tolist(), strict=True)),
        }
        kept[name] = found
        REFERENCES.write_text(json.dumps(kept, indent=1) + "\n")
        off = np.abs(np.array(list(found["mean"].values())) - numbers.mean(0)) / numbers.std(0)
        ratio = np.array(list(found["sd"].values())) / numbers.std(0)
        print(
            f"{name:42s} ELBO {found['elbo']:12.5f}   noise {found['noise']['mean']:.4f} sd, "
            f"{found['noise']['sd']:.4f}, {found['noise']['elbo']:.1e} nats   from the draws: mean "
            f"{off.max():.3f} sd, sd {ratio.min():.2f} to {ratio.max():.2f} times; {found['how']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
