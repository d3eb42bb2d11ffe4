"""How good predicted probabilities of classes are: hits, log loss, calibration, Brier score.

With p_i the probabilities predicted for row i, y_i its label, c_i = max_k p_ik the confidence and
B bins of equal width over [0, 1],

    accuracy = mean [argmax_k p_ik = y_i]        nll = -mean log p_i,y_i
    brier = mean sum_k (p_ik - [k = y_i])^2      ece = sum_b share_b |accuracy_b - confidence_b|

(Brier 1950; Guo et al. 2017, eq. 3). Libraries that have these, torchmetrics and netcal, need
PyTorch for what is a few lines on arrays that are JAX's already: the tests compare with
torchmetrics where it is installed.

Example:
    >>> import jax.numpy as jnp
    >>> from iblr import calibration
    >>> p, y = jnp.array([[0.9, 0.1], [0.6, 0.4]]), jnp.array([0, 1])
    >>> [round(float(f(p, y)), 3) for f in (calibration.accuracy, calibration.brier)]
    [0.5, 0.37]
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

BINS = 15


class Reliability(NamedTuple):
    """What a reliability diagram shows, a number a bin of the confidence; nan in an empty bin.

    Attributes:
        confidence: the mean confidence of the rows in the bin.
        accuracy: how many of them are right.
        share: how many of all rows they are.
    """

    confidence: Float[Array, " bins"]
    accuracy: Float[Array, " bins"]
    share: Float[Array, " bins"]


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> Float[Array, ""]:
    """The share of rows whose most probable class is their label.

    Args:
        probabilities: of the classes, one row for every label.
        labels: indices of classes.
    """
    p, y = _checked("accuracy", probabilities, labels)
    return jnp.mean(jnp.argmax(p, axis=1) == y, dtype=p.dtype)


def nll(probabilities: ArrayLike, labels: ArrayLike) -> Float[Array, ""]:
    """Minus the mean log probability of the labels, in nats.

    A probability of zero counts as the smallest positive number of its type: in float32 as 87 nats.

    Args:
        probabilities: of the classes, one row for every label.
        labels: indices of classes.
    """
    p, y = _checked("nll", probabilities, labels)
    of_label = jnp.take_along_axis(p, y[:, None], axis=1)
    return -jnp.mean(jnp.log(jnp.maximum(of_label, jnp.finfo(p.dtype).tiny)))


def brier(probabilities: ArrayLike, labels: ArrayLike) -> Float[Array, ""]:
    """The mean squared distance of the probabilities from the label, summed over classes: 0 to 2.

    Args:
        probabilities: of the classes, one row for every label.
        labels: indices of classes.
    """
    p, y = _checked("brier", probabilities, labels)
    of_label = jnp.take_along_axis(p, y[:, None], axis=1)[:, 0]
    return jnp.mean(jnp.sum(p**2, axis=1) - 2 * of_label + 1)


def reliability(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = BINS) -> Reliability:
    """Confidence and accuracy in bins of the confidence, each closed on the right.

    Args:
        probabilities: of the classes, one row for every label.
        labels: indices of classes.
        bins: how many, of equal width.
    """
    p, y = _checked("reliability", probabilities, labels)
    if bins < 1:
        raise ValueError(f"`reliability(bins=...)` must be one or more, but got {bins}.")
    confidence = jnp.max(p, axis=1)
    right = (jnp.argmax(p, axis=1) == y).astype(p.dtype)
    index = jnp.clip(jnp.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    sums = jnp.zeros((bins, 3), p.dtype)
    sums = sums.at[index].add(jnp.stack([confidence, right, jnp.ones_like(right)], axis=1))
    return Reliability(sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2], sums[:, 2] / len(p))


def ece(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = BINS) -> Float[Array, ""]:
    """The expected calibration error: how far confidence and accuracy are apart, over the bins.

    Args:
        probabilities: of the classes, one row for every label.
        labels: indices of classes.
        bins: of the confidence, of equal width.
    """
    found = reliability(probabilities, labels, bins=bins)
    apart = jnp.where(found.share > 0, jnp.abs(found.accuracy - found.confidence), 0)
    return jnp.sum(found.share * apart)


def _checked(
    call: str, probabilities: ArrayLike, labels: ArrayLike
) -> tuple[Float[Array, "n k"], Int[Array, " n"]]:
    p, y = jnp.asarray(probabilities), jnp.asarray(labels)
    if p.ndim != 2 or y.shape != p.shape[:1] or not len(y):
        raise ValueError(
            f"`{call}(probabilities, labels)` needs a row of probabilities for every label, but "
            f"got shapes {p.shape} and {y.shape}."
        )
    if not jnp.issubdtype(y.dtype, jnp.integer) or not jnp.issubdtype(p.dtype, jnp.floating):
        raise ValueError(
            f"`{call}(probabilities, labels)` needs floating-point probabilities and integers as "
            f"labels, but got {p.dtype} and {y.dtype}."
        )
    return p, y
