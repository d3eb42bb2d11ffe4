"""IVON: the improved Bayesian learning rule as an optimiser of networks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsIndex

from torch import Tensor

from iblr.torch.mean_field import MeanFieldOptimizer
from iblr.torch.rules import Number, Rule, icml2020, ivon


class IVON(MeanFieldOptimizer):
    """The Adam-like optimiser of [LSK20], figure 1, that learns a Gaussian over the weights.

    Args:
        params: parameters or groups of them, as with any `torch.optim.Optimizer`.
        lr: learning rate; 0.1 to 0.3 is usual, since steps are relative to `hess_init`.
        ess: effective size of the data: the number of examples, if the loss is a mean over them.
        hess_init: what the curvature h begins with; the first samples have the standard deviation
            1/sqrt(ess (hess_init + weight_decay)).
        betas: of the momentum, and of the curvature.
        weight_decay: precision of the prior, over `ess`.
        variant: "ivon", or "icml2020" for the listing of the paper.
        mc_samples: samples of the weights a step.
        clip_radius: largest step of an entry, before the learning rate.
        prior_mean: of the prior: a number, or one tensor a parameter.
        prior_precision: of the prior, in place of `weight_decay`: a number, or one tensor a
            parameter, as in `posterior().precision`.
        rescale_lr: whether `lr` is relative to hess_init + weight_decay; if not given, "ivon" does
            this and "icml2020" does not.
        prefetch_sample: let `step` write the next sample into the weights: faster on a GPU, but
            between steps the weights are then a sample. `state_dict` of the network still gives
            the mean; evaluate inside `sampled_params()`, `mean_params()` or by `predict`.
        seed: of the noise; every replica must have the same.
        compiled: whether to compile the steps on the CPU; if not given, networks that are large
            enough are, where there is a C++ compiler.

    Example:
        >>> import torch
        >>> from iblr.torch import IVON
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(64, 3), torch.randn(64, 1)
        >>> optimizer = IVON(model.parameters(), lr=0.1, ess=64)
        >>> for _ in range(10):
        ...     with optimizer.sampled_params(train=True):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()
        >>> optimizer.posterior().standard_deviation[0].shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        params: Any,
        lr: Number | Tensor,
        ess: Number,
        *,
        hess_init: Number = 1.0,
        betas: tuple[Number, Number] = (0.9, 0.99999),
        weight_decay: Number = 1e-4,
        variant: Literal["ivon", "icml2020"] = "ivon",
        mc_samples: int = 1,
        clip_radius: Number = math.inf,
        prior_mean: Number | Sequence[Tensor] | None = None,
        prior_precision: Number | Sequence[Tensor] | None = None,
        rescale_lr: bool | None = None,
        prefetch_sample: bool = False,
        seed: SupportsIndex = 0,
        compiled: bool | None = None,
    ):
        if variant not in ("ivon", "icml2020"):
            raise ValueError(f'IVON(variant={variant!r}): give "ivon" or "icml2020".')
        super().__init__(
            params,
            lr=lr,
            ess=ess,
            hess_init=hess_init,
            betas=betas,
            weight_decay=weight_decay,
            clip_radius=clip_radius,
            variant=variant,
            rescale_lr=variant == "ivon" if rescale_lr is None else rescale_lr,
            mc_samples=mc_samples,
            prefetch_sample=prefetch_sample,
            seed=seed,
            compiled=compiled,
            prior_mean=prior_mean,
            prior_precision=prior_precision,
        )

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return ivon if group["variant"] == "ivon" else icml2020
