"""Gradients of several samples on the way to one step.

A step with S samples needs the means of g_j and of eps_j g_j. The first is kept where every
gradient is, in `grad`, so that norms and clipping see what they see with any optimiser. The second
is kept here. Whoever scales `grad` between the last sample and the step (a clipped norm, a gradient
scaler) scales the second as well: the factor is read off two norms. A change that is not a factor
cannot be carried over and raises.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from iblr.torch.layout import flat_like, local


class Accumulation:
    """What was gathered since the last step.

    Args:
        power: with which power of a factor of the gradients `curved` goes.

    Attributes:
        blocks: samples whose gradients were taken.
        curved: the mean of eps_j g_j by parameter, flat.
    """

    def __init__(self, power: int = 1):
        self.power = power
        self.blocks = 0
        self.curved: dict[Tensor, Tensor] = {}
        self._aside: dict[Tensor, Tensor] = {}
        self._left: dict[Tensor, _Left] = {}

    def set_aside(self, parameters: Iterable[Tensor]) -> None:
        """Make room for the gradients of another sample."""
        for parameter in parameters:
            self.settle(parameter)
            if parameter.grad is not None:
                # A copy: the tensor may be a view of a bucket that the next gradients overwrite.
                self._aside[parameter] = parameter.grad.clone()
                parameter.grad = None

    def put_back(self) -> None:
        """As if no sample had been begun."""
        for parameter, grad in self._aside.items():
            parameter.grad = grad
        self._aside = {}

    def add(self, parameter: Tensor, noise: Tensor, samples: int) -> None:
        """Take in the gradient of one of so many samples, and its noise, flat."""
        grad, before = parameter.grad, self._aside.pop(parameter, None)
        if grad is None:
            parameter.grad = before
            return
        grad.div_(samples)
        curved = noise * flat_like(grad, parameter)
        if parameter in self.curved:
            curved += self.curved[parameter]
        self.curved[parameter] = curved
        if before is not None:
            grad.add_(before)
        self.leave(parameter)

    def leave(self, parameter: Tensor) -> None:
        """Note the gradient as it is."""
        assert parameter.grad is not None
        self._left[parameter] = _Left.of(parameter.grad)

    def settle(self, parameter: Tensor) -> None:
        """Follow what was done to the gradient since it was left."""
        left, grad = self._left.pop(parameter, None), parameter.grad
        if left is None:
            return
        if grad is None:
            del self.curved[parameter]
            return
        factor = left.factor(grad)
        if factor == 0:  # and what it would be multiplied with may not be finite
            self.curved[parameter].zero_()
        elif factor != 1:
            self.curved[parameter] *= factor**self.power


class _Left(NamedTuple):
    norm: float
    largest: float

    @classmethod
    def of(cls, grad: Tensor) -> "_Left":
        return cls(*_norms(grad))

    def factor(self, grad: Tensor) -> float:
        norm, largest = _norms(grad)
        if norm == self.norm:
            return 1.0
        if norm == 0:
            return 0.0
        factor = norm / self.norm if self.norm else math.inf
        if factor == math.inf or abs(largest / self.largest - factor) > 1e-2 * factor:
            raise RuntimeError(
                "IVON.step(): gradients were changed, and not by one factor, after the blocks of "
                "sampled_params(train=True). With mc_samples > 1 this cannot be carried over to "
                "the curvature. Clip inside the block, or by norm, or use mc_samples=1."
            )
        return factor


def _norms(grad: Tensor) -> tuple[float, float]:
    """Of all shards; where an axis of the mesh has copies, the first is a multiple of the norm."""
    here = local(grad.detach()).flatten()
    kind = torch.promote_types(here.dtype, torch.float32)
    square = torch.linalg.vector_norm(here, dtype=kind).double().square()
    largest = here.abs().amax().double() if here.numel() else torch.zeros_like(square)
    if isinstance(grad, DTensor):
        for axis in range(grad.device_mesh.ndim):
            group = grad.device_mesh.get_group(axis)
            torch.distributed.all_reduce(square, torch.distributed.ReduceOp.SUM, group=group)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    return math.sqrt(float(square)), float(largest)
