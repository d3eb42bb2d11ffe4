"""Two small networks as functions of plain arrays, and what they are trained on.

A *material* is everything but the optimiser: how weights begin, what they predict, the examples to
train on and those to validate on. Labels may have axes of their own: every character of a text is
predicted from those before it.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from iblr import datasets

HELD_OUT = 10  # one of so many is held out
SMALL = 1e-5  # added to squares that are divided by


@dataclasses.dataclass(frozen=True, eq=False)
class Material:
    """A network and examples of what it is to learn.

    Attributes:
        init: weights of a key.
        predict: logits of weights and inputs, along the last axis.
        train: inputs and labels, examples along the first axis.
        validation: likewise.
        batch: examples of a minibatch.
        best: what the validation labels' own probabilities would score, where these are known.
    """

    init: Callable[[Key[Array, ""]], Any]
    predict: Callable[[Any, Array], Array]
    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    batch: int
    best: Float[np.ndarray, "n k"] | None = None

    @property
    def steps(self) -> int:
        """Whole minibatches in an epoch."""
        return len(self.train[1]) // self.batch

    def rows(self, trial: bool) -> Int[np.ndarray, " n"]:
        """Of the training set: all, or for a trial those that are not held out."""
        rows = np.arange(len(self.train[1]))
        return rows[rows % HELD_OUT > 0] if trial else rows

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """The tenth of the training set that a trial does not train on, to judge it by."""
        return self.train[0][::HELD_OUT], self.train[1][::HELD_OUT]

    def ess(self, rows: Int[np.ndarray, " n"]) -> float:
        """The number of labels in these rows, by which the mean loss is a log likelihood."""
        return float(len(rows) * self.train[1][0].size)

    def loss(self, weights: Any, example: tuple[Array, Array]) -> Float[Array, ""]:
        """Minus the mean log probability of the labels, of one example or of a batch."""
        x, y = example
        log_p = jax.nn.log_softmax(self.predict(weights, x))
        return -jnp.mean(jnp.take_along_axis(log_p, y[..., None], axis=-1))


# A network with hidden layers.


def mlp_init(key: Key[Array, ""], sizes: tuple[int, ...]) -> list[dict[str, Array]]:
    """Weights with variance 2 over the number of inputs (He et al. 2015), biases of zero."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": _normal(k, (rows, columns), math.sqrt(2 / rows)), "b": jnp.zeros(columns)}
        for k, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def mlp(weights: list[dict[str, Array]], x: Float[Array, "*n d"]) -> Float[Array, "*n k"]:
    """Rectified linear units between the layers."""
    *hidden, last = weights
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def generated(seed: int, rows: int, hidden: int, batch: int) -> Material:
    """Labels drawn from the probabilities of a random network, which are known then."""
    inputs, inner, classes = 32, 64, 10
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(inputs, inner)) * math.sqrt(2 / inputs)
    second = rng.normal(size=(inner, classes)) * math.sqrt(2 / inner)
    x = rng.normal(size=(2 * rows, inputs))
    logits = 2 * np.maximum(x @ first, 0) @ second
    y = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1).astype(np.int32)
    p = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype(np.float32)
    x = x.astype(np.float32)
    init = partial(mlp_init, sizes=(inputs, hidden, hidden, classes))
    return Material(init, mlp, (x[:rows], y[:rows]), (x[rows:], y[rows:]), batch, p[rows:])


def pictures(images: datasets.Images, hidden: int, batch: int) -> Material:
    """Images as rows, with mean zero and variance one over the training set, for each colour."""
    axes = tuple(range(3))
    mean, sd = images.x_train.mean(axes), images.x_train.std(axes)
    x_train, x_test = (
        ((x - mean) / sd).reshape(len(x), -1) for x in (images.x_train, images.x_test)
    )
    init = partial(mlp_init, sizes=(x_train.shape[1], hidden, hidden, len(images.labels)))
    return Material(init, mlp, (x_train, images.y_train), (x_test, images.y_test), batch)


