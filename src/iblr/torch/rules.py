"""One step of a mean-field Gaussian, entry by entry: the improved rule, VOGN and Vadam.

The weights have q = N(mu, 1/(ess s)), one precision for every entry. s = h + delta is what is
stored: delta = weight_decay is the prior's precision over `ess` and always positive, while the
curvature h of the mean loss may be negative. A rule takes the gradient g of the mean loss at
z = mu + eps/sqrt(ess s) and an estimate of its curvature, and returns the next mu, momentum m, s.

The improved rule ([LSK20], figure 1 right, lines 6 and 8) estimates h by hhat = sqrt(ess s) eps g
and takes s <- s (1 + (1 + x)^2)/2, x = (1 - b2)(hhat - h)/s. Written with r = sqrt(s),

    u = r + (1 - b2)(sqrt(ess) eps g + (delta - s)/r),    s <- (s + u^2)/2,

it is the square-root form of the full Gaussian for one entry: at least s/2 whatever the gradient,
and no square in it is larger than the result.

The two variants differ in three things. `icml2020` is figure 1 as printed: the weight decay is in
the momentum, the mean moves with the old s, divided by 1 - b2^k. `ivon` (Shen et al., ICML 2024)
has it outside, moves with the new s, and does not divide.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Number = int | float


class Numbers(NamedTuple):
    """What a step of one parameter takes besides tensors; inside a rule, tensors without axes.

    Attributes:
        root_ess: sqrt(ess).
        per_ess: 1/ess.
        gain1: 1 - b1, of the momentum.
        gain2: 1 - b2, of the precision.
        unbias1: 1/(1 - b1^k).
        bias2: 1 - b2^k.
        decay: delta, where the prior has one precision for all entries.
        centre: the prior's mean, where it is one for all entries.
        rate: a of the learning rate a + b delta.
        rate_decay: b of it.
        radius: largest change of an entry before the learning rate.
    """

    root_ess: Any
    per_ess: Any
    gain1: Any
    gain2: Any
    unbias1: Any
    bias2: Any
    decay: Any
    centre: Any
    rate: Any
    rate_decay: Any
    radius: Any


class Prior(NamedTuple):
    """Mean and delta of the prior: of all entries, or of each."""

    centre: Tensor
    decay: Tensor


class Moved(NamedTuple):
    """Mean, momentum and precision after a step."""

    mean: Tensor
    momentum: Tensor
    precision: Tensor


class Quotient(NamedTuple):
    """A number that has yet to be divided, for rules that divide anyway."""

    numerator: Any
    denominator: Any = 1.0


Rule = Callable[[Tensor, Quotient, Moved, Prior, Numbers], Moved]


def ivon(grad: Tensor, curved: Quotient, old: Moved, prior: Prior, c: Numbers) -> Moved:
    """The improved rule with weight decay outside the momentum, preconditioned by the new s."""
    precision = improved(curved, old.precision, prior, c)
    momentum = old.momentum + c.gain1 * (grad - old.momentum)
    pull = momentum * c.unbias1 + prior.decay * (old.mean - prior.centre)
    return Moved(_moved(old.mean, pull / precision, prior, c), momentum, precision)


def icml2020(grad: Tensor, curved: Quotient, old: Moved, prior: Prior, c: Numbers) -> Moved:
    """[LSK20] figure 1, right: lines 4 to 8."""
    pull = grad + prior.decay * (old.mean - prior.centre)
    momentum = old.momentum + c.gain1 * (pull - old.momentum)
    direction = momentum * (c.unbias1 * c.bias2) / old.precision
    precision = improved(curved, old.precision, prior, c)
    return Moved(_moved(old.mean, direction, prior, c), momentum, precision)


def vogn(grad: Tensor, squares: Quotient, old: Moved, prior: Prior, c: Numbers) -> Moved:
    """[LSK20] figure 1, left: lines 4 to 8; `squares` is the mean of the squared gradients."""
    pull = grad + prior.decay * (old.mean - prior.centre)
    momentum = old.momentum + c.gain1 * (pull - old.momentum)
    precision = old.precision + c.gain2 * (prior.decay - old.precision + squares.numerator)
    direction = momentum * (c.unbias1 * c.bias2) / precision
    return Moved(_moved(old.mean, direction, prior, c), momentum, precision)


def vadam(grad: Tensor, squares: Quotient, old: Moved, prior: Prior, c: Numbers) -> Moved:
    """Khan et al. (2018): the squared mean gradient, and its square root in the mean's step."""
    pull = grad + prior.decay * (old.mean - prior.centre)
    momentum = old.momentum + c.gain1 * (pull - old.momentum)
    precision = old.precision + c.gain2 * (prior.decay - old.precision + squares.numerator)
    second = torch.clamp(precision - prior.decay, min=0.0) / c.bias2
    direction = momentum * c.unbias1 / (torch.sqrt(second) + prior.decay)
    return Moved(_moved(old.mean, direction, prior, c), momentum, precision)


def improved(curved: Quotient, precision: Tensor, prior: Prior, c: Numbers) -> Tensor:
    """s of the improved rule; `curved` is eps g, or its mean over samples."""
    root = torch.sqrt(precision)
    top = c.root_ess * curved.numerator * root + (prior.decay - precision) * curved.denominator
    factor = root + c.gain2 * (top / (curved.denominator * root))
    largest = 1e35  # so that no product above exceeds float32
    return torch.clamp(0.5 * (precision + factor * factor), max=largest)


def _moved(mean: Tensor, direction: Tensor, prior: Prior, c: Numbers) -> Tensor:
    clipped = torch.minimum(torch.maximum(direction, -c.radius), c.radius)
    return mean - (c.rate + c.rate_decay * prior.decay) * clipped


def numbers(group: Mapping[str, Any], step: int) -> Numbers:
    """Of step k = 1, 2, ... of a parameter group."""
    beta1, beta2 = group["betas"]
    lr, rescaled = float(group["lr"]), group["rescale_lr"]
    if not math.isfinite(lr):
        raise ValueError(f"step(): the learning rate is {lr}. Look at what sets it.")
    return Numbers(
        root_ess=math.sqrt(group["ess"]),
        per_ess=1 / group["ess"],
        gain1=1 - beta1,
        gain2=1 - beta2,
        unbias1=1 / bias(beta1, step),
        bias2=bias(beta2, step),
        decay=decay(group),
        centre=group["prior_mean"],
        rate=lr * group["hess_init"] if rescaled else lr,
        rate_decay=lr if rescaled else 0.0,
        radius=group["clip_radius"],
    )


def decay(group: Mapping[str, Any]) -> float:
    """delta of a group whose prior has one precision for all entries."""
    precision = group["prior_precision"]
    return group["weight_decay"] if precision is None else precision / group["ess"]


def bias(beta: float, step: int) -> float:
    """1 - beta^k, without cancellation."""
    return 1.0 if beta == 0 else -math.expm1(step * math.log(beta))
