"""How a rule is carried out: op by op, or compiled.

Both take parameters as flat views of their memory, and run the same functions: `draw` writes a
sample into the weights, `advance` takes a step. Compiled by `torch.compile`, each is one loop over
memory, with the noise computed in it. Small parameters are put together first.
"""

import functools
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from torch import Tensor
from torch.autograd.graph import increment_version

from iblr.counter_noise import PERIOD
from iblr.torch.layout import local
from iblr.torch.noise import normal, normal_quotient, stream_at
from iblr.torch.rules import Moved, Numbers, Prior, Quotient, Rule, numbers
from iblr.torch.slots import Cell, Sample, Slot, cell_of, stream_of

SMALL = 2**12  # entries below which the work is in the number of parameters, not in their size
FEW = 16  # small parameters for which it does not pay to leave the compiled loop
MOST = 64
KINDS = 256  # of dtypes, priors and the like that may be compiled for; torch gives up after eight
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
    grad = cell.grad.to(mean.dtype)
    if cell.curved is None:
        numerator, denominator = normal_quotient(mean.shape[0], begin)
        curved = Quotient(numerator * grad, denominator)
    else:
        curved = Quotient(cell.curved)
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
    """Parameter after parameter, and small ones together, on any device.

    Args:
        compiled: large parameters each by one loop in machine code; otherwise op by op, in pieces
            that fit into the cache.
    """

    def __init__(self, compiled: bool):
        self.compiled = compiled
        self._few = FEW if compiled else 1

    @dynamo.patch({"recompile_limit": KINDS})
    def draw(self, slots: Sequence[Slot], sample: Sample) -> None:
        """Samples into the weights."""
        for batch in batches(slots, stream_of(slots, sample), few=self._few):
            root_ess = batch.cell.mean.new_tensor(math.sqrt(batch.slots[0].group["ess"]))
            run = _compiled_draw() if self.compiled and batch.is_large else draw
            for part in self._parts(batch):
                one = batch.cell.part(part)
                run(one.weights, one.mean, one.precision, root_ess, batch.begin(0, part))
            batch.write_back("weights")

    @dynamo.patch({"recompile_limit": KINDS})
    def advance(
        self,
        rule: Rule,
        slots: Sequence[Slot],
        curved: Sequence[Tensor | None],
        sample: Sample,
        following: Sample | None,
    ) -> None:
        """A step of every parameter, and the mean or the following sample into the weights."""
        noise = [stream_of(slots, one) for one in (sample, following) if one is not None]
        for batch in batches(slots, *noise, curved=curved, few=self._few):
            steps = batch.slots[0].state["step"]
            constants = batch.cell.mean.new_tensor(numbers(batch.slots[0].group, int(steps) + 1))
            compiled = self.compiled and batch.is_large
            run = _compiled_advance(rule) if compiled else functools.partial(advance, rule)
            for part in self._parts(batch):
                after = None if following is None else batch.begin(1, part)
                run(tuple(batch.cell.part(part)), constants, batch.begin(0, part), after)
            batch.write_back("weights", "mean", "momentum", "precision")
            for slot in batch.slots:
                slot.state["step"] += 1

    def _parts(self, batch: "Batch") -> Iterator[slice]:
        large = self.compiled and batch.is_large
        first = batch.slots[0].first if batch.is_large else 0
        return pieces(first, batch.cell.mean.shape[0], PERIOD if large else CHUNK)


