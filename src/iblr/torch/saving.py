"""Saving the mean while the weights are a sample.

With `prefetch_sample=True` the weights between two steps are the next step's sample. A network's
`state_dict` shall give the mean all the same, without being told to. So the modules that own the
parameters are looked for, once, among all there are, and hand out the mean from then on.
"""

import gc
import weakref
from typing import Any

import torch
from torch import nn


class MeanOfWeights:
    """A hook that puts the mean into a module's `state_dict`; idle in a copy or a pickle."""

    def __init__(self, optimizer: Any):
        self._optimizer: Any = weakref.ref(optimizer)

    def __call__(self, module: nn.Module, saved: dict[str, Any], prefix: str, _: Any) -> None:
        """See `torch.nn.Module.register_state_dict_post_hook`."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is None:
            return
        for name, parameter in module._parameters.items():
            if parameter is None or prefix + name not in saved:
                continue
            mean = optimizer.mean_where_sampled(parameter)
            if mean is not None:
                with torch.no_grad():
                    saved[prefix + name] = mean.to(parameter.dtype, copy=True)

    def serves(self, optimizer: Any) -> bool:
        """Whether it is of that optimiser."""
        return self._optimizer is not None and self._optimizer() is optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizer": None}


def hand_out_means(optimizer: Any) -> None:
    """Let all modules that own parameters of the optimiser save their means."""
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    hook = MeanOfWeights(optimizer)
    for found in gc.get_objects():
        if not issubclass(type(found), nn.Module):
            continue
        if ours & {id(parameter) for parameter in found.__dict__.get("_parameters", {}).values()}:
            hooks: Any = found._state_dict_hooks.values()
            if not any(isinstance(one, MeanOfWeights) and one.serves(optimizer) for one in hooks):
                found.register_state_dict_post_hook(hook)
