"""One process of several that train a network together; started by test_torch_distributed.py."""

import datetime
import faulthandler
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_helpers import classification, small_ivon


class Gated(nn.Module):
    """The second branch is used or not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, both=True):
        return self.first(x) + self.second(x) if both else self.first(x)


class Deep(nn.Module):
    """Layers whose first axes do not divide evenly, one leaving a rank with nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 1), nn.Linear(1, 3))

    def forward(self, x):
        return self.layers(x)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(kind: str, rank: int, world: int, samples: int, folder: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100)  # where it is, if it hangs
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    x, y = classification(64)
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    model = Gated() if kind == "unused" else Deep()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=samples > 1)
    elif kind == "unused":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif kind in ("fsdp", "fsdp_nan"):
        for layer in (model.layers[0], *model.layers[2:]):
            fully_shard(layer)
        fully_shard(model)
    optimizer = small_ivon(model, mc_samples=samples, prefetch_sample=kind == "fsdp")
    for step in range(20):
        optimizer.zero_grad()
        for _ in range(samples):
            with optimizer.sampled_params(train=True):
                arguments = (x, rank == 0) if kind == "unused" else (x,)
                nn.functional.cross_entropy(model(*arguments), y).backward()
        if kind == "fsdp_nan" and step == 7 and rank == 1:
            next(model.parameters()).grad.to_local().fill_(float("nan"))
        optimizer.step()
    q = optimizer.posterior()
    kept = [whole(t) for t in (*q.mean, *q.precision)]
    torch.save((kept, optimizer.refused_steps), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # leaving in the usual way was seen to wait for gloo's threads for ever


if __name__ == "__main__":
    name, place, count, draws, where = sys.argv[1:]
    main(name, int(place), int(count), int(draws), where)
