"""The second-order step of Song, Song & Ermon 2018: all Christoffel symbols at once.

Along a geodesic of N(mu, Sigma) in the whole Fisher metric,

    mu'' = Sigma' S mu'          Sigma'' = Sigma' S Sigma' - mu' mu'^T,          S = Sigma^-1

and it starts with mu' = -Sigma g, Sigma' = Sigma G Sigma. In the coordinates in which S is the
identity (`curvature`) that is mu' = -y with y = A g, and Sigma' = Ghat, so the second-order step is

    mean                  -t (y + (t/2) Ghat y)
    covariance            I + t Ghat + (t^2/2) (Ghat^2 - y y')
    precision             I - t Ghat + (t^2/2) (Ghat^2 + y y')
    standard deviation    1 + (t/2) ghat + (t^2/2) (ghat^2/4 - y^2/2)          diagonal Gaussians

where S'' = 2 S' Sigma S' - S Sigma'' S. The terms in y are those between blocks, which the improved
rule leaves out ([LSK20] appendix A). With them covariance and standard deviation leave the set
where the mean is far away; in the precision they help, and the step stays inside as the improved
rule's does.
"""

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, ArrayLike, Float

from iblr.families.abstract_gaussian import AbstractGaussian, GaussianTangent, all_finite
from iblr.families.base import StepInfo
from iblr.families.curvature import Parameterisation, RootChange
from iblr.families.diagonal import DiagonalGaussian
from iblr.families.gaussian import Gaussian
from iblr.linalg import matmul


def song_step(
    family: Gaussian | DiagonalGaussian,
    tangent: GaussianTangent,
    step_size: ArrayLike,
    *,
    parameterisation: Parameterisation = Parameterisation.covariance,
) -> tuple[AbstractGaussian, StepInfo]:
    """One step of Song et al., on a Gaussian.

    Args:
        family: where to step from.
        tangent: a natural gradient of the negative ELBO there.
        step_size: t.
        parameterisation: the coordinates of the expansion; `standard_deviation` is that of a
            `DiagonalGaussian`.

    Returns:
        The new family, and a `StepInfo`. Where the step leaves the set, the family comes back
        unchanged and `info.status` is `Status.left_set`.

    Example:
        >>> import iblr, jax
        >>> q = iblr.DiagonalGaussian.standard(1)                   # of the target's own width
        >>> far = iblr.Target(lambda z: -0.5 * ((z - 10.0) ** 2).sum())
        >>> tangent = iblr.AtMean()(q, far, jax.random.key(0))
        >>> q, info = iblr.baselines.song_step(q, tangent, 0.3)     # a variance of -3.5
        >>> bool(info.status == iblr.Status.left_set)
        True
    """
    is_diagonal = isinstance(family, DiagonalGaussian)
    if not is_diagonal and not isinstance(family, Gaussian):
        raise ValueError(
            f"`song_step` is a rule of the Gaussians, but got a {family.name}. Use "
            "`iblr.improved_step`."
        )
    if not is_diagonal and parameterisation is Parameterisation.standard_deviation:
        raise ValueError(
            "`song_step(parameterisation=standard_deviation)` is that of a DiagonalGaussian, but "
            "got a Gaussian. Take `covariance` or `precision`."
        )
    t, y = jnp.asarray(step_size, family.dtype), tangent.whitened
    if is_diagonal:
        ghat = tangent.curvature.diagonal()
        change, along = _entries(ghat, y, t, parameterisation), ghat * y
    else:
        Ghat = tangent.curvature.dense().matrix
        change, along = _matrix(Ghat, y, t, parameterisation), matmul(Ghat, y)
    return family.moved_by(change, t * (y + 0.5 * t * along))


def _entries(
    ghat: Float[Array, " d"],
    y: Float[Array, " d"],
    t: Float[Array, ""],
    parameterisation: Parameterisation,
) -> RootChange:
    if parameterisation is Parameterisation.standard_deviation:
        scale = 1 + 0.5 * t * ghat + 0.5 * t**2 * (0.25 * ghat**2 - 0.5 * y**2)
    elif parameterisation is Parameterisation.covariance:
        scale = jnp.sqrt(1 + t * ghat + 0.5 * t**2 * (ghat**2 - y**2))
    else:
        scale = (1 - t * ghat + 0.5 * t**2 * (ghat**2 + y**2)) ** -0.5
    scale = jnp.where(scale > 0, scale, jnp.nan)
    return _change(None, scale, jnp.log(scale).sum(), ghat, y, t)


def _matrix(
    Ghat: Float[Array, "d d"],
    y: Float[Array, " d"],
    t: Float[Array, ""],
    parameterisation: Parameterisation,
) -> RootChange:
    identity = jnp.eye(len(y), dtype=y.dtype)
    square, outer = matmul(Ghat, Ghat), jnp.outer(y, y)
    if parameterisation is Parameterisation.covariance:  # L L' = M, A <- L' A
        L = jnp.linalg.cholesky(identity + t * Ghat + 0.5 * t**2 * (square - outer))
        T = L.T
    else:  # A <- L^-1 A
        L = jnp.linalg.cholesky(identity - t * Ghat + 0.5 * t**2 * (square + outer))
        T = solve_triangular(L, identity, lower=True)
    return _change(identity, T, jnp.log(jnp.diagonal(T)).sum(), Ghat, y, t)


def _change(
    rows: Float[Array, "d d"] | None,
    T: Float[Array, "d *d"],
    log_det: Float[Array, ""],
    Ghat: Float[Array, "d *d"],
    y: Float[Array, " d"],
    t: Float[Array, ""],
) -> RootChange:
    """A <- T A, nan where the step leaves the set."""
    finite, none = all_finite(Ghat, y, t), jnp.zeros((), jnp.int32)
    rest, whole = jnp.zeros((), T.dtype), jnp.ones((), T.dtype)
    return RootChange(rows, T, rest, log_det, finite, none, whole)
