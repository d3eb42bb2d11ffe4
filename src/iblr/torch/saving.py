"""Saving the mean while the weights are a sample.

With `prefetch_sample=True` the weights between two steps are the next step's sample. A network's
`state_dict` shall give the mean all the same, without being told to: in the first block of training
the modules that own the parameters are found as they are called, and from then on hand out means.
"""

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class MeanSaver:
    """Finds the modules of an optimiser's parameters, and has their `state_dict` hold the mean."""

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handle = register_module_forward_pre_hook(self._look)
        self._hook = functools.partial(MeanSaver._replace, self)

    def _look(self, module: nn.Module, _: Any) -> None:
        for part in module.modules():
            if part in self._seen:
                continue
            self._seen.add(part)
            owned = {id(p) for p in part._parameters.values() if p is not None}
            if owned & self._wanted:
                part.register_state_dict_post_hook(self._hook)
                self._wanted -= owned

    def stop(self) -> None:
        """Look no further; what was found stays."""
        self._handle.remove()

    def _replace(self, module: nn.Module, saved: dict[str, Any], prefix: str, _: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not optimizer.weights_are_sample:
            return
        for name, parameter in module._parameters.items():
            if parameter is None or prefix + name not in saved:
                continue
            mean = optimizer.state.get(parameter, {}).get("mean")
            if mean is not None:
                with torch.no_grad():
                    saved[prefix + name] = mean.to(parameter.dtype, copy=True)
