"""The targets of GMMVI's suite as log densities of one point, and where their constants come from.

`load` reads what `gmmvi_peer.py` wrote: the tables of the two logistic regressions, and the random
mixtures that GMMVI drew, so that both libraries fit the same density, constants included.

    breast cancer,      w ~ N(0, 10^2 I) with an intercept, y_i ~ Bernoulli(sigmoid(-x_i'w));
    German credit       features scaled to standard deviation 1 but not centred
    STM20, STM300       10 or 20 Student's t components with 2 degrees of freedom
    GMM20               10 Gaussians
    planar robot        10 joint angles of an arm of unit links, N(0, 1) for the first and
                        N(0, 0.2^2) for the others, its tip at the nearest of four goals up to
                        N(0, 0.01^2 I)
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array, Float

LABEL_COLUMNS = {"breast_cancer": 1, "german_credit": -1}


class LogisticRegression(eqx.Module):
    """Features (1 - 2 y) x, and the standard deviation of the prior."""

    signed_features: Float[Array, "n d"]
    prior_scale: Float[Array, ""]

    def __call__(self, w: Float[Array, " d"]) -> Float[Array, ""]:
        """Log likelihood and normalised log prior."""
        return jax.nn.log_sigmoid(self.signed_features @ w).sum() + _normal(w, self.prior_scale)


class GaussianComponents(eqx.Module):
    """A mixture of Gaussians; `inverses` are those of the lower Cholesky factors."""

    log_weights: Float[Array, " K"]
    means: Float[Array, "K d"]
    inverses: Float[Array, "K d d"]

    def __call__(self, z: Float[Array, " d"]) -> Float[Array, ""]:
        """The normalised log density."""
        logs = -0.5 * _squares(self, z) - 0.5 * z.size * jnp.log(2 * jnp.pi)
        return jax.nn.logsumexp(self.log_weights + _log_dets(self) + logs)


class StudentComponents(eqx.Module):
    """A mixture of Student's t distributions; `inverses` as for Gaussians."""

    log_weights: Float[Array, " K"]
    means: Float[Array, "K d"]
    inverses: Float[Array, "K d d"]
    degrees: Float[Array, ""]

    def __call__(self, z: Float[Array, " d"]) -> Float[Array, ""]:
        """The normalised log density."""
        v, power = self.degrees, 0.5 * (self.degrees + z.size)
        constant = gammaln(power) - gammaln(0.5 * v) - 0.5 * z.size * jnp.log(v * jnp.pi)
        logs = constant - power * jnp.log1p(_squares(self, z) / v)
        return jax.nn.logsumexp(self.log_weights + _log_dets(self) + logs)


class PlanarRobot(eqx.Module):
    """An arm in the plane: where its tip may be, and how precisely."""

    goals: Float[Array, "goals 2"]
    goal_scale: Float[Array, ""]
    prior_scale: Float[Array, " d"]

    def __call__(self, angles: Float[Array, " d"]) -> Float[Array, ""]:
        """Log prior of the angles and log density of the tip about the nearest goal."""
        directions = jnp.cumsum(angles)
        tip = jnp.stack([jnp.cos(directions).sum(), jnp.sin(directions).sum()])
        nearest = jax.vmap(lambda goal: _normal(tip - goal, self.goal_scale))(self.goals).max()
        return nearest + _normal(angles, self.prior_scale)


def load(name: str, kept: dict[str, np.ndarray]):
    """The target of that name from the arrays `target_*` of a file of `gmmvi_peer.py`."""
    if name in LABEL_COLUMNS:
        return logistic_regression(name, kept["target_table"], kept["target_prior_scale"])
    if name == "planar_robot_4":
        fields = ("goals", "goal_scale", "prior_scale")
        return PlanarRobot(*(jnp.asarray(kept[f"target_{field}"], float) for field in fields))
    return components(
        kept["target_weights"],
        kept["target_means"],
        kept["target_roots"],
        kept.get("target_degrees"),
    )


def logistic_regression(name: str, table: np.ndarray, prior_scale: float) -> LogisticRegression:
    """From a table: an identifier first for breast cancer; labels 0, 1, for German credit 1, 2."""
    column = LABEL_COLUMNS[name]
    labels = table[:, column] - table[:, column].min()
    features = table[:, 2:] if name == "breast_cancer" else table[:, :-1]
    features = np.column_stack([np.ones(len(table)), features / features.std(0)])
    signed = (1 - 2 * labels)[:, None] * features
    return LogisticRegression(jnp.asarray(signed, float), jnp.asarray(prior_scale, float))


def components(weights, means, roots, degrees=None) -> GaussianComponents | StudentComponents:
    """The mixture with these lower Cholesky factors of its covariances, or of its scales."""
    inverses = np.linalg.inv(np.asarray(roots, np.float64))
    arrays = [jnp.asarray(x, float) for x in (np.log(weights), means, inverses)]
    if degrees is None:
        return GaussianComponents(*arrays)
    return StudentComponents(*arrays, jnp.asarray(degrees, float))


def _normal(z: Float[Array, " d"], scale: Float[Array, "..."]) -> Float[Array, ""]:
    """log N(z | 0, scale^2)."""
    logs = -0.5 * (z / scale) ** 2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi)
    return logs.sum()


def _squares(mixture, z: Float[Array, " d"]) -> Float[Array, " K"]:
    """|L^-1 (z - mu)|^2 of every component."""
    return (jnp.einsum("kij,kj->ki", mixture.inverses, z - mixture.means) ** 2).sum(1)


def _log_dets(mixture) -> Float[Array, " K"]:
    """log|L^-1| of every component."""
    return jnp.log(jnp.abs(jnp.diagonal(mixture.inverses, axis1=1, axis2=2))).sum(1)
