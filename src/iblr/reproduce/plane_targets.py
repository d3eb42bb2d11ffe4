"""Densities of the plane for mixtures of Gaussians, with quadrature rules that know their log Z.

| name | density | after |
|---|---|---|
| banana-0.03, banana-0.1 | N(0, diag(100, 1)) bent by z2 - 100 b + b z1^2 | Haario et al. 1999 |
| double-banana | N(0, I) given log(Rosenbrock) = log 30 with noise 0.3 | Detommaso et al. 2018 |
| bnn | N(0, I) given 3 z1^2 (z1^2 - 1) + z2^2 = 1 with noise 0.5 | Au et al. 2020 |
| laplace | two Laplace variables, one added to the other: not smooth | Lin et al. 2020 |
| star | five Gaussians turned by 72 degrees | Lin et al. 2020 |
| beta-binomial | cancer deaths in 20 cities: logit mean, log precision | Tsutakawa et al. 1985 |

The beta-binomial is written around the pooled death rate and the mean size of a city, so that a
start around the origin is one a user would make.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import iblr

DEATHS, PEOPLE = (np.asarray(column, int) for column in iblr.datasets.cancer_mortality()[:2])
CITIES = np.log([DEATHS.sum() / (PEOPLE - DEATHS).sum(), PEOPLE.mean()])
NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)

LARGEST_MASS_OUTSIDE = 1e-4
VIEW_POINTS = 90

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class PlaneTarget:
    """A density of the plane and how to integrate, fit and draw it.

    Attributes:
        name: as on the command line.
        log_density: of one point, not normalised.
        log_z: the logarithm of its integral.
        box: the intervals of the quadrature, in z1 and z2 - bend(z1).
        panels: of 16 Gauss-Legendre nodes, along both.
        bend: a curve the quadrature follows: where a ridge lies, or a kink.
        view: the intervals drawn.
        components: the K to fit.
        scale: of the start, as for `GaussianMixture.init`.
        spread: of the start.
        origin: the point at which z = 0 is drawn.
    """

    name: str
    log_density: Callable[[Any], Any]
    log_z: float
    box: tuple[Interval, Interval]
    panels: tuple[int, int]
    view: tuple[Interval, Interval]
    components: tuple[int, ...] = tuple(range(1, 9))
    scale: float = 1.0
    spread: float = 1.0
    bend: Callable[[Any], Any] = np.zeros_like
    origin: tuple[float, float] = (0.0, 0.0)

    def nodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Points (N, 2) and weights (N,) of the quadrature."""
        (u, wu), (v, wv) = (_panels(*side) for side in zip(self.box, self.panels, strict=True))
        z1 = np.repeat(u, len(v))
        return np.stack([z1, self.bend(z1) + np.tile(v, len(u))], 1), np.outer(wu, wv).ravel()

    @property
    def grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Abscissae, ordinates and all points (N, 2) of a grid over the view."""
        x, y = (np.linspace(*side, VIEW_POINTS) for side in self.view)
        return x, y, np.stack(np.meshgrid(x, y), -1).reshape(-1, 2)

    def evaluate(self, points: np.ndarray) -> np.ndarray:
        """The log density of many points, in double precision."""
        with jax.enable_x64(True):
            return np.asarray(jax.jit(jax.vmap(self.log_density))(jnp.asarray(points)))


class Moments(NamedTuple):
    """A mixture of Gaussians of the plane in double precision."""

    weights: np.ndarray
    means: np.ndarray
    covariances: np.ndarray

    @staticmethod
    def of(mixture: Any) -> "Moments":
        """From the library's."""
        covariances = jax.vmap(lambda q: q.covariance)(mixture.components)
        parts = mixture.weights, mixture.components.mean, covariances
        return Moments(*(np.asarray(part, float) for part in parts))

    def density(self, points: np.ndarray) -> np.ndarray:
        """q at points."""
        q = np.zeros(len(points))
        for weight, mean, covariance in zip(*self, strict=True):
            root = np.linalg.cholesky(covariance)
            noise = np.linalg.solve(root, (points - mean).T)
            q += weight / (2 * np.pi * np.prod(np.diag(root))) * np.exp(-0.5 * (noise**2).sum(0))
        return q


class Quadrature:
    """KL(q || p) by the nodes of a target."""

    def __init__(self, target: PlaneTarget):
        self.points, self.weights = target.nodes()
        self.log_p = target.evaluate(self.points) - target.log_z

    def kl(self, mixture: Moments) -> float:
        """Infinite for a mixture with mass outside of the nodes."""
        if not all(np.isfinite(part).all() for part in mixture):
            return np.inf
        q = mixture.density(self.points)
        if not abs(1 - self.weights @ q) < LARGEST_MASS_OUTSIDE:
            return np.inf
        some = q > 0
        ratio = np.log(q[some]) - self.log_p[some]
        return float((self.weights[some] * q[some]) @ ratio)


def _panels(interval: Interval, count: int) -> tuple[np.ndarray, np.ndarray]:
    edges = np.linspace(*interval, count + 1)
    half = np.diff(edges)[:, None] / 2
    centres = (edges[1:] + edges[:-1])[:, None] / 2
    return (centres + half * NODES).ravel(), (half * WEIGHTS).ravel()


def ridge(b: float) -> Callable[[Any], Any]:
    """Where the banana lies."""
    return lambda z1: 100 * b - b * z1**2


def banana(b: float) -> Callable[[Any], Any]:
    """A Gaussian, bent: log Z = log(20 pi)."""
    return lambda z: -(z[0] ** 2) / 200 - (z[1] - ridge(b)(z[0])) ** 2 / 2


