"""Ten posteriors of posteriordb: a reader of any checkout, and their log densities.

    python benchmarks/posteriordb_models.py --path CHECKOUT   # check the densities on the draws

A checkout has `posterior_database/{posteriors,data/data,reference_posteriors/draws/draws}`, its
data and draws in JSON, zipped or not. The log densities are written in the parameters of the models
with their supports, without Jacobians: those are `iblr`'s to add. What the models do not state is
flat. garch's 0 < beta1 < 1 - alpha1 is beta1 = (1 - alpha1) share with 0 < share < 1.

Where a density is right, the mean of the gradient of its coordinates over draws of the posterior is
zero: the check prints the largest mean in standard errors (draws are nearly independent).
"""

import argparse
import dataclasses
import json
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import iblr
from iblr.structure import Structure

VARIABLE = "IBLR_POSTERIORDB"


@dataclasses.dataclass(frozen=True)
class Model:
    """A log density of points on supports.

    Attributes:
        name: that of the posterior.
        log_density: of a point, without the Jacobian of its coordinates.
        init: the point to start at.
        support: of the leaves that are not real.
        reported: a point as the numbers that reference draws hold.
        point: the numbers of a draw as a point.
    """

    name: str
    log_density: Callable
    init: dict[str, Any]
    support: dict[str, Any]
    reported: Callable = dict
    point: Callable = dict

    @property
    def structure(self) -> Structure:
        return Structure.like(self.init, self.support)

    @property
    def dim(self) -> int:
        return self.structure.dim

    @property
    def start(self) -> jax.Array:
        """Coordinates of the start."""
        return self.structure.ravel(self.init, "start")

    def flat(self, x: jax.Array) -> jax.Array:
        """The log density of coordinates."""
        return iblr.Target(self.log_density).whole(self.structure, None)(x)

    def numbers(self, rows: jax.Array) -> jax.Array:
        """Coordinates as what is reported, a row a draw, in the order of `names`."""
        return columns(self.reported(self.structure.unravel(rows)))

    @property
    def names(self) -> list[str]:
        """Of the numbers reported, as in the draws."""
        found = []
        for name, leaf in sorted(self.reported(self.init).items()):
            indices = range(1, leaf.size + 1)
            found += [f"{name}[{i}]" for i in indices] if leaf.ndim else [name]
        return found

    def coordinates(self, draws: dict[str, np.ndarray]) -> jax.Array:
        """Reference draws as coordinates, a row a draw."""
        return self.structure.ravel(self.point(draws), "coordinates")


def columns(draws: dict[str, Any]) -> jax.Array:
    """Arrays with one first axis side by side, by name."""
    parts = [jnp.asarray(draws[name]) for name in sorted(draws)]
    return jnp.concatenate([x.reshape(x.shape[0], -1) for x in parts], axis=1)


class Checkout:
    """Data and reference draws below a path."""

    def __init__(self, path: str | os.PathLike):
        self.root = Path(path) / "posterior_database"
        if not (self.root / "posteriors").is_dir():
            raise FileNotFoundError(f"no posteriordb checkout: {self.root}/posteriors is missing")

    def names(self) -> list[str]:
        """Of the posteriors that are here and have a model."""
        return [n for n in MODELS if (self.root / "posteriors" / f"{n}.json").is_file()]

    def data(self, name: str) -> dict:
        return self._read(f"data/data/{self._entry(name)['data_name']}.json")

    def draws(self, name: str) -> dict[str, np.ndarray]:
        """Draws of all chains by parameter, one after the other."""
        reference = self._entry(name)["reference_posterior_name"]
        chains = self._read(f"reference_posteriors/draws/draws/{reference}.json")
        found: dict[str, dict] = {}
        for label in chains[0]:
            stem, _, index = label.rstrip("]").partition("[")
            place = tuple(int(part) for part in index.split(",") if part)
            values = np.concatenate([np.asarray(chain[label], float) for chain in chains])
            found.setdefault(stem, {})[place] = values
        arrays = {}
        for stem, parts in found.items():
            rows = np.stack([parts[place] for place in sorted(parts)], axis=1)
            arrays[stem] = rows[:, 0] if () in parts else rows
        return arrays

    def model(self, name: str) -> Model:
        return MODELS[name](name, self.data(name))

    def _entry(self, name: str) -> dict:
        return self._read(f"posteriors/{name}.json")

    def _read(self, place: str):
        plain = self.root / place
        if plain.is_file():
            return json.loads(plain.read_text())
        with zipfile.ZipFile(plain.with_name(plain.name + ".zip")) as archive:
            return json.loads(archive.read(archive.namelist()[0]))


def normal(x, mean, scale):
    """Sum of log densities, without constants."""
    terms = -0.5 * ((x - mean) / scale) ** 2 - jnp.log(scale)
    return jnp.sum(terms)


def half_cauchy(x, scale):
    return -jnp.sum(jnp.log1p((x / scale) ** 2))