# A character-level transformer.


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a transformer: the text it sees, its width, heads and layers."""

    context: int
    width: int
    heads: int
    layers: int


def transformer_init(key: Key[Array, ""], shape: Shape, characters: int) -> dict[str, Any]:
    """Normal weights with variance one over the number of inputs, less where they add up."""
    layers, width = shape.layers, shape.width
    scale = 1 / math.sqrt(width)
    deep = scale / math.sqrt(2 * layers)
    keys = jax.random.split(key, 7)
    return {
        "characters": _normal(keys[0], (characters, width), scale),
        "places": _normal(keys[1], (shape.context, width), scale),
        "layers": {
            "qkv": _normal(keys[2], (layers, width, 3 * width), scale),
            "out": _normal(keys[3], (layers, width, width), deep),
            "up": _normal(keys[4], (layers, width, 4 * width), scale),
            "down": _normal(keys[5], (layers, 4 * width, width), deep / 2),
        },
        "head": _normal(keys[6], (width, characters), scale),
    }


def transformer(
    shape: Shape, weights: dict[str, Any], text: Int[Array, "*n t"]
) -> Float[Array, "*n t k"]:
    """Logits of the next character at every place; each sees only what comes before it.

    Before every part the stream is divided by its root mean square (no weights of its own).
    """

    def layer(h: Float[Array, "*n t w"], layer: dict[str, Array]) -> tuple[Array, None]:
        h = h + _attention(shape, layer, _normalised(h))
        return h + jax.nn.gelu(_normalised(h) @ layer["up"]) @ layer["down"], None

    h = weights["characters"][text] + weights["places"]
    h, _ = jax.lax.scan(layer, h, weights["layers"])
    return _normalised(h) @ weights["head"]


def _attention(
    shape: Shape, layer: dict[str, Array], h: Float[Array, "*n t w"]
) -> Float[Array, "*n t w"]:
    parts = (h @ layer["qkv"]).reshape(*h.shape[:-1], 3, shape.heads, -1)
    q, k, v = (parts[..., i, :, :] for i in range(3))
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / math.sqrt(q.shape[-1])
    before = jnp.tril(jnp.ones((shape.context, shape.context), bool))
    attention = jax.nn.softmax(jnp.where(before, scores, -jnp.inf))
    return jnp.einsum("...hqk,...khd->...qhd", attention, v).reshape(h.shape) @ layer["out"]


def _normalised(h: Float[Array, "... w"]) -> Float[Array, "... w"]:
    return h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + SMALL)


def manual() -> tuple[str, str]:
    """The texts that `help()` shows, which ship with Python: every tenth is to validate with."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise datasets.MissingDataError(
            "This Python comes without `pydoc_data.topics`, the texts of `help()`. Install the "
            "whole standard library."
        ) from error
    texts = list(dict.fromkeys(topics[name] for name in sorted(topics)))
    parts = [], []
    for index, text in enumerate(texts):
        parts[index % HELD_OUT == 0].append(text)
    return "".join(parts[False]), "".join(parts[True])


def characters(shape: Shape, batch: int, rows: int | None = None) -> Material:
    """Pieces of the manual that do not overlap; `rows` of them at most, a tenth to validate."""
    train, validation = manual()
    alphabet = {c: i for i, c in enumerate(sorted(set(train) | set(validation)))}

    def cut(text: str, rows: int | None) -> tuple[np.ndarray, np.ndarray]:
        codes = np.array([alphabet[c] for c in text], np.int32)
        pieces = (len(codes) - 1) // shape.context
        used = pieces * shape.context
        x, y = (codes[i : i + used].reshape(pieces, shape.context) for i in (0, 1))
        return x[:rows], y[:rows]

    init = partial(transformer_init, shape=shape, characters=len(alphabet))
    few = None if rows is None else rows // HELD_OUT
    parts = cut(train, rows), cut(validation, few)
    return Material(init, partial(transformer, shape), *parts, batch)


def python_version() -> str:
    """Of the manual."""
    return ".".join(map(str, sys.version_info[:3]))


def _normal(key: Key[Array, ""], shape: tuple[int, ...], deviation: float) -> Array:
    return deviation * jax.random.normal(key, shape)
