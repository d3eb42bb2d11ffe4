"""VOGN and Vadam for networks: what the paper compares with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from iblr.torch.accumulation import Accumulation
from iblr.torch.layout import flat_like
from iblr.torch.mean_field import MeanFieldOptimizer
from iblr.torch.rules import Number, Rule, vadam, vogn
from iblr.torch.slots import Slot


class Vadam(MeanFieldOptimizer):
    """Vadam (Khan et al. 2018): Adam's squared gradient taken for the curvature.

    Arguments are those of `IVON`, but for `variant`, `mc_samples`, `prefetch_sample` and
    `rescale_lr`. The learning rate is Adam's.

    Example:
        >>> import torch
        >>> from iblr.torch import Vadam
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = Vadam(model.parameters(), lr=1e-3, ess=64)
        >>> with optimizer.sampled_params(train=True):
        ...     model(torch.ones(4, 3)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: Number | Tensor,
        ess: Number,
        *,
        hess_init: Number = 1.0,
        betas: tuple[Number, Number] = (0.9, 0.999),
        weight_decay: Number = 1e-4,
        clip_radius: Number = float("inf"),
        prior_mean: Number | Sequence[Tensor] | None = None,
        prior_precision: Number | Sequence[Tensor] | None = None,
        seed: SupportsIndex = 0,
        compiled: bool | None = None,
    ):
        super().__init__(
            params,
            lr=lr,
            ess=ess,
            hess_init=hess_init,
            betas=betas,
            weight_decay=weight_decay,
            clip_radius=clip_radius,
            rescale_lr=False,
            mc_samples=1,
            prefetch_sample=False,
            seed=seed,
            compiled=compiled,
            prior_mean=prior_mean,
            prior_precision=prior_precision,
        )

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return vadam

    def _curved(self, slots: Sequence[Slot]) -> Sequence[Tensor]:
        return [_squared(slot.parameter) for slot in slots]


class VOGN(Vadam):
    """Variational online Gauss-Newton ([LSK20] figure 1, left): squared gradients of each example.

    Inside a block, `backward` takes the place of `loss.backward()`. Arguments are those of `Vadam`.

    Example:
        >>> import torch
        >>> from iblr.torch import VOGN
        >>> model = torch.nn.Linear(3, 2)
        >>> x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
        >>> optimizer = VOGN(model.parameters(), lr=1e-3, ess=8)
        >>> optimizer.zero_grad()
        >>> with optimizer.sampled_params(train=True):
        ...     loss = optimizer.backward(model, torch.nn.functional.cross_entropy, x, y)
        >>> optimizer.step()
    """

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return vogn

    def _new_accumulation(self) -> Accumulation:
        return Accumulation(power=2)

    def _curved(self, slots: Sequence[Slot]) -> Sequence[Tensor]:
        return self._gathered(
            slots,
            "gradients of single examples are missing. Call VOGN.backward(model, loss, inputs, "
            "targets) inside the block, not loss.backward().",
        )

    def backward(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        inputs: Tensor,
        targets: Tensor,
        *,
        chunk: int | None = None,
    ) -> Tensor:
        """Gradients of the mean loss into `grad`, and the mean of their squares.

        Args:
            model: maps a batch of inputs to outputs; without parts that mix examples.
            loss: the mean loss of outputs and targets.
            inputs: one row an example.
            targets: likewise.
            chunk: examples worked on at once, for memory.

        Returns:
            The mean loss.
        """
        if not self._inside:
            raise RuntimeError(
                "VOGN.backward(): the weights are the mean. Call it inside a block "
                "`with optimizer.sampled_params(train=True):`."
            )
        if self._accumulation.curved:
            raise RuntimeError(
                "VOGN.backward(): once a step only, as squares of parts of a mean are not parts of "
                "the mean of squares. Give all rows at once, and `chunk` if memory is short."
            )
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        rest = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        rest |= dict(model.named_buffers())

        def of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = torch.func.functional_call(model, weights | rest, (x[None],))
            return loss(outputs, y[None])

        each = torch.func.vmap(
            torch.func.grad_and_value(of_one), in_dims=(None, 0, 0), randomness="different"
        )
        detached = {name: p.detach() for name, p in named.items()}
        total, count = torch.zeros((), device=inputs.device), len(inputs)
        for begin in range(0, count, chunk or count):
            part = slice(begin, begin + (chunk or count))
            gradients, losses = each(detached, inputs[part], targets[part])
            total += losses.sum() / count
            for name, parameter in named.items():
                self._add(parameter, gradients[name], count)
        for parameter in named.values():
            self._accumulation.leave(parameter)
        return total

    @torch.no_grad()
    def _add(self, parameter: Tensor, gradients: Tensor, count: int) -> None:
        grad = gradients.sum(0) / count
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        squares = flat_like(gradients.square().sum(0) / count, parameter)
        gathered: Accumulation = self._accumulation
        if parameter in gathered.curved:
            squares = squares + gathered.curved[parameter]
        gathered.curved[parameter] = squares


def _squared(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return flat_like(parameter.grad, parameter).float().square()
