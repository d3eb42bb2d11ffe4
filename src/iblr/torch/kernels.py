"""One launch for all parameters of a GPU: the host's side of `iblr.torch.triton_kernels`.

A table with a row a parameter goes to the device before every launch. What does not change from
step to step (the addresses of the state, sizes, the pieces of work) is kept between steps.
"""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from iblr.torch.layout import flat_like, local
from iblr.torch.noise import streams
from iblr.torch.rules import Numbers, Rule, icml2020, ivon, numbers
from iblr.torch.slots import STATE, Sample, Slot

CHUNK, BLOCK, WARPS = 4096, 512, 4
ASYNCHRONOUS = 2**16  # bytes up to which CUDA copies from any memory without waiting
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(parameter: Tensor, rule: Rule | None = None) -> bool:
    """Whether the kernels can take a step of it."""
    return (
        parameter.is_cuda
        and rule in (None, ivon, icml2020)
        and parameter.dtype in _DTYPES
        and _has_triton()
    )


class Fused:
    """All parameters of a device and dtype by one kernel."""

    def __init__(self):
        self._batches: dict[int, tuple[Sequence[Slot], list[_Batch]]] = {}

    def draw(self, slots: Sequence[Slot], sample: Sample) -> None:
        """Samples into the weights."""
        for batch in self._batched(slots):
            batch.fill(sample)
            batch.launch("draw", WEIGHTS=_triton_dtype(batch.dtype))
            batch.note_written()

    def prepare(
        self,
        slots: Sequence[Slot],
        curved: Sequence[Tensor | None],
        sample: Sample,
        following: Sample | None,
    ) -> Tensor:
        """All of a step but the step; a number on the device: not 0 if it is to be refused."""
        curved_of = dict(zip(slots, curved, strict=True)) if curved[0] is not None else {}
        batches = self._batched(slots)
        for batch in batches:
            batch.fill_grads()
            batch.fill_curved(curved_of)
            batch.fill(sample, following)
        for batch in batches:
            refused = self._refused(batches, batch.device)
            batch.launch("look", refused, GRAD=_triton_dtype(batch.grads[0].dtype))
        return batches[0].refused

    def advance(
        self,
        rule: Rule,
        slots: Sequence[Slot],
        curved: Sequence[Tensor | None],
        sample: Sample,
        following: Sample | None,
    ) -> None:
        """A step of every parameter, and the mean or the following sample into the weights."""
        batches = self._batched(slots)
        if not batches[0].grads:
            self.prepare(slots, curved, sample, following)
        for batch in batches:
            batch.launch(
                "advance",
                self._refused(batches, batch.device),
                WEIGHTS=_triton_dtype(batch.dtype),
                GRAD=_triton_dtype(batch.grads[0].dtype),
                ICML2020=rule is icml2020,
                HAS_CURVED=batch.has_curved,
                HAS_PRIOR_MEAN="prior_mean" in batch.slots[0].state,
                HAS_PRIOR_PRECISION="prior_precision" in batch.slots[0].state,
                PREFETCH=following is not None,
            )
            batch.grads = []
            batch.note_written()

    def _refused(self, batches: "Sequence[_Batch]", device: torch.device) -> Tensor:
        """One number for all parameters of a device."""
        return next(batch.refused for batch in batches if batch.device == device)

    def _batched(self, slots: Sequence[Slot]) -> "list[_Batch]":
        """Parameters that one launch can take; found anew for a list not seen before."""
        known = self._batches.get(id(slots))
        if known is None or known[0] is not slots:
            kinds: dict[tuple[Any, ...], list[Slot]] = {}
            for slot in slots:
                here = local(slot.parameter)
                grad = slot.parameter.grad
                kind = (
                    here.device,
                    here.dtype,
                    None if grad is None else grad.dtype,
                    "prior_mean" in slot.state,
                    "prior_precision" in slot.state,
                )
                kinds.setdefault(kind, []).append(slot)
            known = slots, [_Batch(some) for some in kinds.values()]
            self._batches[id(slots)] = known
        return known[1]