def half_normal(x, scale):
    return -0.5 * jnp.sum((x / scale) ** 2)


def student(x, df, centre, scale):
    return -0.5 * (df + 1) * jnp.log1p(((x - centre) / scale) ** 2 / df)


def array(data: dict, name: str) -> np.ndarray:
    return np.asarray(data[name], float)


def regression(name: str, x, y, prior: Callable) -> Model:
    """y ~ N(x beta, sigma)."""
    x, y = np.asarray(x, float), np.asarray(y, float)

    def log_density(z):
        beta, sigma = z["beta"], z["sigma"]
        fitted = jnp.asarray(x, beta.dtype) @ beta
        return normal(jnp.asarray(y, beta.dtype), fitted, sigma) + prior(beta, sigma)

    init = {"beta": jnp.zeros(x.shape[1]), "sigma": jnp.ones(())}
    return Model(name, log_density, init, {"sigma": iblr.positive})


def ark(name: str, data: dict) -> Model:
    y, k = array(data, "y"), data["K"]
    lags = np.stack([y[k - i : len(y) - i] for i in range(1, k + 1)], axis=1)

    def log_density(z):
        fitted = z["alpha"] + jnp.asarray(lags, z["beta"].dtype) @ z["beta"]
        prior = normal(z["alpha"], 0, 10.0) + normal(z["beta"], 0, 10.0)
        prior = prior + half_cauchy(z["sigma"], 2.5)
        return normal(jnp.asarray(y[k:], fitted.dtype), fitted, z["sigma"]) + prior

    init = {"alpha": jnp.zeros(()), "beta": jnp.zeros(k), "sigma": jnp.ones(())}
    return Model(name, log_density, init, {"sigma": iblr.positive})


def schools(name: str, data: dict) -> Model:
    y, sigma = array(data, "y"), array(data, "sigma")

    def log_density(z):
        theta = z["mu"] + z["tau"] * z["noise"]
        prior = normal(z["noise"], 0, 1.0) + normal(z["mu"], 0, 5.0) + half_cauchy(z["tau"], 5.0)
        return normal(y.astype(theta.dtype), theta, sigma.astype(theta.dtype)) + prior

    def reported(z):
        theta = z["mu"][..., None] + z["tau"][..., None] * z["noise"]
        return {"theta": theta, "mu": z["mu"], "tau": z["tau"]}

    def point(draws):
        noise = (draws["theta"] - draws["mu"][..., None]) / draws["tau"][..., None]
        return {"noise": noise, "mu": draws["mu"], "tau": draws["tau"]}

    init = {"noise": jnp.zeros(len(y)), "mu": jnp.zeros(()), "tau": jnp.ones(())}
    return Model(name, log_density, init, {"tau": iblr.positive}, reported, point)


def kidiq(name: str, data: dict) -> Model:
    ones = np.ones(data["N"])
    x = np.stack([ones, array(data, "mom_hs"), array(data, "mom_iq")], axis=1)
    return regression(name, x, data["kid_score"], lambda beta, sigma: half_cauchy(sigma, 2.5))


def nes(name: str, data: dict) -> Model:
    age = array(data, "age_discrete")
    x = [np.ones(data["N"]), array(data, "real_ideo"), array(data, "race_adj")]
    x += [age == 2, age == 3, age == 4]
    x += [array(data, "educ1"), array(data, "gender"), array(data, "income")]
    return regression(name, np.stack(x, axis=1), data["partyid7"], lambda beta, sigma: 0.0)


def mesquite(name: str, data: dict) -> Model:
    logs = ("diam1", "diam2", "canopy_height", "total_height", "density")
    x = [np.ones(data["N"]), *(np.log(array(data, column)) for column in logs)]
    x = np.stack([*x, array(data, "group")], axis=1)
    return regression(name, x, np.log(array(data, "weight")), lambda beta, sigma: 0.0)


def blr(name: str, data: dict) -> Model:
    def prior(beta, sigma):
        return normal(beta, 0, 10.0) + half_normal(sigma, 10.0)

    return regression(name, data["X"], data["y"], prior)


def garch(name: str, data: dict) -> Model:
    y, first = array(data, "y"), float(data["sigma1"])

    def log_density(z):
        a0, a1 = z["alpha0"], z["alpha1"]
        b1 = (1 - a1) * z["share"]
        observed = jnp.asarray(y, a0.dtype)

        def after(variance, before):
            variance = a0 + a1 * (before - z["mu"]) ** 2 + b1 * variance
            return variance, variance

        start = jnp.asarray(first**2, a0.dtype)
        _, later = jax.lax.scan(after, start, observed[:-1])
        variances = jnp.concatenate([start[None], later])
        return normal(observed, z["mu"], jnp.sqrt(variances)) + jnp.log1p(-a1)

    def reported(z):
        kept = {label: z[label] for label in ("mu", "alpha0", "alpha1")}
        return kept | {"beta1": (1 - z["alpha1"]) * z["share"]}

    def point(draws):
        kept = {label: draws[label] for label in ("mu", "alpha0", "alpha1")}
        return kept | {"share": draws["beta1"] / (1 - draws["alpha1"])}

    unit = iblr.interval(0, 1)
    init = {"mu": jnp.zeros(()), "alpha0": jnp.ones(()), "alpha1": jnp.full((), 0.5)}
    init["share"] = jnp.full((), 0.5)
    support = {"alpha0": iblr.positive, "alpha1": unit, "share": unit}
    return Model(name, log_density, init, support, reported, point)


