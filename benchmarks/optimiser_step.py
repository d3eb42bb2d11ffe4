"""The price of a step of IVON beside that of AdamW, on the same tensors in one run.

    python benchmarks/optimiser_step.py                      # the CPU, one thread
    python benchmarks/optimiser_step.py --device cuda        # a GPU
    python benchmarks/optimiser_step.py --out table.txt

CPU: a network 3072-1000-1000-10, 4.1 million parameters. What IVON does a step, besides the forward
and backward pass, is to draw a sample into the weights, to put the mean back and to take the step:
twice as much noise as weights. Beside it stand a fused AdamW step, one `normal_` over the same
tensors, and the public package (`pip install ivon-opt`), if it is there.

GPU: the shapes of a GPT-2 with 124 million parameters, in float32 and bfloat16. With every time
stands the number of bytes that have to move, and what that takes at the speed of a copy. Memory is
the peak beyond weights and gradients. Then whole iterations of a small transformer, with a batch at
which the host is what takes time and one at which the GPU is.

Methods take turns within a round; a time is the median over rounds, a ratio the median of ratios
within rounds. Exit status 1 when a bar is missed, 0 when all are met or were not measured.
"""

import argparse
import contextlib
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from reporting import Report, whole_number
from torch import nn

from iblr.torch import IVON
from iblr.torch.paths import can_compile

MLP = [(1000, 3072), (1000,), (1000, 1000), (1000,), (10, 1000), (10,)]


def gpt_shapes(layers=12, width=768, vocabulary=50304, context=1024):
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *(block * layers), (width,), (width,)]


def parameters(shapes, device, dtype=torch.float32):
    torch.manual_seed(0)
    made = [nn.Parameter((0.02 * torch.randn(s, device=device)).to(dtype)) for s in shapes]
    for parameter in made:
        parameter.grad = (1e-3 * torch.randn_like(parameter, dtype=torch.float32)).to(dtype)
    return made


def stepping(optimizer, block=None) -> Callable[[], None]:
    """A step with gradients that are there, given anew inside a block: that of samples, or none."""
    params = optimizer.param_groups[0]["params"]
    gradients = [parameter.grad for parameter in params]
    block = block or (lambda: optimizer.sampled_params(train=True))

    def step():
        with block():
            for parameter, gradient in zip(params, gradients, strict=True):
                parameter.grad = gradient
        optimizer.step()
        for parameter in params:
            parameter.grad = None

    return step


def stepping_adam(params) -> Callable[[], None]:
    return stepping(torch.optim.AdamW(params, fused=True), contextlib.nullcontext)


def stepping_public(params) -> Callable[[], None] | None:
    if importlib.util.find_spec("ivon") is None:
        return None
    import ivon

    return stepping(ivon.IVON(params, lr=0.1, ess=50_000))


def timed(methods: dict[str, Callable[[], None]], rounds: int, repeats: int, device: str):
    """Milliseconds of each, one list a method with one entry a round."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for method in methods.values():
        for _ in range(3):
            method()
    found: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            wait()
            begin = time.perf_counter()
            for _ in range(repeats):
                method()
            wait()
            found[name].append(1e3 * (time.perf_counter() - begin) / repeats)
    return found


def ratio(found, name, *others) -> float:
    return statistics.median(
        a / sum(b) for a, *b in zip(found[name], *(found[other] for other in others), strict=True)
    )


class Bars:
    """Bars, met or missed."""

    def __init__(self, report: Report):
        self.report, self.missed = report, 0

    def at_most(self, words: str, value: float, bar: float, goal: float | None = None) -> None:
        met = value <= bar
        self.missed += not met
        more = "" if goal is None else f", goal {goal:g} {'met' if value <= goal else 'not met'}"
        self.report(f"  {words}: {value:.3f} (at most {bar:g}: {'met' if met else 'MISSED'}{more})")


def on_cpu(report: Report, bars: Bars, rounds: int) -> None:
    torch.set_num_threads(1)
    adam_parameters = parameters(MLP, "cpu")
    size = sum(p.numel() for p in adam_parameters)
    report(f"\nCPU, one thread, {size / 1e6:.2f} M parameters in float32; ms a step")
    noise = [torch.empty_like(p, requires_grad=False) for p in adam_parameters]

    def normal():
        for tensor in noise:
            tensor.normal_()

    methods: dict[str, Callable[[], None]] = {
        "fused AdamW": stepping_adam(adam_parameters),
        "normal_": normal,
    }
    if can_compile():
        ours = IVON(parameters(MLP, "cpu"), lr=0.1, ess=50_000, compiled=True)
        methods["IVON"] = stepping(ours)
        ahead = IVON(parameters(MLP, "cpu"), 0.1, 50_000, compiled=True, prefetch_sample=True)
        methods["IVON, prefetched"] = stepping(ahead)
    plain = IVON(parameters(MLP, "cpu"), lr=0.1, ess=50_000, compiled=False)
    methods["IVON, no compiler"] = stepping(plain)
    public = stepping_public(parameters(MLP, "cpu"))
    if public is not None:
        methods["public IVON"] = public
    found = timed(methods, rounds, 3, "cpu")
    base = ("fused AdamW", "normal_")
    for name, times in found.items():
        report(
            f"  {name:20s} {statistics.median(times):8.2f}   "
            f"{ratio(found, name, 'fused AdamW'):6.2f} x fused AdamW   "
            f"{ratio(found, name, *base):5.2f} x (fused AdamW + normal_)"
        )
    if "IVON" in found:
        bars.at_most("IVON / (fused AdamW + normal_)", ratio(found, "IVON", *base), 1.6, 1.3)
        if public is not None:
            bars.at_most("IVON / public IVON", ratio(found, "IVON", "public IVON"), 1 / 3)
    else:
        report("  No C++ compiler: IVON runs op by op, and no bar applies.")


def peak_beyond(make: Callable[[], Callable[[], None]], given: int) -> float:
    """Bytes at the peak of three steps, beyond those given."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - given
    del step
    return peak


