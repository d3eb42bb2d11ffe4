"""Optimisers whose weights have a mean-field Gaussian distribution.

What `IVON`, `VOGN` and `Vadam` share: the weights become a sample for a while, gradients are taken
there, and `step` moves the distribution. The state of a parameter is the mean, the momentum, the
precision s and the number of steps; noise is computed from (seed, step, sample, parameter, entry)
whenever it is needed (`iblr.torch.noise`), so replicas of a network draw the same and shards their
slices.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from iblr.torch.accumulation import Accumulation
from iblr.torch.kernels import Fused
from iblr.torch.layout import local
from iblr.torch.paths import noise_of
from iblr.torch.posterior import MeanField
from iblr.torch.refusals import Refusals
from iblr.torch.rules import Number, Rule
from iblr.torch.saving import hand_out_means
from iblr.torch.settings import check_group, set_prior
from iblr.torch.slots import Sample, Slot
from iblr.torch.weights import Weights, lay_out_like

OUTSIDE = (
    "there are gradients that were not taken at a sample. They say nothing of the curvature. Call "
    "zero_grad() after every step, and keep all backward passes inside blocks."
)
COUNTERS = ("seed", "draws", "predictions", "refused")


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
        *,
        mc_samples: int,
        prefetch_sample: bool,
        seed: SupportsIndex,
        compiled: bool | None,
        prior_mean: Number | Sequence[Tensor] | None,
        prior_precision: Number | Sequence[Tensor] | None,
        **of_groups: Any,
    ):
        if type(mc_samples) is not int or mc_samples < 1:
            raise ValueError(f"{self._name}(mc_samples={mc_samples}): give 1 or more samples.")
        self.mc_samples = mc_samples
        self.prefetch_sample = prefetch_sample
        self.compiled = compiled
        self._accumulation = self._new_accumulation()
        self._leftover: list[Leftover] = []
        self._inside = False
        self._made: Weights | None = None
        self._refusals = Refusals(self._name)
        self._hands_out_means = False
        single_mean = prior_mean if isinstance(prior_mean, Real) else 0.0
        single_precision = float(prior_precision) if isinstance(prior_precision, Real) else None
        counters = {"seed": _whole(self._name, seed), "draws": 0, "predictions": 0, "refused": 0}
        priors = {"prior_mean": float(single_mean), "prior_precision": single_precision}
        super().__init__(params, {**of_groups, **priors, **counters})
        for name, value in (("prior_mean", prior_mean), ("prior_precision", prior_precision)):
            if value is not None and not isinstance(value, Real):
                set_prior(self._name, name, self.param_groups, self.state, value)  # pyright: ignore

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
            yield
            self._end(train)
        except BaseException:
            self._abandon()
            raise
        finally:
            self._inside = False

    @contextlib.contextmanager
    def mean_params(self) -> Iterator[None]:
        """Within, the weights are the mean: only `prefetch_sample=True` makes a difference."""
        if self._inside:
            raise RuntimeError(
                f"{self._name}.mean_params(): the weights are a sample; leave the block first."
            )
        self._weights.adopt()
        self._weights.hold(None)
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
        if self._inside:
            raise RuntimeError(
                f"{self._name}.step(): leave the block of sampled_params() first; gradients are "
                "taken inside, the step comes after it."
            )
        loss = self._evaluated(closure) if closure is not None else None
        gathered = self._accumulation
        if not gathered.blocks:
            if self._made is None and self._gradients_are_zero():
                _ = self._weights  # distributed checkpoints have the state created by such a step
                return loss
            raise RuntimeError(
                f"{self._name}.step(): no gradients were taken at a sample. Put the backward pass "
                "into a block `with optimizer.sampled_params(train=True):`, or pass a closure."
            )
        if gathered.blocks % self.mc_samples:
            raise RuntimeError(
                f"{self._name}.step(): {gathered.blocks} blocks of sampled_params(train=True) "
                f"since the last step; with mc_samples={self.mc_samples} it needs a multiple."
            )
        live = [slot for slot in self._weights.trained() if slot.parameter.grad is not None]
        if gathered.curved:
            for slot in live:
                gathered.settle(slot.parameter)
        self._advance(live)
        self._accumulation = self._new_accumulation()
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
                    found = [_precise(link(model(batch.to(device)))) for batch in batches]
                total = [a + b for a, b in zip(total, found, strict=True)] if total else found
        return torch.cat(total) / max(samples, 1)

    @torch.no_grad()
    def posterior(self) -> MeanField:
        """The distribution as it is now; later steps do not change what is returned."""
        means, precisions = [], []
        self._weights.adopt()
        for slot in self._weights.slots:
            means.append(slot.state["mean"].clone())
            precision = slot.state["precision"] * slot.group["ess"]
            precisions.append(precision.clamp(max=torch.finfo(precision.dtype).max))
        return MeanField(means, precisions)

    @property
    def weights_are_sample(self) -> bool:
        """Whether any of the weights are a sample now, and not the mean."""
        return self._made is not None and any(slot.held is not None for slot in self._made.slots)

    def mean_where_sampled(self, parameter: Tensor) -> Tensor | None:
        """The mean of a parameter that holds a sample now; None for one that holds the mean."""
        slot = None if self._made is None else self._made.slot_of.get(parameter)
        return None if slot is None or slot.held is None else slot.state["mean"]

    @property
    def refused_steps(self) -> int:
        """Steps not taken because a gradient was not finite."""
        return self._refusals.count

    # ---- what torch.optim asks for ----

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what was gathered; in the block of a later sample, only them."""
        super().zero_grad(set_to_none)
        self._leftover = []
        if not (self._inside and self._accumulation.blocks % self.mc_samples):
            self._accumulation = self._new_accumulation()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; the seed and the count of draws are those of the others."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for counter in COUNTERS:
            group[counter] = self.param_groups[0][counter]
        check_group(self._name, group)
        self._hands_out_means = False
        if self._made is not None:
            self._made.grow()

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
            kept = state_dict["state"].get(number, {})
            if kept:  # PyTorch would round it to the dtype of the weights
                self.state[parameter] = dict(kept)
                lay_out_like(parameter, self.state[parameter])
        self._accumulation, self._made = self._new_accumulation(), None
        self._refusals = Refusals(self._name, self.param_groups[0]["refused"])
        self._weights.write(self._weights.slots, None)

    def __getstate__(self) -> dict[str, Any]:
        self._set_counter("refused", self.refused_steps)
        own = {name: self.__dict__[name] for name in ("mc_samples", "prefetch_sample", "compiled")}
        slots = [] if self._made is None else self._made.slots
        return {**super().__getstate__(), **own, "_held_before": [slot.held for slot in slots]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state.pop("_held_before", None)
        super().__setstate__(state)
        if held is not None:
            self._inside, self._made, self._leftover = False, None, []
            self._accumulation, self._hands_out_means = self._new_accumulation(), False
            self._refusals = Refusals(self._name, self.param_groups[0]["refused"])
            for slot, before in zip(self._weights.slots if held else [], held, strict=True):
                self._weights.note([slot], before)

    # ---- what a subclass says ----

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        raise NotImplementedError

    def _curved(self, slots: Sequence[Slot]) -> Sequence[Tensor | None]:
        """What the rule estimates the curvature by, flat; None: noise times gradient."""
        return self._gathered(slots, OUTSIDE) if self.mc_samples > 1 else [None] * len(slots)

    def _gathered(self, slots: Sequence[Slot], missing: str) -> list[Tensor]:
        """What was gathered in blocks, which must be there of all."""
        gathered = self._accumulation.curved
        if not all(slot.parameter in gathered for slot in slots):
            raise RuntimeError(f"{self._name}.step(): {missing}")
        return [gathered[slot.parameter] for slot in slots]

    def _new_accumulation(self) -> Accumulation:
        return Accumulation()

    # ---- the rest ----

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _weights(self) -> Weights:
        """Every parameter, with its state; made when first needed."""
        if self._made is None:
            self._made = Weights(self.param_groups, self.state, self.compiled, self._rule)
        return self._made

    @torch.no_grad()
    def _begin(self, train: bool) -> None:
        weights, group = self._weights, self.param_groups[0]
        weights.adopt()
        if not train:
            weights.hold(Sample(False, group["draws"], group["predictions"]))
            self._set_counter("predictions", group["predictions"] + 1)
            return
        if self.prefetch_sample and not self._hands_out_means:
            hand_out_means(self)
            self._hands_out_means = True
        gathered = self._accumulation
        if not gathered.blocks:
            self._leftover = self._gradients()
        elif self.mc_samples > 1:
            gathered.set_aside(slot.parameter for slot in weights.trained())
        self._sample = Sample(True, group["draws"], gathered.blocks % self.mc_samples)
        weights.hold(self._sample)

    def _abandon(self) -> None:
        """As before the block, with the mean in the weights."""
        if self._accumulation.blocks:
            self._accumulation.put_back()
        else:
            self._accumulation = self._new_accumulation()
        self._leftover = []
        self._weights.hold(None)

    def _gradients_are_zero(self) -> bool:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        return not any(bool(grad.any()) for grad in every if grad is not None)

    def _gradients(self) -> "list[Leftover]":
        """Those that are there before any was taken at a sample."""
        trained = self._weights.trained()
        grads = [s.parameter.grad for s in trained if s.parameter.grad is not None]
        grads = [grad for grad in grads if grad.layout is torch.strided]
        found = torch._foreach_norm(grads) if grads else []  # pyright: ignore
        return [Leftover(grad, grad._version, n) for grad, n in zip(grads, found, strict=True)]

    def _check_leftover(self) -> None:
        """Raise if gradients that were there before the first block were added to."""
        if not self._leftover:
            return
        there = {id(slot.parameter.grad) for slot in self._weights.trained()}
        leftover, self._leftover = self._leftover, []
        for grad, version, norm in leftover:
            if id(grad) in there and grad._version != version and norm != 0:
                raise RuntimeError(f"{self._name}.sampled_params(): {OUTSIDE}")

    @torch.no_grad()
    def _end(self, train: bool) -> None:
        if train:
            self._check_leftover()
            grads = [slot.parameter.grad for slot in self._weights.trained()]
            if any([one is not None and one.layout is not torch.strided for one in grads]):
                raise RuntimeError(f"{self._name}: sparse gradients are not supported.")
            if self.mc_samples > 1:
                self._gather()
            self._accumulation.blocks += 1
        if not (train and self.prefetch_sample):
            self._weights.hold(None)

    def _gather(self) -> None:
        for slot in self._weights.trained():
            noise = noise_of(slot, self._sample)
            self._accumulation.add(slot.parameter, noise, self.mc_samples)

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        if self._accumulation.blocks:
            raise RuntimeError(
                f"{self._name}.step(closure): gradients were taken in blocks of sampled_params() "
                "already. Use either blocks or a closure."
            )
        losses = []
        try:
            for _ in range(self.mc_samples):
                with self.sampled_params(train=True), torch.enable_grad():
                    losses.append(closure())
        except BaseException:
            self._accumulation = self._new_accumulation()
            raise
        if len(losses) == 1 or any(loss is None for loss in losses):
            return losses[0]
        return sum(losses) / len(losses)

    def _advance(self, live: Sequence[Slot]) -> None:
        draws = self.param_groups[0]["draws"]
        sample = Sample(True, draws, 0)
        following = Sample(True, draws + 1, 0) if self.prefetch_sample else None
        work = self._weights.plan(live, of_step=True)
        curved = [self._curved(one.slots) for one in work]
        at_once = len(work) == 1 and len({slot.parameter.device for slot in live}) == 1
        if at_once and isinstance(work[0].path, Fused):  # the GPU will see
            flag = work[0].path.prepare(work[0].slots, curved[0], sample, following)
            self._share(flag)
            self._refusals.add_on_device(flag)
            refused = False
        else:
            refused = self._is_refused(live)
        if not refused:
            for (path, rule, some), extra in zip(work, curved, strict=True):
                path.advance(rule, some, extra, sample, following)  # pyright: ignore
            self._weights.note(live, following)
        self._set_counter("draws", draws + 1)
        self._weights.hold(following)

    def _is_refused(self, live: Sequence[Slot]) -> bool:
        """Whether a gradient is not finite."""
        wrong = any(_is_nonfinite(local(slot.parameter.grad)) for slot in live)  # pyright: ignore
        if self._weights.sharded:
            device = self._weights.slots[0].parameter.device
            wrong = bool(self._share(torch.tensor(int(wrong), device=device)))
        if wrong:
            self._refusals.add()
        return wrong

    def _share(self, flag: Tensor) -> Tensor:
        """What one shard found holds for all, which ask whether they have gradients or not."""
        every = [slot.parameter for slot in self._weights.slots] if self._weights.sharded else []
        for mesh in dict.fromkeys(one.device_mesh for one in every if isinstance(one, DTensor)):
            for axis in range(mesh.ndim):
                group = mesh.get_group(axis)
                torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        return flag

    def _set_counter(self, name: str, value: int) -> None:
        for group in self.param_groups:
            group[name] = value


def _whole(optimizer: str, seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError as error:
        raise ValueError(f"{optimizer}(seed={seed!r}): give a whole number.") from error


def _precise(values: Tensor) -> Tensor:
    """In float32 at least, to be summed."""
    kind = torch.promote_types(values.dtype, torch.float32)
    return values.to(kind) if values.is_floating_point() else values


def _is_nonfinite(grad: Tensor) -> bool:
    total = grad.sum(dtype=torch.float32)
    return not bool(total.isfinite()) and not bool(grad.isfinite().all())


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
