"""What the weights of a network hold: the mean, or a sample.

Every parameter notes what was written into it last. What others write (a loaded checkpoint, say)
is noticed by PyTorch's version counters and becomes the mean; a parameter that was moved, or whose
axes were laid out anew, takes its state along. Writes through `.data`, which PyTorch does not
count, go unnoticed.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from iblr.torch import kernels
from iblr.torch.layout import check_dense, flat, local, master
from iblr.torch.paths import Loop, can_compile, noise_of
from iblr.torch.rules import Rule, decay
from iblr.torch.slots import STATE, Sample, Slot

WORTH_COMPILING = 2**17  # entries on the CPU from which the wait for a compiler pays
MANY = 64
BEING_WRITTEN = Sample(False, -1, -1)


def _ordinary(function: Callable[..., None]) -> Callable[..., None]:
    """Without autograd, and not in `inference_mode`: no step could write to what is made there."""
    return torch.inference_mode(False)(torch.no_grad()(function))


class Work(NamedTuple):
    """Parameters whose samples or steps are computed together."""

    path: Loop | kernels.Fused
    rule: Rule | None
    slots: list[Slot]


class Weights:
    """The parameters of an optimiser.

    Args:
        groups: of the optimiser.
        state: of the optimiser.
        compiled: whether to compile on the CPU; None: if it pays.
        rule: of a group.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state: defaultdict[Tensor, Any],
        compiled: bool | None,
        rule: Callable[[Mapping[str, Any]], Rule],
    ):
        self._groups, self._state, self._compiled, self._rule = groups, state, compiled, rule
        self.slots: list[Slot] = []
        self.slot_of: dict[Tensor, Slot] = {}
        self.grow()

    @_ordinary
    def grow(self) -> None:
        """Take in parameters that were added."""
        every = [(group, parameter) for group in self._groups for parameter in group["params"]]
        for number in range(len(self.slots), len(every)):
            group, parameter = every[number]
            begin_state(group, parameter, self._state[parameter])
            slot = Slot.of(group, number, parameter, self._state[parameter])
            self.slots.append(slot)
            self.slot_of[parameter] = slot
        self.sharded = any(isinstance(slot.parameter, DTensor) for slot in self.slots)
        self._plan_anew()

    def trained(self) -> list[Slot]:
        """Those that are not frozen."""
        return [slot for slot in self.slots if slot.parameter.requires_grad]

    def hold(self, sample: Sample | None) -> None:
        """Make the weights that sample, or the mean; frozen ones are never a sample."""
        stale = [
            slot
            for slot in self.slots
            if slot.held != (sample if slot.parameter.requires_grad else None)
        ]
        self.write([slot for slot in stale if slot.parameter.requires_grad], sample)
        self.write([slot for slot in stale if not slot.parameter.requires_grad], None)

    @_ordinary
    def write(self, slots: Sequence[Slot], sample: Sample | None) -> None:
        """A sample, or the mean, into some of the weights."""
        if not slots:
            return
        for slot in slots:
            slot.held = BEING_WRITTEN
        if sample is not None:
            for work in self.plan(slots, of_step=False):
                work.path.draw(work.slots, sample)
        else:
            weights = self._local([slot.parameter for slot in slots])
            means = self._local([slot.state["mean"] for slot in slots])
            torch._foreach_copy_(weights, means)  # pyright: ignore[reportPrivateImportUsage]
        self.note(slots, sample)

    def note(self, slots: Sequence[Slot], sample: Sample | None) -> None:
        """That this is what they hold."""
        for slot, mark in zip(slots, self._marks(slots), strict=True):
            slot.held, slot.written = sample, mark

    @_ordinary
    def adopt(self) -> None:
        """Take over as the mean what was written into the weights from outside."""
        marks = self._marks(self.slots)
        changed = [
            slot
            for slot, mark in zip(self.slots, marks, strict=True)
            if slot.written != mark and slot.written is not None and slot.held != BEING_WRITTEN
        ]
        if not changed:
            return
        expected = [_expected(slot) for slot in changed]
        for slot in changed:
            if _moved(slot):
                check_dense("IVON", slot.parameter)
                lay_out_like(slot.parameter, slot.state)
        self._plan_anew()
        for slot, (ours, error) in zip(changed, expected, strict=True):
            mean, here = local(slot.state["mean"]), local(slot.parameter.detach())
            now, ours, error = (one.to(mean.device, mean.dtype) for one in (here, ours, error))
            rounding = torch.finfo(here.dtype).eps * ours.abs()
            mean.copy_(torch.where((now - ours).abs() <= error + rounding, mean, now))
            slot.dtype = here.dtype
            self.write([slot], slot.held)

    def plan(self, slots: Sequence[Slot], *, of_step: bool) -> list[Work]:
        """The pieces of work for a sample or a step, as they were found the last time."""
        name = (of_step, *map(id, slots))
        if name not in self._plans:
            if len(self._plans) > MANY:  # which parameters have gradients changes all the time
                self._plan_anew()
            by_rule: dict[Rule | None, list[Slot]] = {}
            for slot in slots:
                by_rule.setdefault(self._rule(slot.group) if of_step else None, []).append(slot)
            self._plans[name] = [
                work for rule, same in by_rule.items() for work in self._work(rule, same)
            ]
        return self._plans[name]

    def compiles(self) -> bool:
        """Whether steps on the CPU are compiled."""
        if self._compiled is not None:
            return self._compiled
        size = sum(slot.state["mean"].numel() for slot in self.slots)
        return size >= WORTH_COMPILING and can_compile()

    def _work(self, rule: Rule | None, slots: Sequence[Slot]) -> list[Work]:
        parts: dict[str, list[Slot]] = {}
        for slot in slots:
            fits = kernels.fits(slot.parameter, rule)
            parts.setdefault("fused" if fits else slot.parameter.device.type, []).append(slot)
        return [Work(self._path(kind), rule, some) for kind, some in parts.items()]

    def _path(self, kind: str) -> Loop | kernels.Fused:
        if kind == "fused":
            return self.fused
        return Loop(self.compiles() if kind == "cpu" else bool(self._compiled))

    def _plan_anew(self) -> None:
        self.fused = kernels.Fused()
        self._plans: dict[tuple[Any, ...], list[Work]] = {}

    def _marks(self, slots: Sequence[Slot]) -> list[tuple[int, int]]:
        """What changes whenever PyTorch writes into weights or moves them."""
        weights = self._local([slot.parameter for slot in slots])
        return [(one._version, one.data_ptr()) for one in weights]

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        return [local(one) for one in tensors] if self.sharded else tensors