class _Batch:
    """Parameters of one device and dtype, and their table."""

    def __init__(self, slots: Sequence[Slot]):
        kernels = _kernels()
        self.slots = slots
        self.column = {name: index for index, name in enumerate(kernels.FIELDS)}
        here = [local(slot.parameter) for slot in slots]
        self.device, self.dtype = here[0].device, here[0].dtype
        # Behind the table stands one number more: whether the step is refused.
        self._flat = np.zeros(len(slots) * len(kernels.FIELDS) + 1, dtype=np.int64)
        self.table = self._flat[:-1].reshape(len(slots), -1)
        self.table[:, self.column["size"]] = [one.numel() for one in here]
        self.table[:, self.column["steps"]] = [slot.state["step"].data_ptr() for slot in slots]
        for name in STATE:
            if name in slots[0].state:
                pointers = [local(slot.state[name]).data_ptr() for slot in slots]
                self.table[:, self.column[name]] = pointers
        pieces = [max(-(-one.numel() // CHUNK), 1) for one in here]
        tensors = np.repeat(np.arange(len(slots)), pieces)
        places = np.concatenate([np.arange(count) for count in pieces])
        chunks = np.stack([tensors, places], axis=1).astype(np.int32)
        self.programs = len(chunks)
        self.chunks = torch.from_numpy(chunks).to(self.device)
        self.numbers = np.array([slot.number for slot in slots])
        self._fill("first", [slot.first for slot in slots])
        self.sharded = any(isinstance(slot.parameter, DTensor) for slot in slots)
        self.strides = [one.stride() for one in here]
        self.grads: list[Tensor] = []
        self.has_curved = False
        groups = {id(slot.group): slot.group for slot in slots}
        place = {name: index for index, name in enumerate(groups)}
        self.groups = list(groups.values())
        self.group_of = [place[id(slot.group)] for slot in slots]
        self._numbers: list[Numbers] = []
        self._latest: tuple[Any, Any] = (None, None)  # the next step's noise is computed once

    def weights(self) -> list[Tensor]:
        every = [slot.parameter for slot in self.slots]
        return [local(one) for one in every] if self.sharded else every

    def fill(self, sample: Sample, following: Sample | None = None) -> None:
        """Whatever changes from step to step but gradients, and the table onto the device."""
        self._fill("weights", [one.data_ptr() for one in self.weights()])
        self._fill_streams("stream", sample)
        if following is not None:
            self._fill_streams("next_stream", following)
        self._fill_numbers()
        self._upload()

    def fill_grads(self) -> None:
        """Gradients, in the order of memory of the weights; kept until the step was taken."""
        grads: list[Any] = [slot.parameter.grad for slot in self.slots]
        if self.sharded:
            grads = [local(grad) for grad in grads]
        self.grads = [
            grad if grad.stride() == strides else flat_like(grad, one)
            for grad, one, strides in zip(grads, self.weights(), self.strides, strict=True)
        ]
        if any([grad.dtype != self.grads[0].dtype for grad in self.grads]):
            self.grads = [grad.float() for grad in self.grads]
        self._fill("grad", [grad.data_ptr() for grad in self.grads])

    def fill_curved(self, curved: Mapping[Slot, Any]) -> None:
        """The mean of eps g over samples, if there were several."""
        self.has_curved = bool(curved)
        if curved:
            self._fill("curved", [curved[slot].data_ptr() for slot in self.slots])

    def launch(self, name: str, *arguments: Tensor, **options: Any) -> None:
        """One of the kernels."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            getattr(_kernels(), name)[(self.programs,)](
                self._on_device,
                self.chunks,
                *arguments,
                ALIGNED=self._aligned,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                num_warps=WARPS,
                **options,
            )

    def note_written(self) -> None:
        """Tell autograd that the parameters changed."""
        torch.autograd.graph.increment_version(self.weights())

    def _fill_streams(self, name: str, sample: Sample) -> None:
        column = self.column[name]
        place = sample.place(self.slots[0].group["seed"])
        if place != self._latest[0]:
            self._latest = place, streams(place, self.numbers).view(np.int64)
        self.table[:, column : column + 2] = self._latest[1]

    def _fill_numbers(self) -> None:
        found = [numbers(group, 1) for group in self.groups]
        if found == self._numbers:
            return
        self._numbers = found
        begin = self.column["root_ess"]
        names = list(self.column)[begin:]
        rows = np.array([[getattr(one, name) for name in names] for one in found])
        self.table[:, begin:] = rows[self.group_of].view(np.int64)

    def _upload(self) -> None:
        self._aligned = not (self.table[:, : self.column["steps"]] % 16).any()
        self._flat[-1] = 0
        table = torch.from_numpy(self._flat)
        if self.device.type == "cuda":
            if self._flat.nbytes > ASYNCHRONOUS:
                table = table.pin_memory()
            table = table.to(self.device, non_blocking=True)
        self._on_device, self.refused = table, table[-1]

    def _fill(self, name: str, values: Sequence[int]) -> None:
        self.table[:, self.column[name]] = values


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernels() -> Any:
    from iblr.torch import triton_kernels

    return triton_kernels


@functools.cache
def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]
