"""How a rule is carried out: op by op, or compiled.

Both take parameters one by one, as flat views of their memory, and run the same functions:
`draw` writes a sample into the weights, `advance` takes a step. Compiled by `torch.compile`, each
is one loop over memory, with the noise computed in it.
"""

import functools
import math
import shutil
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch.autograd.graph import increment_version

from iblr.torch.layout import local
from iblr.torch.noise import normal, normal_quotient
from iblr.torch.rules import Moved, Numbers, Prior, Rule, numbers
from iblr.torch.slots import Cell, Sample, Slot, cell_of, stream_of

CHUNK = 2**15  # entries that are worked on together op by op: what they need stays in the cache


def draw(weights: Tensor, mean: Tensor, precision: Tensor, root_ess: Tensor, begin: Tensor) -> None:
    """weights <- mu + eps/sqrt(ess s)."""
    numerator, denominator = normal_quotient(mean.shape[0], begin)
    weights.copy_(mean + numerator / (denominator * (root_ess * torch.sqrt(precision))))


def advance(
    rule: Rule,
    tensors: tuple[Tensor | None, ...],
    constants: Tensor,
    begin: Tensor,
    begin_next: Tensor | None,
) -> None:
    """A step of `rule`, and the mean or the next sample into the weights."""
    cell = Cell(*tensors)  # pyright: ignore[reportArgumentType]
    weights, mean, momentum, precision = cell.weights, cell.mean, cell.momentum, cell.precision
    c = Numbers(*constants.unbind())
    assert cell.grad is not None
    grad, curved = cell.grad.to(mean.dtype), cell.curved
    if curved is None:
        curved = normal(mean.shape[0], begin) * grad
    prior = Prior(
        c.centre if cell.prior_mean is None else cell.prior_mean,
        c.decay if cell.prior_precision is None else cell.prior_precision * c.per_ess,
    )
    new = rule(grad, curved, Moved(mean, momentum, precision), prior, c)
    if begin_next is None:
        weights.copy_(new.mean)
    else:
        draw(weights, new.mean, new.precision, c.root_ess, begin_next)
    mean.copy_(new.mean)
    momentum.copy_(new.momentum)
    precision.copy_(new.precision)


class Loop:
    """Parameter after parameter, on any device.

    Args:
        compiled: each by one loop in machine code; otherwise op by op, in pieces that fit into the
            cache.
    """

    def __init__(self, compiled: bool):
        self.compiled = compiled

    def draw(self, slots: Sequence[Slot], sample: Sample) -> None:
        """Samples into the weights."""
        run = _compiled_draw() if self.compiled else draw
        for slot, stream in zip(slots, stream_of(slots, sample), strict=True):
            cell = cell_of(slot)
            root_ess = cell.mean.new_tensor(math.sqrt(slot.group["ess"]))
            for part in self._parts(cell):
                one = cell.part(part)
                run(one.weights, one.mean, one.precision, root_ess, _begin(stream, part, one.mean))
            increment_version(local(slot.parameter))

    def advance(
        self,
        rule: Rule,
        slots: Sequence[Slot],
        curved: Sequence[Tensor | None],
        sample: Sample,
        following: Sample | None,
        refused: Tensor | bool = False,
    ) -> None:
        """A step of every parameter, and the mean or the following sample into the weights."""
        assert not isinstance(refused, Tensor)
        run = _compiled_advance(rule) if self.compiled else functools.partial(advance, rule)
        now = stream_of(slots, sample)
        then = None if following is None else stream_of(slots, following)
        for index, slot in enumerate(slots):
            cell = cell_of(slot, curved[index])
            steps = slot.state["step"]
            constants = cell.mean.new_tensor(numbers(slot.group, int(steps) + 1))
            for part in self._parts(cell):
                begin = _begin(now[index], part, cell.mean)
                after = None if then is None else _begin(then[index], part, cell.mean)
                run(tuple(cell.part(part)), constants, begin, after)
            steps += 1
            increment_version(local(slot.parameter))

    def _parts(self, cell: Cell) -> Iterator[slice]:
        size = cell.mean.shape[0]
        step = size if self.compiled else CHUNK
        return (slice(begin, min(begin + step, size)) for begin in range(0, size, max(step, 1)))


def can_compile() -> bool:
    """Whether `torch.compile` finds a C++ compiler."""
    return any(shutil.which(name) for name in inductor.cpp.cxx if name)


@functools.cache
def _compiled_draw() -> Callable[..., None]:
    return torch.compile(draw, dynamic=True)


@functools.cache
def _compiled_advance(rule: Rule) -> Callable[..., None]:
    return torch.compile(functools.partial(advance, rule), dynamic=True)


def _begin(stream: np.ndarray, part: slice, like: Tensor) -> Tensor:
    skipped = stream + np.array([0, part.start]) * stream[0]
    return torch.from_numpy(skipped).to(like.device)
