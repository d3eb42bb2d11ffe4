"""A parameter with its state, and which sample of it is meant."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from iblr.torch.layout import first_index, flat, flat_like, local
from iblr.torch.noise import streams

# What is laid out in memory as the parameter is.
STATE = ("mean", "momentum", "precision", "prior_mean", "prior_precision")


class Sample(NamedTuple):
    """One of a training step, or one for predictions made after so many steps."""

    training: bool
    step: int
    number: int

    def place(self, seed: int) -> tuple[int, ...]:
        """What its noise is a function of, besides parameter and entry."""
        return seed, int(self.training), self.step, self.number


@dataclasses.dataclass(eq=False, slots=True)
class Slot:
    """A parameter of an optimiser.

    Attributes:
        group: its group.
        number: its place among all parameters.
        parameter: holds the mean or a sample.
        state: mean, momentum, precision s (q has the precision ess s) and step, in float32, or
            float64 for weights of float64; prior_mean and prior_precision if they differ by entry.
        first: index, in the whole parameter, of what is in this process.
        dtype: of the parameter when it was last written to by us.
        held: the sample that it is; None: the mean.
        written: version and address of the parameter when it was last written to by us.
        views: flat views by name, with what they are views of.
    """

    group: dict[str, Any]
    number: int
    parameter: Tensor
    state: dict[str, Any]
    first: int
    dtype: torch.dtype = torch.float32
    held: Sample | None = None
    written: tuple[int, int] | None = None
    views: dict[str, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)

    def flat(self, name: str) -> Tensor | None:
        """The weights or a tensor of the state as a flat view, kept as long as it is right."""
        tensor = self.parameter if name == "weights" else self.state.get(name)
        if tensor is None:
            return None
        kept = self.views.get(name)
        if kept is None or kept[0] is not tensor or kept[1].data_ptr() != local(tensor).data_ptr():
            kept = self.views[name] = tensor, flat(tensor)
        return kept[1]

    @classmethod
    def of(cls, group: dict[str, Any], number: int, parameter: Tensor, state: Any) -> "Slot":
        """That of a parameter."""
        return cls(group, number, parameter, state, first_index(parameter), parameter.dtype)


class Cell(NamedTuple):
    """A parameter and all that a step of it reads or writes, as flat views of memory."""

    weights: Tensor
    mean: Tensor
    momentum: Tensor
    precision: Tensor
    prior_mean: Tensor | None
    prior_precision: Tensor | None
    grad: Tensor | None
    curved: Tensor | None

    def part(self, entries: slice) -> "Cell":
        """Some of the entries."""
        return Cell(*(None if one is None else one[entries] for one in self))  # pyright: ignore


def cell_of(slot: Slot, curved: Tensor | None = None) -> Cell:
    """The views of a slot."""
    grad = slot.parameter.grad
    gradient = None if grad is None else flat_like(grad, slot.parameter)
    tensors: Any = [*map(slot.flat, ("weights", *STATE)), gradient, curved]
    return Cell(*tensors)


def stream_of(slots: Sequence[Slot], sample: Sample) -> np.ndarray:
    """The streams of their noise."""
    return streams(sample.place(slots[0].group["seed"]), [slot.number for slot in slots])
