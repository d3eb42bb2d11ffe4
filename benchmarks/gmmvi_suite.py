"""Mixtures beside GMMVI (Arenz et al. 2023) on its own suite, at its own number of gradients.

    python benchmarks/mixtures.py --only gmmvi --gmmvi-python /path/to/python [--seconds 60]

The other Python has `gmmvi` installed; `peers/gmmvi_peer.py` says how. One target after another,
GMMVI runs there with its own settings until the time is up (`LONGER` gives the slow ones more of
it); then `iblr.fit` takes as many gradients of the same density, every one of its own counted, with
three keys, of which the lowest ELBO counts. ELBOs of both come from the same estimator: 10^4 fresh
draws of the mixture in double precision, and the target in single. With `--keep DIR` the files of
GMMVI's runs stay there, and those that are there already are used again.

Our start is GMMVI's own (standard deviations of the means and of the components) but where
`SETTINGS` says otherwise; the number of components is ours, all else the defaults of `iblr.fit`.
GMMVI chooses its number of components itself.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import gmmvi_targets
import jax
import jax.numpy as jnp
import numpy as np

import iblr

PEER = Path(__file__).parent / "peers" / "gmmvi_peer.py"
ELBO_DRAWS = 10_000
TOLERANCE = 0.1
KEYS = 3
SUITE = ("breast_cancer", "german_credit", "stm20", "stm300", "gmm20")
NAMES = (*SUITE, "planar_robot_4")
LONGER = {"stm20": 5, "stm300": 10, "planar_robot_4": 5}


class Settings(NamedTuple):
    """Of our side: components, the standard deviations of each and of their means at the start."""

    components: int
    scale: float
    spread: float


SETTINGS = {
    "breast_cancer": Settings(20, 10.0, 10.0),
    "german_credit": Settings(10, 10.0, 10.0),
    "stm20": Settings(100, 300**0.5, 100.0),
    "stm300": Settings(5, 300**0.5, 100.0),
    # Not GMMVI's 31.6 and 31.6: narrow ones all around the modes, which lie in [-50, 50]^20. Chosen
    # on other draws of this target, where one mode was missed (0.11 nats) by 2 fits of 18.
    "gmm20": Settings(60, 5.0, 70.0),
    # GMMVI has standard deviations by coordinate: 0.25 and 0.05; 1 and 0.2 for the means.
    "planar_robot_4": Settings(300, 0.05, 0.3),
}


class Mixture(NamedTuple):
    """Weights (K,), means (K, d) and roots F (K, d, d) of the covariances F F', as float64."""

    weights: np.ndarray
    means: np.ndarray
    roots: np.ndarray

    @staticmethod
    def of(family: iblr.GaussianMixture) -> "Mixture":
        """The roots of iblr are A with A'A the covariance."""
        roots = np.swapaxes(np.asarray(family.components.factor, np.float64), 1, 2)
        weights = np.asarray(family.weights, np.float64)
        return Mixture(
            weights / weights.sum(), np.asarray(family.components.mean, np.float64), roots
        )

    def draw(self, generator: np.random.Generator, num: int) -> np.ndarray:
        """Points of the mixture."""
        which = generator.choice(len(self.weights), size=num, p=self.weights)
        noise = generator.normal(size=(num, self.means.shape[1]))
        points = np.empty_like(noise)
        for c in np.unique(which):
            points[which == c] = self.means[c] + noise[which == c] @ self.roots[c].T
        return points

    def log_prob(self, points: np.ndarray) -> np.ndarray:
        """log q, summed over components as logarithms."""
        total = np.full(len(points), -np.inf)
        for weight, mean, root in zip(*self, strict=True):
            noise = np.linalg.solve(root, (points - mean).T)
            log_normal = -0.5 * (noise**2).sum(0) - 0.5 * len(mean) * np.log(2 * np.pi)
            with np.errstate(divide="ignore"):
                log_joint = np.log(weight) + log_normal - np.linalg.slogdet(root)[1]
            total = np.logaddexp(total, log_joint)
        return total


class Result(NamedTuple):
    """Of one fit: gradients, seconds, those without tracing and compiling, what it reached."""

    gradients: int
    seconds: float
    warm_seconds: float
    elbo: float
    standard_error: float
    components: int

    def __str__(self) -> str:
        return (
            f"{self.gradients:>8} gradients {self.seconds:7.1f} s {self.warm_seconds:7.1f} s "
            f"{self.elbo:>12.4f} +- {self.standard_error:.4f}  K = {self.components}"
        )


class Row(NamedTuple):
    """Of the table."""

    name: str
    dim: int
    theirs: Result
    ours: Result

    @property
    def difference(self) -> float:
        """Ours less theirs."""
        return self.ours.elbo - self.theirs.elbo

    @property
    def passed(self) -> bool:
        """Ours is not lower by more than the tolerance; nan fails."""
        return self.difference >= -TOLERANCE

    def __str__(self) -> str:
        line = f"{self.name:<15}{self.dim:>4}"
        for result in (self.theirs, self.ours):
            line += (
                f"{result.gradients:>9}{result.elbo:>11.3f} +-{result.standard_error:6.3f}"
                f"{result.components:>5}{result.seconds:>8.1f}{result.warm_seconds:>8.1f}"
            )
        return line + f"{self.difference:>+10.3f}  {_verdict(self.passed)}"


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def elbo(log_density, mixture: Mixture) -> tuple[float, float]:
    """The ELBO from fresh draws, and its standard error."""
    points = mixture.draw(np.random.default_rng(0), ELBO_DRAWS)
    terms = log_densities(log_density, points) - mixture.log_prob(points)
    return float(terms.mean()), float(terms.std() / np.sqrt(len(terms) - 1))