def double_banana(z):
    """An observation of the logarithm of Rosenbrock's function under a Gaussian prior."""
    rosenbrock = (1 - z[0]) ** 2 + 100 * (z[1] - z[0] ** 2) ** 2
    return -(z @ z) / 2 - (np.log(30) - jnp.log(rosenbrock)) ** 2 / (2 * 0.09)


def bnn(z):
    """An observation of a network with two weights under a Gaussian prior; two rings."""
    output = 3 * z[0] ** 2 * (z[0] ** 2 - 1) + z[1] ** 2
    return -(z @ z) / 2 - 2 * (1 - output) ** 2 - np.log(2 * np.pi) - 0.5 * np.log(np.pi / 2)


def laplace(z):
    """z1 and z2 - z1 with the standard Laplace distribution."""
    return -jnp.abs(z[0]) - jnp.abs(z[1] - z[0]) - 2 * np.log(2)


def star(z):
    """Five long Gaussians of equal weight around the origin."""
    angles = 2 * np.pi / 5 * np.arange(5)
    along = np.cos(angles) * z[0] + np.sin(angles) * z[1]
    across = np.cos(angles) * z[1] - np.sin(angles) * z[0]
    exponents = -((along - 1.5) ** 2) / 2 - 50 * across**2
    return jax.nn.logsumexp(exponents) + np.log(10 / (2 * np.pi * 5))


def beta_binomial(z):
    """The posterior of logit m and log M for y_j deaths among n_j, without cancellation.

    With c = 1 / M the likelihood of a city is that of Polya's urn,

        sum_(i < y) log((m + i c) / (1 + (n - y + i) c)) + sum_(i < n - y) f(i),
        f(i) = log(1 - m / (1 + i c)),

    where differences of beta functions would lose all digits of single precision. The second sum
    is the integral of f, smooth in w = log(1 + i c), and two terms of Euler and Maclaurin.
    """
    logit, log_precision = z[0] + CITIES[0], z[1] + CITIES[1]
    m, c = jax.nn.sigmoid(logit), jnp.exp(-log_precision)
    i = np.concatenate([np.arange(y) for y in DEATHS]).astype(float)
    alive = (PEOPLE - DEATHS).astype(float)
    deaths = jnp.log(m + i * c) - jnp.log1p((np.repeat(alive, DEATHS) + i) * c)

    end = jnp.log1p(alive * c)
    w = end[:, None] * (NODES + 1) / 2
    integral = (jnp.exp(w) / c * jnp.log1p(-m * jnp.exp(-w))) @ WEIGHTS * end / 2
    first, last = jax.nn.log_sigmoid(-logit), jnp.log1p(-m * jnp.exp(-end))
    slope = lambda w: c * m / (jnp.exp(w) * (jnp.exp(w) - m))  # noqa: E731
    survivors = integral + (first - last) / 2 + (slope(end) - slope(0.0)) / 12
    return deaths.sum() + survivors.sum() + log_precision - 2 * jax.nn.softplus(log_precision)


def _around(centre: np.ndarray, *intervals: Interval) -> tuple[Interval, Interval]:
    (a, b), (c, d) = intervals
    return (a - centre[0], b - centre[0]), (c - centre[1], d - centre[1])


TARGETS = {
    target.name: target
    for target in (
        PlaneTarget(
            "banana-0.03",
            banana(0.03),
            log_z=np.log(20 * np.pi),
            box=((-70.0, 70.0), (-25.0, 25.0)),
            bend=ridge(0.03),
            panels=(30, 30),
            view=((-25.0, 25.0), (-18.0, 8.0)),
            scale=3.0,
            spread=5.0,
        ),
        PlaneTarget(
            "banana-0.1",
            banana(0.1),
            log_z=np.log(20 * np.pi),
            box=((-70.0, 70.0), (-40.0, 40.0)),
            bend=ridge(0.1),
            panels=(40, 40),
            view=((-25.0, 25.0), (-50.0, 15.0)),
            scale=3.0,
            spread=5.0,
        ),
        PlaneTarget(
            "double-banana",
            double_banana,
            log_z=-0.398282,
            box=((-6.0, 6.0), (-6.0, 6.0)),
            panels=(60, 60),
            view=((-2.0, 2.0), (-1.0, 2.0)),
            components=tuple(range(1, 15)),
        ),
        PlaneTarget(
            "bnn",
            bnn,
            log_z=-1.741530,
            box=((-4.0, 4.0), (-5.0, 5.0)),
            panels=(30, 30),
            view=((-2.0, 2.0), (-2.0, 2.0)),
            components=tuple(range(10, 81, 10)),
            scale=0.3,
        ),
        PlaneTarget(
            "laplace",
            laplace,
            log_z=0.0,
            box=((-40.0, 40.0), (-40.0, 40.0)),
            bend=np.copy,
            panels=(40, 40),
            view=((-3.0, 3.0), (-3.0, 3.0)),
            components=tuple(range(1, 6)),
        ),
        PlaneTarget(
            "star",
            star,
            log_z=0.0,
            box=((-10.0, 10.0), (-10.0, 10.0)),
            panels=(40, 40),
            view=((-4.0, 4.0), (-4.0, 4.0)),
            components=tuple(range(1, 11)),
        ),
        PlaneTarget(
            "beta-binomial",
            beta_binomial,
            log_z=-570.708625,
            box=_around(CITIES, (-10.0, -3.5), (2.0, 20.0)),
            panels=(30, 30),
            view=_around(CITIES, (-7.7, -5.6), (4.5, 14.0)),
            origin=(float(CITIES[0]), float(CITIES[1])),
        ),
    )
}