def begin_state(group: Mapping[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
    """Mean, momentum, precision and step of a parameter, where they are not there."""
    if "mean" in state:
        return
    state["mean"] = parameter.detach().to(master(parameter), copy=True)
    state["momentum"] = torch.zeros_like(state["mean"])
    own = state.get("prior_precision")
    delta = decay(group) if own is None else own / group["ess"]
    state["precision"] = torch.full_like(state["mean"], group["hess_init"]) + delta
    state["step"] = torch.zeros((), device=step_device(parameter))


def step_device(parameter: Tensor) -> torch.device:
    """Counts of steps stand where they are read."""
    return parameter.device if kernels.fits(parameter) else torch.device("cpu")


def lay_out_like(parameter: Tensor, state: dict[str, Any]) -> None:
    """Put a parameter's state where the parameter is, with its axes in memory as they are there."""
    for name in STATE:
        if name in state:
            fresh = torch.empty_like(parameter, dtype=master(parameter), requires_grad=False)
            state[name] = fresh.copy_(state[name])
    state["step"] = state["step"].to(step_device(parameter), torch.float32, copy=True)


def _expected(slot: Slot) -> tuple[Tensor, Tensor]:
    """What was written into a parameter last, and how far it may be off by rounding alone.

    From the state as it was then: since, the parameter may have been moved or laid out anew.
    """
    mean = local(slot.state["mean"])
    ours, error = mean, torch.zeros_like(mean)
    if slot.held is not None:
        noise = torch.empty_like(mean)
        flat(noise).copy_(noise_of(slot, slot.held))
        scale = torch.rsqrt(slot.group["ess"] * local(slot.state["precision"]))
        # Noise itself is within some 1e-6 on another path.
        ours, error = mean + scale * noise, 1e-5 * scale * (1 + noise.abs())
    return ours, error + 2 * torch.finfo(slot.dtype).eps * (mean.abs() + ours.abs())


def _moved(slot: Slot) -> bool:
    here, mean = local(slot.parameter), local(slot.state["mean"])
    return (here.stride(), here.device, master(here)) != (mean.stride(), mean.device, mean.dtype)