class Batch:
    """A parameter, or several small ones one after the other in tensors of their own.

    Attributes:
        slots: the parameters, all with the same settings and number of steps.
        cell: their entries.
        is_large: whether it is one parameter, worked on where it is.
    """

    def __init__(self, slots: list[Slot], cells: list[Cell], noise: Sequence[Sequence[np.ndarray]]):
        self.slots, self._cells, self._noise = slots, cells, noise
        self.is_large = len(slots) == 1
        self.cell = cells[0] if self.is_large else _together(cells)
        self._sizes = [cell.mean.shape[0] for cell in cells]
        if not self.is_large:
            self._places = [self._joined_places(streams) for streams in noise]

    def begin(self, which: int, part: slice) -> Tensor:
        """Where the noise of some entries begins: the first kind of noise, or the second."""
        if not self.is_large:
            return self._places[which][:, part]
        begun = stream_at(self._noise[which][0], self.slots[0].first + part.start)
        return torch.from_numpy(begun).to(self.cell.mean.device)

    def write_back(self, *names: str) -> None:
        """What was computed into the parameters, and a note of it to autograd."""
        for name in () if self.is_large else names:
            targets = [getattr(cell, name) for cell in self._cells]
            sources = getattr(self.cell, name).split(self._sizes)
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        increment_version([local(slot.parameter) for slot in self.slots])

    def _joined_places(self, streams: Sequence[np.ndarray]) -> Tensor:
        """What the noise of every entry is computed from."""
        begun = [
            stream_at(words, slot.first) for words, slot in zip(streams, self.slots, strict=True)
        ]
        keys, offsets, *added = np.repeat(np.stack(begun), self._sizes, axis=0).T
        index = np.concatenate([np.arange(size, dtype=np.int32) for size in self._sizes])
        joined = np.stack([keys * index + offsets, *added])
        return torch.from_numpy(joined).to(self.cell.mean.device)


def pieces(first: int, size: int, step: int) -> Iterator[slice]:
    """Entries that are worked on together, none with indices on both sides of a whole period."""
    begin = 0
    while begin < size:
        end = min(size, begin + step, begin + PERIOD - (first + begin) % PERIOD)
        yield slice(begin, end)
        begin = end


def noise_of(slot: Slot, sample: Sample) -> Tensor:
    """All the noise of a parameter, in the order of memory."""
    (words,) = stream_of([slot], sample)
    mean = local(slot.state["mean"])
    device, size = mean.device, mean.numel()
    noise = torch.empty(size, device=device)
    for part in pieces(slot.first, size, CHUNK):
        begin = torch.from_numpy(stream_at(words, slot.first + part.start)).to(device)
        noise[part] = normal(part.stop - part.start, begin)
    return noise


def batches(
    slots: Sequence[Slot],
    *noise: np.ndarray,
    curved: Sequence[Tensor | None] | None = None,
    few: int = 1,
) -> Iterator[Batch]:
    """Large parameters each by itself; small ones that are alike together, if there are many."""
    small: dict[Any, list[int]] = {}
    curved = [None] * len(slots) if curved is None else curved
    for index, slot in enumerate(slots):
        here = local(slot.parameter)
        kind: Any = index
        if here.numel() < min(SMALL, PERIOD - slot.first % PERIOD):
            steps, priors = int(slot.state["step"]), len(slot.state)
            kind = (id(slot.group), here.dtype, here.device, steps, priors)
        small.setdefault(kind, []).append(index)
    for alike in small.values():
        most = MOST if len(alike) > few else 1
        for begin in range(0, len(alike), most):
            some = alike[begin : begin + most]
            yield Batch(
                [slots[i] for i in some],
                [cell_of(slots[i], curved[i]) for i in some],
                [[streams[i] for i in some] for streams in noise],
            )


def _together(cells: Sequence[Cell]) -> Cell:
    fields: Any = zip(*cells, strict=True)
    joined: Any = [None if field[0] is None else torch.cat(field) for field in fields]
    return Cell(*joined)


def can_compile() -> bool:
    """Whether `torch.compile` finds a C++ compiler."""
    return any(shutil.which(name) for name in inductor.cpp.cxx if name)


@functools.cache
def _compiled_draw() -> Callable[..., None]:
    return _compiled(draw)


@functools.cache
def _compiled_advance(rule: Rule) -> Callable[..., None]:
    return _compiled(functools.partial(advance, rule))


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """One program for all sizes; a product and a sum may be one instruction."""
    contract = "enable_floating_point_contract_flag"
    options: Any = {f"cpp.{contract}": "fast"} if hasattr(inductor.cpp, contract) else None
    return torch.compile(function, dynamic=True, options=options)