def on_gpu(report: Report, bars: Bars, rounds: int) -> None:
    shapes = gpt_shapes()
    size = sum(torch.Size(shape).numel() for shape in shapes)
    copied = torch.empty(2**28, device="cuda"), torch.empty(2**28, device="cuda")
    copying = timed({"copy": lambda: copied[0].copy_(copied[1])}, 5, 20, "cuda")["copy"]
    speed = 8 * 2**28 / (1e-3 * statistics.median(copying))
    del copied
    report(f"\nGPU, {size / 1e6:.1f} M parameters; ms a step; a copy moves {speed / 1e12:.2f} TB/s")
    for dtype in (torch.float32, torch.bfloat16):
        width = dtype.itemsize
        adam = stepping_adam(parameters(shapes, "cuda", dtype))
        ahead = IVON(parameters(shapes, "cuda", dtype), 0.1, 50_000, prefetch_sample=True)
        ours = IVON(parameters(shapes, "cuda", dtype), lr=0.1, ess=50_000)
        methods = {
            "fused AdamW": adam,
            "IVON, prefetched": stepping(ahead),
            "IVON": stepping(ours),
        }
        # AdamW keeps its state in the dtype of the weights; we look at gradients once more.
        moved = {"fused AdamW": 7 * width, "IVON, prefetched": 24 + 3 * width}
        moved["IVON"] = 24 + 3 * width + (8 + width) + (4 + width)
        public = stepping_public(parameters(shapes, "cuda")) if width == 4 else None
        if public is not None:
            methods["public IVON"] = public
        found = timed(methods, rounds, 20, "cuda")
        report(f" {str(dtype).removeprefix('torch.')}")
        for name, times in found.items():
            limit = (
                f"{moved[name]:3d} bytes a parameter: {1e3 * size * moved[name] / speed:.2f} ms"
                if name in moved
                else ""
            )
            report(
                f"  {name:20s} {statistics.median(times):8.3f}   "
                f"{ratio(found, name, 'fused AdamW'):6.3f} x fused AdamW   {limit}"
            )
        if width == 4:
            share = {name: ratio(found, name, "fused AdamW") for name in found}
            bars.at_most("IVON, prefetched / fused AdamW", share["IVON, prefetched"], 1.25)
            bars.at_most("IVON / fused AdamW", share["IVON"], 2.1)
        del adam, ahead, ours, methods, public
        torch.cuda.empty_cache()
        made = parameters(shapes, "cuda", dtype)
        gradients = [parameter.grad for parameter in made]
        makers = {
            "fused AdamW": lambda p=made: stepping_adam(p),
            "IVON": lambda p=made: stepping(IVON(p, lr=0.1, ess=50_000)),
            "IVON, prefetched": lambda p=made: stepping(IVON(p, 0.1, 50_000, prefetch_sample=True)),
        }
        if width == 4 and importlib.util.find_spec("ivon") is not None:
            makers["public IVON"] = lambda p=made: stepping_public(p)
        for name, make in makers.items():
            for parameter, gradient in zip(made, gradients, strict=True):
                parameter.grad = gradient
            beyond = peak_beyond(make, 0) / size
            report(f"  {name:20s} {beyond:8.2f} bytes a parameter beyond weights and gradients")
            if name == "IVON":
                bars.at_most("memory of IVON", beyond, 12 * 1.02)
        del made, makers, gradients
        torch.cuda.empty_cache()
    iterations(report, bars, rounds)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in split.unbind(2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary=96, width=384, layers=6, heads=6, context=256):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))


def iterations(report: Report, bars: Bars, rounds: int) -> None:
    def training(make, block, tokens):
        model = Transformer().cuda()
        optimizer = make(model.parameters())

        def iteration():
            optimizer.zero_grad()
            with block(optimizer), torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens[:, :-1]).float().flatten(0, 1)
                nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
            optimizer.step()

        return iteration

    def sampled(optimizer):
        return optimizer.sampled_params(train=True)

    size = sum(p.numel() for p in Transformer().parameters())
    for batch in (64, 256):
        torch.manual_seed(0)
        tokens = torch.randint(0, 96, (batch, 257), device="cuda")
        methods = {
            "fused AdamW": training(
                lambda p: torch.optim.AdamW(p, fused=True),
                lambda _: contextlib.nullcontext(),
                tokens,
            ),
            "IVON, prefetched": training(
                lambda p: IVON(p, 0.1, 1e5, prefetch_sample=True), sampled, tokens
            ),
            "IVON": training(lambda p: IVON(p, 0.1, 1e5), sampled, tokens),
        }
        found = timed(methods, 10 * rounds, 2, "cuda")  # the host's time is a noisy one
        report(
            f"\nGPU, whole iterations of a transformer, {size / 1e6:.1f} M parameters, "
            f"{batch} x 256 tokens"
        )
        for name, times in found.items():
            share = ratio(found, name, "fused AdamW")
            report(f"  {name:20s} {statistics.median(times):8.3f} ms   {share:6.3f} x fused AdamW")
        share = ratio(found, "IVON, prefetched", "fused AdamW")
        bars.at_most("iteration, prefetched / fused AdamW", share, 1.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=whole_number, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report = Report()
    bars = Bars(report)
    report(f"Python {platform.python_version()}, torch {torch.__version__}")
    if arguments.device == "cuda":
        report(torch.cuda.get_device_name())
        on_gpu(report, bars, arguments.rounds)
    else:
        on_cpu(report, bars, arguments.rounds)
    report.save(arguments.out)
    return int(bars.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
