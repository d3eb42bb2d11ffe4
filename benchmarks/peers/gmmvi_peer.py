"""Runs GMMVI on one target of its own suite; for a Python that has it, beside `gmmvi_suite.py`.

    /path/to/that/python benchmarks/peers/gmmvi_peer.py stm20 --seconds 60 --out stm20.npz

It needs no iblr and no JAX. On Python 3.11 this works; `gmmvi` itself goes without its
requirements, of which its fits and these targets need no others:

    pip install "tensorflow-cpu==2.15.1" "tensorflow-probability==0.23.0" "numpy<2" \\
        PyYAML mergedeep matplotlib
    pip install --no-deps "gmmvi==1.1"

The algorithm is SAMTRON, which GMMVI recommends: gradients of the target by Stein's identity, an
adaptive number of components, draws of every component that are used again, trust regions for
components and weights, and step sizes that adapt. All its settings, the start and the seed are
those that the package ships for the experiment.

The clock stops while the ELBO is looked at. What is written: that curve, the last mixture, what
defines the target, and its log density at test points.
"""

import argparse
import os
import time
from importlib import metadata

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from gmmvi.configs import get_default_config
from gmmvi.experiments.setup_experiment import init_experiment
from gmmvi.experiments.target_distributions import logistic_regression
from gmmvi.optimization.gmmvi import GMMVI

TABLES = {"breast_cancer": "breast_cancer.data", "german_credit": "german.data-numeric"}
NAMES = (*TABLES, "stm20", "stm300", "gmm20", "planar_robot_4")
ALGORITHM = "samtron"
ELBO_DRAWS, LOOKS, TEST_POINTS = 2000, 10, 100


def build(name):
    """The algorithm, its target and the standard deviation of its first components' means."""
    config = get_default_config(ALGORITHM, name)
    config["seed"] = config["start_seed"]
    tf.keras.utils.set_random_seed(config["seed"])
    target, model = init_experiment(config)
    algorithm = GMMVI.build_from_config(config, target, model)
    return algorithm, target, config["model_initialization"]["prior_scale"]


def constants(name, target):
    """What defines the target, as arrays."""
    if name in TABLES:
        folder = os.path.join(os.path.dirname(logistic_regression.__file__), "datasets")
        return {
            "table": np.loadtxt(os.path.join(folder, TABLES[name])),
            "prior_scale": target.prior_std.numpy(),
        }
    if name == "planar_robot_4":
        return {
            "goals": target.goals.numpy(),
            "goal_scale": target.goal_Gaussians[0].stddev().numpy()[0],
            "prior_scale": target.prior.stddev().numpy(),
        }
    kept = {
        "weights": target.target_weights.numpy(),
        "means": target.target_means.numpy(),
        "roots": tf.linalg.cholesky(target.target_covs).numpy(),
    }
    return kept if name == "gmm20" else kept | {"degrees": float(target.alpha)}


def look(algorithm, target):
    """The ELBO from fresh draws, its standard error, the number of components."""
    model = algorithm.model
    draws = model.sample(ELBO_DRAWS)[0]
    terms = (target.log_density(draws) - model.log_density(draws)).numpy().astype(float)
    return terms.mean(), terms.std() / np.sqrt(len(terms) - 1), int(model.num_components)


def train(algorithm, target, seconds, gradients):
    """Iterate up to either limit; rows of (gradients, seconds, without the first, look)."""
    rows, spent, first, iteration = [], 0.0, 0.0, 0
    count, next_look = 0, 0.0
    while spent < seconds and count < gradients:
        started = time.perf_counter()
        algorithm.train_iter()
        spent += time.perf_counter() - started
        first = first or spent
        iteration += 1
        count = int(algorithm.sample_db.num_samples_written.numpy())
        if spent >= next_look or spent >= seconds or count >= gradients:
            rows.append((count, spent, spent - first, *look(algorithm, target)))
            next_look = spent + seconds / LOOKS
            told = (
                "{} gradients, {:.1f} s ({:.1f} s after the first), ELBO {:.4f} +- {:.4f}, K = {}"
            )
            print(told.format(*rows[-1]), flush=True)
    return np.array(rows), iteration


def test_points(algorithm, scale):
    """Draws of the mixture and of where it started."""
    draws = algorithm.model.sample(TEST_POINTS)[0].numpy()
    noise = np.random.default_rng(0).normal(size=draws.shape)
    return np.concatenate([draws, noise * scale]).astype(np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the algorithm alone")
    parser.add_argument("--gradients", type=int, default=2**62, help="stop there too")
    parser.add_argument("--out", required=True, help="an .npz file")
    arguments = parser.parse_args()
    algorithm, target, scale = build(arguments.name)
    curve, iterations = train(algorithm, target, arguments.seconds, arguments.gradients)
    points = test_points(algorithm, scale)
    packages = ("gmmvi", "tensorflow-cpu", "tensorflow-probability")
    np.savez(
        arguments.out,
        curve=curve,
        iterations=iterations,
        mixture_weights=algorithm.model.weights.numpy(),
        mixture_means=algorithm.model.means.numpy(),
        mixture_roots=algorithm.model.chol_cov.numpy(),
        points=points,
        log_densities=target.log_density(tf.constant(points)).numpy(),
        start_scale=scale,
        versions=", ".join(f"{name} {metadata.version(name)}" for name in packages),
        **{f"target_{key}": value for key, value in constants(arguments.name, target).items()},
    )


if __name__ == "__main__":
    main()