def mixture(name: str, data: dict) -> Model:
    y = array(data, "y")

    def log_density(z):
        observed = jnp.asarray(y, z["mu"].dtype)[:, None]
        log_each = -0.5 * ((observed - z["mu"]) / z["sigma"]) ** 2 - jnp.log(z["sigma"])
        log_share = jnp.stack([jnp.log(z["theta"]), jnp.log1p(-z["theta"])])
        prior = normal(z["mu"], 0, 2.0) + half_normal(z["sigma"], 2.0) + 4 * log_share.sum()
        return jax.nn.logsumexp(log_each + log_share, axis=1).sum() + prior

    init = {"mu": jnp.array([0.0, 1.0]), "sigma": jnp.ones(2), "theta": jnp.full((), 0.5)}
    support = {"mu": iblr.ordered, "sigma": iblr.positive, "theta": iblr.interval(0, 1)}
    return Model(name, log_density, init, support)


def diamonds(name: str, data: dict) -> Model:
    x, y = array(data, "X")[:, 1:], array(data, "Y")
    x = x - x.mean(0)

    def log_density(z):
        fitted = z["Intercept"] + jnp.asarray(x, z["b"].dtype) @ z["b"]
        prior = normal(z["b"], 0, 1.0) + student(z["Intercept"], 3, 8, 10)
        prior = prior + student(z["sigma"], 3, 0, 10)
        return normal(jnp.asarray(y, fitted.dtype), fitted, z["sigma"]) + prior

    init = {"b": jnp.zeros(x.shape[1]), "Intercept": jnp.zeros(()), "sigma": jnp.ones(())}
    return Model(name, log_density, init, {"sigma": iblr.positive})


def process(name: str, data: dict) -> Model:
    x, y = array(data, "x"), array(data, "y")

    def log_density(z):
        rho, alpha, sigma = z["rho"], z["alpha"], z["sigma"]
        squares = jnp.asarray((x[:, None] - x) ** 2, rho.dtype)
        kernel = alpha**2 * jnp.exp(-0.5 * squares / rho**2)
        L = jnp.linalg.cholesky(kernel + sigma * jnp.eye(len(x), dtype=rho.dtype))
        scaled = jax.scipy.linalg.solve_triangular(L, jnp.asarray(y, rho.dtype), lower=True)
        likelihood = -0.5 * scaled @ scaled - jnp.log(jnp.diagonal(L)).sum()
        prior = 24 * jnp.log(rho) - 4 * rho + half_normal(alpha, 2.0) + half_normal(sigma, 1.0)
        return likelihood + prior

    ones = {label: jnp.ones(()) for label in ("rho", "alpha", "sigma")}
    return Model(name, log_density, ones, dict.fromkeys(ones, iblr.positive))


MODELS = {
    "arK-arK": ark,
    "eight_schools-eight_schools_noncentered": schools,
    "kidiq-kidscore_momhsiq": kidiq,
    "nes2000-nes": nes,
    "mesquite-logmesquite": mesquite,
    "sblrc-blr": blr,
    "garch-garch11": garch,
    "low_dim_gauss_mix-low_dim_gauss_mix": mixture,
    "diamonds-diamonds": diamonds,
    "gp_pois_regr-gp_regr": process,
}


def check(model: Model, draws: dict[str, np.ndarray]) -> np.ndarray:
    """Mean gradient of the coordinates over draws, in standard errors."""
    with jax.enable_x64(True):
        rows = model.coordinates(draws)
        gradients = np.asarray(jax.jit(jax.vmap(jax.grad(model.flat)))(rows))
    return gradients.mean(0) / (gradients.std(0) / math.sqrt(len(gradients)))


def path_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        default=os.environ.get(VARIABLE),
        help=f"a posteriordb checkout; without it the environment variable {VARIABLE}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    path_argument(parser)
    path = parser.parse_args().path
    if path is None:
        print(f"posteriordb_models: no --path CHECKOUT and no {VARIABLE}: nothing to check")
        return
    checkout = Checkout(path)
    for name in checkout.names():
        model = checkout.model(name)
        off = check(model, checkout.draws(name))
        print(f"{name:42s} d = {model.dim:2d}   largest mean {np.abs(off).max():.2f} s.e.")


if __name__ == "__main__":
    main()
