"""Optimisers whose weights have a mean-field Gaussian distribution.

What `IVON`, `VOGN` and `Vadam` share: the weights become a sample for a while, gradients are taken
there, and `step` moves the distribution. The state of a parameter is the mean, the momentum, the
precision s and the number of steps; noise is computed from (seed, step, sample, parameter, entry)
whenever it is needed (`iblr.torch.noise`), so replicas of a network draw the same and shards their
slices.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from iblr.torch import kernels
from iblr.torch.accumulation import Accumulation
from iblr.torch.layout import is_dense, local, master
from iblr.torch.noise import normal
from iblr.torch.paths import Loop, can_compile
from iblr.torch.posterior import MeanField
from iblr.torch.refusals import Refusals
from iblr.torch.rules import Number, Rule, decay
from iblr.torch.saving import MeanSaver
from iblr.torch.slots import Sample, Slot, stream_of

WORTH_COMPILING = 2**17  # entries on the CPU from which the wait for a compiler pays

MANY = 64


class Work(NamedTuple):
    """Parameters whose step is taken together."""

    path: Loop | kernels.Fused
    rule: Rule | None
    slots: list[Slot]


class Leftover(NamedTuple):
    """A gradient, how often it had been written to, and its norm then."""

    grad: Tensor
    version: int
    norm: Tensor


class MeanFieldOptimizer(torch.optim.Optimizer):
    """The common part; use `IVON`, `VOGN` or `Vadam`."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        mc_samples: int,
        prefetch_sample: bool,
        seed: int,
        compiled: bool | None,
        prior_mean: Number | Sequence[Tensor] | None,
        prior_precision: Number | Sequence[Tensor] | None,
    ):
        if not isinstance(mc_samples, int) or mc_samples < 1:
            raise ValueError(f"{self._name}(mc_samples={mc_samples}): give 1 or more samples.")
        self.mc_samples = mc_samples
        self.prefetch_sample = prefetch_sample
        self.compiled = compiled
        self._accumulation = Accumulation()
        self._leftover: list[Leftover] = []
        self._held: Sample | None = None  # what the weights are; None: the mean
        self._inside = False
        self._forget_slots()
        self._refusals = Refusals(self._name)
        self._saver: MeanSaver | None = None
        single_mean = prior_mean if isinstance(prior_mean, int | float) else 0.0
        single_precision = (
            float(prior_precision) if isinstance(prior_precision, int | float) else None
        )
        counters = {"seed": seed, "draws": 0, "predictions": 0, "refused": 0}
        priors = {"prior_mean": float(single_mean), "prior_precision": single_precision}
        super().__init__(params, {**defaults, **priors, **counters})
        self._set_prior("prior_mean", prior_mean)
        self._set_prior("prior_precision", prior_precision)

    # ---- what users call ----

    @contextlib.contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """Within, the weights are a sample; afterwards the mean again, whatever happened.

        Args:
            train: whether gradients taken within go into the next step. All blocks of one step see
                the same sample (`mc_samples` of them in turn), so gradients may be accumulated over
                several blocks or within one.
        """
        if self._inside:
            raise RuntimeError(
                f"{self._name}.sampled_params(): the weights are a sample already; leave the "
                "block before beginning another."
            )
        self._inside = True
        try:
            self._begin(train)
            try:
                yield
                self._check_leftover()
            except BaseException:
                self._accumulation.put_back()
                self._hold(None)
                raise
            self._end(train)
        finally:
            self._inside = False

    @contextlib.contextmanager
    def mean_params(self) -> Iterator[None]:
        """Within, the weights are the mean: only `prefetch_sample=True` makes a difference."""
        self._adopt()
        self._hold(None)
        yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Move the distribution by the gradients taken at its samples.

        Args:
            closure: sets gradients and returns the loss; called at every sample. Not needed after
                blocks of `sampled_params(train=True)`.

        Returns:
            The mean of what the closure returned.
        """
        loss = self._evaluated(closure) if closure is not None else None
        gathered = self._accumulation
        if not gathered.blocks:
            raise RuntimeError(
                f"{self._name}.step(): no gradients were taken at a sample. Put the backward pass "
                "into a block `with optimizer.sampled_params(train=True):`, or pass a closure."
            )
        if gathered.blocks % self.mc_samples:
            raise RuntimeError(
                f"{self._name}.step(): {gathered.blocks} blocks of sampled_params(train=True) "
                f"since the last step; with mc_samples={self.mc_samples} it needs a multiple."
            )
        live = [slot for slot in self._trained() if slot.parameter.grad is not None]
        if any(slot.parameter.grad.is_sparse for slot in live):  # pyright: ignore
            raise RuntimeError(f"{self._name}.step(): sparse gradients are not supported.")
        if gathered.curved:
            for slot in live:
                gathered.settle(slot.parameter)
        self._advance(live)
        self._accumulation = Accumulation()
        return loss

    @torch.no_grad()
    def predict(
        self,
        model: Callable[[Tensor], Tensor],
        x: Tensor,
        *,
        samples: int = 32,
        batch_size: int | None = None,
        link: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Probabilities, averaged over samples of the weights.

        Args:
            model: maps inputs to logits.
            x: inputs; taken to the device of the parameters batch by batch.
            samples: of the weights; 0 for those at the mean.
            batch_size: inputs a time; all where not given.
            link: makes probabilities of what the model returns; a softmax over the last axis where
                not given. `torch.sigmoid` for one logit, the identity for regression.

        Returns:
            One row an input.
        """
        if samples < 0 or (batch_size is not None and batch_size < 1):
            raise ValueError(
                f"{self._name}.predict(samples={samples}, batch_size={batch_size}): give 0 or more "
                "samples and at least one input a batch."
            )
        link = link or (lambda logits: torch.softmax(logits, dim=-1))
        device = self.param_groups[0]["params"][0].device
        batches = x.split(batch_size or max(len(x), 1))
        with _evaluating(model):
            total: list[Tensor] = []
            for _ in range(max(samples, 1)):
                with self.sampled_params() if samples else self.mean_params():
                    found = [link(model(batch.to(device))) for batch in batches]
                total = [a + b for a, b in zip(total, found, strict=True)] if total else found
        return torch.cat(total) / max(samples, 1)

    @torch.no_grad()
    def posterior(self) -> MeanField:
        """The distribution as it is now; later steps do not change what is returned."""
        means, precisions = [], []
        self._adopt()
        for slot in self._ready():
            means.append(slot.state["mean"].clone())
            precisions.append(slot.state["precision"] * slot.group["ess"])
        return MeanField(means, precisions)

    @property
    def weights_are_sample(self) -> bool:
        """Whether the weights are a sample now, and not the mean."""
        return self._held is not None

    @property
    def refused_steps(self) -> int:
        """Steps not taken because a gradient was not finite."""
        return self._refusals.count

    # ---- what torch.optim asks for ----

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what was gathered with them."""
        super().zero_grad(set_to_none)
        self._leftover = []
        if not (self._inside and self._accumulation.blocks % self.mc_samples):
            self._accumulation = Accumulation()  # in a block of a later sample, the earlier stay

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; the seed and the count of draws are those of the others."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for counter in ("seed", "draws", "predictions", "refused"):
            group[counter] = self.param_groups[0][counter]
        self._check(group)
        self._forget_slots()

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer`; holds the seed, the counters and the float32 mean."""
        self._set_counter("refused", self.refused_steps)
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `torch.optim.Optimizer`; the weights become the mean that was saved."""
        super().load_state_dict(dict(state_dict))
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, number in zip(params, saved, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                # PyTorch would round them to the dtype of the weights.
                device = self._step_device(parameter) if name == "step" else parameter.device
                kind = torch.float32 if name == "step" else master(parameter)
                self.state[parameter][name] = value.to(device=device, dtype=kind)
        self._accumulation = Accumulation()
        self._forget_slots()
        self._refusals = Refusals(self._name, self.param_groups[0]["refused"])
        self._write(self._ready(), None)
        self._held = None

    def __getstate__(self) -> dict[str, Any]:
        self._set_counter("refused", self.refused_steps)
        own = ("mc_samples", "prefetch_sample", "compiled", "_held")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_accumulation" not in self.__dict__:
            self._accumulation, self._inside, self._leftover = Accumulation(), False, []
            self._saver = None
            self._forget_slots()
            self._refusals = Refusals(self._name, self.param_groups[0]["refused"])

    # ---- what a subclass says ----

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        raise NotImplementedError

    def _curved(self, slots: Sequence[Slot]) -> Sequence[Tensor | None]:
        """What the rule estimates the curvature by, flat; None: noise times gradient."""
        gathered = self._accumulation.curved
        return [gathered[slot.parameter] for slot in slots] if gathered else [None] * len(slots)

    # ---- the rest ----

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _forget_slots(self) -> None:
        """Whatever follows from the parameters and their state is looked up anew."""
        self._slots: list[Slot] = []
        self._sharded = False
        self._fused = kernels.Fused()
        self._plans: dict[tuple[Any, ...], list[Work]] = {}

    def _ready(self) -> list[Slot]:
        """Every parameter, with its state."""
        if not self._slots:
            number = 0
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._begin_state(group, parameter)
                    state = self.state[parameter]
                    self._slots.append(Slot.of(group, number, parameter, state))
                    number += 1
            self._sharded = any(isinstance(slot.parameter, DTensor) for slot in self._slots)
            kernels.share_steps(self._slots)
        return self._slots

    def _trained(self) -> list[Slot]:
        """Those that are not frozen."""
        return [slot for slot in self._ready() if slot.parameter.requires_grad]

    def _begin_state(self, group: Mapping[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if "mean" in state:
            return
        state["mean"] = parameter.detach().to(master(parameter), copy=True)
        state["momentum"] = torch.zeros_like(state["mean"])
        own = state.get("prior_precision")
        delta = decay(group) if own is None else own / group["ess"]
        state["precision"] = torch.full_like(state["mean"], group["hess_init"]) + delta
        state["step"] = torch.zeros((), device=self._step_device(parameter))

    def _step_device(self, parameter: Tensor) -> torch.device:
        """Counts of steps stand where they are read."""
        return parameter.device if kernels.fits(parameter) else torch.device("cpu")

    def _paths(
        self, slots: Sequence[Slot], rule: Rule | None = None
    ) -> list[tuple[Loop | kernels.Fused, list[Slot]]]:
        """Parameters by how their part of the work is carried out."""
        parts: dict[str, list[Slot]] = {}
        for slot in slots:
            fits = kernels.fits(slot.parameter, rule)
            parts.setdefault("fused" if fits else slot.parameter.device.type, []).append(slot)
        return [(self._path(kind, some), some) for kind, some in parts.items()]

    def _plan(self, slots: Sequence[Slot], *, of_step: bool) -> "list[Work]":
        """The pieces of work for a sample or a step, as they were found the last time."""
        name = (of_step, *map(id, slots))
        if name not in self._plans:
            if len(self._plans) > MANY:  # which parameters have gradients changes all the time
                self._plans, self._fused = {}, kernels.Fused()
            by_rule: dict[Rule | None, list[Slot]] = {}
            for slot in slots:
                by_rule.setdefault(self._rule(slot.group) if of_step else None, []).append(slot)
            self._plans[name] = [
                Work(path, rule, some)
                for rule, same in by_rule.items()
                for path, some in self._paths(same, rule)
            ]
        return self._plans[name]

    def _path(self, kind: str, slots: Sequence[Slot]) -> Loop | kernels.Fused:
        if kind == "fused":
            return self._fused
        return Loop(self._compiles(slots) if kind == "cpu" else bool(self.compiled))

    def _compiles(self, slots: Sequence[Slot]) -> bool:
        if self.compiled is not None:
            return self.compiled
        size = sum(slot.state["mean"].numel() for slot in slots)
        return size >= WORTH_COMPILING and can_compile()

    @torch.no_grad()
    def _begin(self, train: bool) -> None:
        self._adopt()
        group = self.param_groups[0]
        if not train:
            self._hold(Sample(False, group["draws"], group["predictions"]))
            self._set_counter("predictions", group["predictions"] + 1)
            return
        if self.prefetch_sample and self._saver is None:
            self._saver = MeanSaver(self)
        gathered = self._accumulation
        if not gathered.blocks:
            self._leftover = self._gradients()
        self._hold(Sample(True, group["draws"], gathered.blocks % self.mc_samples))
        if self.mc_samples > 1 and gathered.blocks:
            gathered.set_aside(slot.parameter for slot in self._trained())

    def _gradients(self) -> "list[Leftover]":
        """Those that are there before any was taken at a sample."""
        grads = [s.parameter.grad for s in self._trained() if s.parameter.grad is not None]
        found = torch._foreach_norm(grads) if grads else []  # pyright: ignore
        return [Leftover(grad, grad._version, n) for grad, n in zip(grads, found, strict=True)]

    def _check_leftover(self) -> None:
        """Raise if gradients that were there before the first block were added to."""
        there = {id(slot.parameter.grad) for slot in self._trained()} if self._leftover else set()
        leftover, self._leftover = self._leftover, []
        for grad, version, norm in leftover:
            if id(grad) in there and grad._version != version and norm != 0:
                raise RuntimeError(
                    f"{self._name}: there were gradients before the first block of "
                    "sampled_params(train=True), and more were added. Taken at the mean, they say "
                    "nothing of the curvature. Call zero_grad() after every step, and keep all "
                    "backward passes inside blocks."
                )

    @torch.no_grad()
    def _end(self, train: bool) -> None:
        if train:
            if self.mc_samples > 1:
                self._gather()
            self._accumulation.blocks += 1
            if self._saver is not None:
                self._saver.stop()
        if not (train and self.prefetch_sample):
            self._hold(None)

    def _gather(self) -> None:
        assert self._held is not None
        slots = self._trained()
        for slot, begin in zip(slots, stream_of(slots, self._held), strict=True):
            size = local(slot.parameter).numel()
            noise = normal(size, torch.from_numpy(begin).to(slot.parameter.device))
            self._accumulation.add(slot.parameter, noise, self.mc_samples)

    def _hold(self, sample: Sample | None) -> None:
        """Make the weights that sample, or the mean."""
        if sample != self._held:
            self._write(self._trained(), sample)
            self._held = sample

    @torch.no_grad()
    def _write(self, slots: Sequence[Slot], sample: Sample | None) -> None:
        if sample is not None:
            for work in self._plan(slots, of_step=False):
                work.path.draw(work.slots, sample)
        elif slots:
            weights = [slot.parameter for slot in slots]
            means = [slot.state["mean"] for slot in slots]
            if self._sharded:
                weights, means = [local(one) for one in weights], [local(one) for one in means]
            torch._foreach_copy_(weights, means)  # pyright: ignore[reportPrivateImportUsage]
        self._note(slots)

    def _marks(self, slots: Sequence[Slot]) -> list[tuple[int, int]]:
        """What changes whenever PyTorch writes into weights or moves them."""
        weights = [slot.parameter for slot in slots]
        if self._sharded:
            weights = [local(one) for one in weights]
        return [(one._version, one.data_ptr()) for one in weights]

    def _note(self, slots: Sequence[Slot]) -> None:
        for slot, mark in zip(slots, self._marks(slots), strict=True):
            slot.written = mark

    def _adopt(self) -> None:
        """Take over as the mean what was written into the weights from outside."""
        slots = self._trained()
        marks = self._marks(slots)
        changed = [
            slot
            for slot, mark in zip(slots, marks, strict=True)
            if slot.written is not None and slot.written != mark
        ]
        for slot in changed:
            now = local(slot.parameter.detach()).clone()
            self._write([slot], self._held)
            mean, ours = local(slot.state["mean"]), local(slot.parameter.detach())
            mean.copy_(torch.where(now == ours, mean, now.to(mean.dtype)))
        if changed:
            self._write(changed, self._held)

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        if self._accumulation.blocks:
            raise RuntimeError(
                f"{self._name}.step(closure): gradients were taken in blocks of sampled_params() "
                "already. Use either blocks or a closure."
            )
        losses = []
        for _ in range(self.mc_samples):
            with self.sampled_params(train=True), torch.enable_grad():
                losses.append(closure())
        return losses[0] if len(losses) == 1 else sum(losses) / len(losses)

    def _advance(self, live: Sequence[Slot]) -> None:
        draws = self.param_groups[0]["draws"]
        sample = Sample(True, draws, 0)
        following = Sample(True, draws + 1, 0) if self.prefetch_sample else None
        plan = self._plan(live, of_step=True)
        refused = self._refused(live, plan, sample, following)
        if refused is not True:
            for path, rule, some in plan:
                curved = self._curved(some)
                path.advance(rule, some, curved, sample, following, refused)  # pyright: ignore
            self._note(live)
        self._set_counter("draws", draws + 1)
        if self.prefetch_sample:
            trained, done = self._trained(), [] if refused is True else live
            if len(done) < len(trained):
                self._write([slot for slot in trained if slot not in set(done)], following)
        self._held = following

    def _refused(
        self,
        live: Sequence[Slot],
        plan: Sequence[Work],
        sample: Sample,
        following: Sample | None,
    ) -> Tensor | bool:
        """Whether a gradient is not finite: known, or as a number on the GPU that does the step."""
        if not live:
            return False
        meshes: list[Any] = []
        if self._sharded:
            meshes = [s.parameter.device_mesh for s in live if isinstance(s.parameter, DTensor)]
        device = live[0].parameter.device
        if len(plan) == 1 and self._fused.takes_at_once(plan[0].slots, plan[0].path):
            flag = self._fused.any_nonfinite(plan[0].slots, sample, following)
            _share(flag, meshes)
            self._refusals.add_on_device(flag)
            return flag
        wrong = any(_is_nonfinite(local(slot.parameter.grad)) for slot in live)  # pyright: ignore
        if meshes:
            flag = torch.tensor(float(wrong), device=device)
            _share(flag, meshes)
            wrong = bool(flag)
        if wrong:
            self._refusals.add()
        return wrong

    def _set_counter(self, name: str, value: int) -> None:
        for group in self.param_groups:
            group[name] = value

    def _set_prior(self, name: str, value: Number | Sequence[Tensor] | None) -> None:
        if value is None or isinstance(value, int | float):
            return
        places = [parameter for group in self.param_groups for parameter in group["params"]]
        tensors = list(value)
        if len(tensors) != len(places):
            raise ValueError(
                f"{self._name}({name}=...): {len(tensors)} tensors for {len(places)} parameters. "
                "Give one for each, in their order, such as those of posterior()."
            )
        for number, (parameter, tensor) in enumerate(zip(places, tensors, strict=True)):
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"{self._name}({name}=...): tensor {number} has the shape "
                    f"{tuple(tensor.shape)}, its parameter {tuple(parameter.shape)}."
                )
            if name == "prior_precision" and not (tensor > 0).all():
                raise ValueError(f"{self._name}({name}=...): tensor {number} is not positive.")
            kept = torch.empty_like(parameter, dtype=master(parameter), requires_grad=False)
            self.state[parameter][name] = kept.copy_(tensor)

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise for settings and parameters no step could be taken with."""
        positive = {"lr": 0.0, "ess": None, "hess_init": None, "clip_radius": None}
        for name, least in positive.items():
            value = float(group[name])
            if not (value > 0 or value == least) or (math.isinf(value) and name != "clip_radius"):
                raise ValueError(f"{self._name}({name}={value:g}): give a positive number.")
        for name in ("weight_decay", "prior_precision"):
            value = group[name]
            if value is not None and not 0 < value < math.inf:
                raise ValueError(
                    f"{self._name}({name}={value:g}): give a positive number; the prior must be "
                    "proper, or a weight the loss ignores has no distribution."
                )
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{self._name}(betas={betas}): give two numbers in [0, 1).")
        for parameter in group["params"]:
            shape = tuple(parameter.shape)
            if parameter.device.type == "meta":
                raise ValueError(
                    f"{self._name}: a parameter of shape {shape} is on the meta device and has no "
                    "values. Give the network memory (to_empty, then initialise) first."
                )
            if not parameter.is_floating_point():
                raise ValueError(
                    f"{self._name}: a parameter of shape {shape} has the dtype {parameter.dtype}; "
                    "only real floating-point parameters have a Gaussian distribution."
                )
            if not is_dense(parameter):
                raise ValueError(
                    f"{self._name}: a parameter of shape {shape} has gaps in memory (strides "
                    f"{parameter.stride()}). Make it contiguous."
                )


def _is_nonfinite(grad: Tensor) -> bool:
    total = grad.sum(dtype=torch.float32)
    return not bool(total.isfinite()) and not bool(grad.isfinite().all())


def _share(flag: Tensor, meshes: Sequence[Any]) -> None:
    """What one shard found holds for all."""
    for mesh in dict.fromkeys(meshes):
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """In evaluation mode, if it has one; each part as it was afterwards."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
