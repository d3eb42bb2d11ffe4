"""Settings and parameters that no step could be taken with, found before the first."""

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from iblr.torch.layout import check_dense, master


def check_group(optimizer: str, group: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for the first setting or parameter of a group that cannot be."""
    for name in ("lr", "ess", "hess_init", "clip_radius"):
        value = number(optimizer, name, group[name])
        least = value == 0 if name == "lr" else False
        most = math.isinf(value) and name != "clip_radius"
        if not (value > 0 or least) or most:
            raise ValueError(f"{optimizer}({name}={value:g}): give a positive number.")
    for name in ("weight_decay", "prior_precision"):
        if name == "prior_precision" and group[name] is None:
            continue
        value = number(optimizer, name, group[name])
        if not 0 < value < math.inf:
            raise ValueError(
                f"{optimizer}({name}={value:g}): give a positive number; the prior must be "
                "proper, or a weight the loss ignores has no distribution."
            )
    centre = number(optimizer, "prior_mean", group["prior_mean"])
    if not math.isfinite(centre):
        raise ValueError(f"{optimizer}(prior_mean={centre:g}): give a finite number.")
    betas = group["betas"]
    pair = isinstance(betas, Sequence) and len(betas) == 2
    if not pair or not all(0 <= number(optimizer, "betas", beta) < 1 for beta in betas):
        raise ValueError(f"{optimizer}(betas={betas}): give two numbers in [0, 1).")
    for parameter in group["params"]:
        check_parameter(optimizer, parameter)


def number(optimizer: str, name: str, value: Any) -> float:
    """As a float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{optimizer}({name}=...): got {type(value).__name__}, which is no float. Tensors for "
            "the prior's entries go to the optimiser, not into a group."
        ) from error


def check_parameter(optimizer: str, parameter: Tensor) -> None:
    """Raise a `ValueError` for a parameter that has no Gaussian distribution."""
    shape = tuple(parameter.shape)
    if parameter.device.type == "meta":
        raise ValueError(
            f"{optimizer}: a parameter of shape {shape} is on the meta device and has no "
            "values. Give the network memory (to_empty, then initialise) first."
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"{optimizer}: a parameter of shape {shape} has the dtype {parameter.dtype}; "
            "only real floating-point parameters have a Gaussian distribution."
        )
    check_dense(optimizer, parameter)


@torch.no_grad()
def set_prior(
    optimizer: str,
    name: str,
    groups: Sequence[Mapping[str, Any]],
    state: MutableMapping[Tensor, Any],
    tensors: Sequence[Tensor],
) -> None:
    """Keep means or precisions of the prior that differ by entry, one tensor a parameter."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    if isinstance(tensors, Tensor) or len(tensors) != len(parameters):
        count = "one tensor" if isinstance(tensors, Tensor) else f"{len(tensors)} tensors"
        raise ValueError(
            f"{optimizer}({name}=...): {count} for {len(parameters)} parameters. Give a list "
            "with one for each, in their order, such as those of posterior()."
        )
    for index, (parameter, tensor) in enumerate(zip(parameters, tensors, strict=True)):
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{optimizer}({name}=...): tensor {index} has the shape {tuple(tensor.shape)}, "
                f"its parameter {tuple(parameter.shape)}."
            )
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not whole.isfinite().all() or (name == "prior_precision" and not (whole > 0).all()):
            kind = "finite and positive" if name == "prior_precision" else "finite"
            raise ValueError(f"{optimizer}({name}=...): tensor {index} is not {kind}.")
        kept = torch.empty_like(parameter, dtype=master(parameter), requires_grad=False)
        state[parameter][name] = kept.copy_(tensor)