def log_densities(log_density, points: np.ndarray) -> np.ndarray:
    """The target at all points."""
    rows = jnp.asarray(points, float)
    return np.asarray(jax.jit(lambda x: jax.lax.map(log_density, x, batch_size=500))(rows))


def run_peer(python: str, name: str, seconds: float, path: Path) -> None:
    """GMMVI in its own process."""
    command = [python, str(PEER), name, "--seconds", str(seconds), "--out", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * seconds + 300)
    if done.returncode:
        raise RuntimeError(f"GMMVI failed on {name}:\n{done.stderr[-2000:]}")


def peer_result(log_density, kept: dict[str, np.ndarray]) -> Result:
    """What GMMVI reached, its ELBO estimated here."""
    names = ("mixture_weights", "mixture_means", "mixture_roots")
    weights, means, roots = (kept[name].astype(np.float64) for name in names)
    value = elbo(log_density, Mixture(weights / weights.sum(), means, roots))
    gradients, seconds, warm = kept["curve"][-1, :3]
    return Result(int(gradients), float(seconds), float(warm), *value, len(weights))


def fit(log_density, dim: int, settings: Settings, gradients: int, seed: int) -> Result:
    """One fit of at most that many gradients."""
    start_key, fit_key = jax.random.split(jax.random.key(seed))
    components, scale, spread = settings
    start = iblr.GaussianMixture.init(start_key, components, dim, scale=scale, spread=spread)
    gradients_a_step = iblr.Stl(pairs=start.defaults.pairs).num_gradients(start)
    steps = gradients // gradients_a_step
    posterior = iblr.fit(log_density, start, key=fit_key, num_steps=steps, throw=False)
    assert posterior.num_gradients <= gradients
    seconds = float(posterior.seconds)
    value = elbo(log_density, Mixture.of(posterior.family))
    return Result(int(posterior.num_gradients), seconds, seconds, *value, components)


def our_result(fits: list[Result]) -> Result:
    """The lowest of the fits; the first is timed with compiling, the others without."""
    lowest = min(fits, key=lambda result: result.elbo)
    warm = float(np.median([result.seconds for result in fits[1:]]))
    return lowest._replace(seconds=fits[0].seconds, warm_seconds=warm)


def disagreement(log_density, kept: dict[str, np.ndarray]) -> float:
    """The largest difference of the two log densities, relative where they are beyond 1."""
    ours, theirs = log_densities(log_density, kept["points"]), kept["log_densities"]
    return float(np.max(np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))))


def compare_one(report, python: str, name: str, seconds: float, folder: Path) -> Row:
    """One target: GMMVI, then ours."""
    path = folder / f"{name}.npz"
    earlier = path.exists()
    if not earlier:
        run_peer(python, name, seconds, path)
    kept = dict(np.load(path))
    log_density, settings = gmmvi_targets.load(name, kept), SETTINGS[name]
    dim = kept["mixture_means"].shape[1]
    report(f"{name}: d = {dim}; {kept['versions']}")
    when = ", from an earlier run" if earlier else ""
    report(f"  {int(kept['iterations'])} iterations of GMMVI, limit {seconds:g} s{when}")
    points = len(kept["points"])
    report(
        f"  log densities of both at {points} points, constants included: largest relative "
        f"difference {disagreement(log_density, kept):.1e}"
    )
    for gradients, *others, number in kept["curve"]:
        report(f"  GMMVI {Result(int(gradients), *others, int(number))}")
    theirs, fits = peer_result(log_density, kept), []
    for seed in range(KEYS):
        fits.append(fit(log_density, dim, settings, theirs.gradients, seed))
        report(f"  iblr  {fits[-1]}  key {seed}")
    report(f"  iblr from {settings}")
    report()
    return Row(name, dim, theirs, our_result(fits))


def compare(
    report,
    python: str,
    limit_seconds: float = 60.0,
    names: tuple[str, ...] = NAMES,
    folder: Path | None = None,
) -> bool:
    """Both libraries on every target, one after the other; a table, and whether our bar holds."""
    report(f"GMMVI's limit: {limit_seconds:g} s of its own time; times {LONGER}; all threads")
    report(f"ELBOs of the table from {ELBO_DRAWS} draws; ours is the lowest of {KEYS} keys")
    report("Two columns of seconds: with tracing and compiling, without (GMMVI: its first step)")
    report()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if folder is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            compare_one(report, python, name, limit_seconds * LONGER.get(name, 1), folder)
            for name in names
        ]
    side = f"{'grads':>9}{'ELBO':>11}{'se':>9}{'K':>5}{'s':>8}{'warm s':>8}"
    report(f"{'':<19}{'GMMVI':>9}{'':<41}{'iblr':>9}")
    report(f"{'target':<15}{'d':>4}{side}{side}{'differ':>10}")
    for row in rows:
        report(str(row))
    counted = [row for row in rows if row.name in SUITE]
    passed = sum(row.passed for row in counted)
    report(f"\nnot lower by more than {TOLERANCE} nats: {passed} of {len(counted)}")
    report(f"all but one of them: {_verdict(passed >= len(counted) - 1)}")
    return passed >= len(counted) - 1
