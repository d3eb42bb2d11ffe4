"""Metrics of predicted probabilities: known answers, and torchmetrics where it is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from iblr import calibration

P = np.array([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.25, 0.15, 0.6], [0.1, 0.85, 0.05]], np.float32)
Y = np.array([0, 2, 2, 1])


def test_known_answers():
    assert calibration.accuracy(P, Y) == 0.75
    np.testing.assert_allclose(
        calibration.nll(P, Y), -np.log([0.9, 0.3, 0.6, 0.85]).mean(), rtol=1e-6
    )
    squares = [0.01 + 0.01, 0.04 + 0.25 + 0.49, 0.0625 + 0.0225 + 0.16, 0.01 + 0.0225 + 0.0025]
    np.testing.assert_allclose(calibration.brier(P, Y), np.mean(squares), rtol=1e-5)
    # bins (0, 0.5] and (0.5, 1]: one row, wrong at 0.5; three rows, right at 0.9, 0.6 and 0.85
    confidence = np.mean([0.9, 0.6, 0.85])
    found = calibration.reliability(P, Y, bins=2)
    np.testing.assert_allclose(found.confidence, [0.5, confidence], rtol=1e-6)
    np.testing.assert_allclose(found.accuracy, [0.0, 1.0])
    np.testing.assert_allclose(found.share, [0.25, 0.75])
    expected = 0.25 * 0.5 + 0.75 * (1 - confidence)
    np.testing.assert_allclose(calibration.ece(P, Y, bins=2), expected, rtol=1e-6)


def test_an_empty_bin_counts_for_nothing_and_certainty_is_in_the_last():
    p, y = jnp.eye(2)[jnp.array([0, 1, 1, 0])], jnp.array([0, 1, 1, 1])
    found = calibration.reliability(p, y)
    assert found.share[-1] == 1 and np.isnan(np.asarray(found.accuracy)[:-1]).all()
    assert calibration.ece(p, y) == pytest.approx(0.25)
    assert calibration.nll(p, y) == pytest.approx(87.34 / 4, abs=0.01)  # finite


def test_labels_drawn_from_the_probabilities_are_calibrated():
    logits = 2 * jax.random.normal(jax.random.key(0), (50_000, 4))
    y = jax.random.categorical(jax.random.key(1), logits)
    p = jax.nn.softmax(logits)
    assert calibration.ece(p, y) < 0.01
    entropy = -jnp.mean(jnp.sum(p * jnp.log(p), axis=1))
    assert calibration.nll(p, y) == pytest.approx(float(entropy), abs=0.02)
    assert calibration.ece(jax.nn.softmax(3 * logits), y) > 0.1  # too sure of itself


def test_it_runs_under_jit():
    assert jax.jit(calibration.ece)(P, Y) == pytest.approx(float(calibration.ece(P, Y)))


@pytest.mark.parametrize(
    ("p", "y", "words"),
    [
        (P, Y[:2], r"\(4, 3\) and \(2,\)"),
        (P[0], Y, "a row of probabilities"),
        (P[:0], Y[:0], "a row of probabilities"),
        (P, Y.astype(float), "integers"),
        (P > 0.5, Y, "floating-point"),
    ],
)
def test_bad_arguments_are_told(p, y, words):
    for metric in (calibration.accuracy, calibration.nll, calibration.brier, calibration.ece):
        with pytest.raises(ValueError, match=words):
            metric(p, y)


def test_there_must_be_a_bin():
    with pytest.raises(ValueError, match="bins"):
        calibration.ece(P, Y, bins=0)


def test_it_agrees_with_torchmetrics():
    classification = pytest.importorskip("torchmetrics.functional.classification")
    torch = pytest.importorskip("torch")
    logits = 2 * np.random.default_rng(0).normal(size=(3000, 10)).astype(np.float32)
    p = np.array(jax.nn.softmax(logits))
    y = np.random.default_rng(1).integers(0, 10, 3000)
    ours = [calibration.accuracy(p, y), calibration.ece(p, y)]
    tensors, options = (torch.tensor(p), torch.tensor(y)), {"num_classes": 10}
    theirs = [
        classification.multiclass_accuracy(*tensors, average="micro", **options),
        classification.multiclass_calibration_error(*tensors, n_bins=15, **options),
    ]
    np.testing.assert_allclose(ours, [float(value) for value in theirs], atol=1e-5)
