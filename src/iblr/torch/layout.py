"""Parameters as flat pieces of memory: dense tensors in any order of axes, and shards."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of it that is in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def master(parameter: Tensor) -> torch.dtype:
    """In which mean, momentum and precision are kept."""
    return torch.promote_types(parameter.dtype, torch.float32)


def flat(tensor: Tensor) -> Tensor:
    """All its entries in the order of memory, as a view; of the part in this process.

    A view autograd knows nothing of: a compiler would compile anew for every shape of its base.
    """
    here = local(tensor)
    shared = torch.empty(0, dtype=here.dtype, device=here.device)
    return shared.set_(here.untyped_storage(), here.storage_offset(), (here.numel(),), (1,))


def flat_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Entries in the order in which the parameter has them; a view where they are."""
    here, like = local(tensor.detach()), local(parameter.detach())
    if here.stride() != like.stride():
        here = torch.empty_like(like, dtype=here.dtype).copy_(here)
    return flat(here)


def first_index(parameter: Tensor) -> int:
    """Where in the whole parameter the part in this process begins."""
    if not isinstance(parameter, DTensor):
        return 0
    shape, begin = _local_shape_and_begin(parameter)
    if shape[1:] != tuple(parameter.shape[1:]):
        raise ValueError(
            f"IVON: a parameter of shape {tuple(parameter.shape)} is sharded as "
            f"{parameter.placements}; noise is drawn for shards along the first axis only. Shard "
            "it along axis 0, as fully_shard does."
        )
    return begin[0] * parameter[0].numel() if parameter.ndim else 0


def is_dense(tensor: Tensor) -> bool:
    """Whether its entries fill a piece of memory without gaps or overlaps."""
    here = local(tensor.detach())
    expected = 1
    for stride, size in sorted(zip(here.stride(), here.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_dense(optimizer: str, parameter: Tensor) -> None:
    """Raise a `ValueError` for a parameter that is not dense."""
    if not is_dense(parameter):
        raise ValueError(
            f"{optimizer}: a parameter of shape {tuple(parameter.shape)} has gaps in memory "
            f"(strides {parameter.stride()}). Make it contiguous."
        )


def _local_shape_and_begin(parameter: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, begin = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(shape), tuple(begin)
