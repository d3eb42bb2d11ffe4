"""One step of the rule for a mixture of Gaussians as a NumPy loop over its components.

What a careful user would write from the paper: every component keeps its mean and its precision
S = L L'; draws mu + L^-T eps, densities and scores by triangular solves, the curvature whitened by
L, its eigenvalues bounded by the trust region, S <- L V f(t Lambda) V' L'. The same estimator
(`Stl(pairs)`, the draws of every component for itself) and rule as `iblr.step`.
"""

import numpy as np
from scipy.linalg import solve_triangular

from iblr.reproduce.student_mixture import DF, StudentMixture

LARGEST_GAIN, LARGEST_LOSS = 3.0, 0.5


class NumpyTarget:
    """The gradient of a `StudentMixture`, many points at once."""

    def __init__(self, target: StudentMixture):
        self.modes, self.roots, self.log_peaks = (np.asarray(array) for array in target)

    def gradients(self, rows: np.ndarray) -> np.ndarray:
        """Of the log density."""
        scaled = np.einsum("kni,kij->knj", rows - self.modes[:, None], self.roots, optimize=True)
        squares = (scaled**2).sum(-1)
        exponents = self.log_peaks[:, None] - 0.5 * (DF + rows.shape[1]) * np.log1p(squares / DF)
        shares = np.exp(exponents - exponents.max(0))
        shares /= shares.sum(0)
        pull = -(DF + rows.shape[1]) / (DF + squares) * shares
        return np.einsum("knj,kij->ni", pull[:, :, None] * scaled, self.roots, optimize=True)


def step(means, precisions, weights, target: NumpyTarget, noise, t):
    """New means and precisions, from noise of shape (K, P, d)."""
    K, P, d = noise.shape
    factors = [np.linalg.cholesky(S) for S in precisions]
    rows = np.empty((K, 2, P, d), means.dtype)
    for c in range(K):
        offset = solve_triangular(factors[c].T, noise[c].T, lower=False, check_finite=False).T
        rows[c] = means[c] + np.stack([offset, -offset])
    points = rows.reshape(-1, d)
    whitened = [(points - means[c]) @ factors[c] for c in range(K)]
    logs = np.stack(
        [
            np.log(weights[c]) + np.log(np.diag(factors[c])).sum() - 0.5 * (whitened[c] ** 2).sum(1)
            for c in range(K)
        ]
    )
    shares = np.exp(logs - logs.max(0))
    shares /= shares.sum(0)
    slopes = -target.gradients(points)
    for c in range(K):
        slopes -= (shares[c][:, None] * whitened[c]) @ factors[c].T
    slopes = slopes.reshape(K, 2, P, d)
    after_means, after_precisions = np.empty_like(means), np.empty_like(precisions)
    for c in range(K):
        up, down = slopes[c]
        gradient = (0.5 * (up + down)).mean(0)
        Y = solve_triangular(
            factors[c],
            np.concatenate([0.5 * (up - down), gradient[None]]).T,
            lower=True,
            check_finite=False,
        ).T
        half = -0.5 * noise[c].T @ Y[:-1] / P
        values, V = np.linalg.eigh(half + half.T)
        x = bounded(t * values)
        shift = t * Y[-1]
        shift *= np.sqrt(d) / max(np.linalg.norm(shift), np.sqrt(d))
        after_means[c] = means[c] - solve_triangular(
            factors[c].T, shift, lower=False, check_finite=False
        )
        root = factors[c] @ V
        after_precisions[c] = (root * (1 - x + 0.5 * x**2)) @ root.T
    return after_means, after_precisions


def bounded(x: np.ndarray) -> np.ndarray:
    """The trust region: gains of precision one by one, losses all by one factor."""
    factor = min(1, LARGEST_LOSS / max(x.max(), LARGEST_LOSS))
    return np.where(x < 0, np.maximum(x, -LARGEST_GAIN), factor * x)
