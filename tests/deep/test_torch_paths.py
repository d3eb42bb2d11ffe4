"""The ways to carry out a step agree: op by op, compiled, and the kernels of the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import slow
from torch_helpers import classification, network, small_ivon, train

from iblr.torch import paths

KERNELS = """
import itertools, torch
from iblr.torch import kernels
from iblr.torch.paths import Loop
from iblr.torch.rules import icml2020, ivon
from iblr.torch.slots import Sample, Slot

kernels.CHUNK, kernels.BLOCK = 256, 64


def slots(prior, dtype):
    torch.manual_seed(0)
    group = {"seed": 3, "ess": 1e4, "betas": (0.9, 0.999), "lr": 0.1, "hess_init": 0.5}
    group |= {"weight_decay": 1e-3, "prior_precision": None, "prior_mean": 0.1}
    group |= {"clip_radius": 2.0, "rescale_lr": True}
    found = []
    for number, size in enumerate((5, 300, 512)):
        parameter = torch.nn.Parameter(torch.randn(size).to(dtype))
        parameter.grad = torch.randn(size).to(dtype)
        state = {"mean": parameter.detach().float(), "momentum": 0.1 * torch.randn(size)}
        state["mean"] = state["mean"].clone()
        state |= {"precision": torch.rand(size) + 0.1, "step": torch.tensor(3.0)}
        if prior:
            state |= {"prior_mean": torch.randn(size), "prior_precision": torch.rand(size) + 1}
        found.append(Slot(group, number, parameter, state, first=number * (2**32 - 100)))
    return found


now, then = Sample(True, 7, 0), Sample(True, 8, 0)
cases = itertools.product((False, True), (ivon, icml2020), (None, then), (False, True))
with torch.no_grad():
    for prior, rule, following, with_curved in cases:
        for refused, dtype in ((False, torch.float32), (True, torch.bfloat16)):
            ours, plain = slots(prior, dtype), slots(prior, dtype)
            fused, loop = kernels.Fused(), Loop(False)
            fused.draw(ours, now)
            loop.draw(plain, now)
            close = {"rtol": 1e-5, "atol": 1e-6}
            if dtype == torch.bfloat16:
                close = {"rtol": 1e-2, "atol": 1e-2}
            for a, b in zip(ours, plain):
                assert torch.allclose(a.parameter, b.parameter, **close), "draw"
            curved = [torch.randn(s.parameter.numel()) if with_curved else None for s in ours]
            if refused:
                ours[1].parameter.grad[7] = float("nan")
            assert fused.prepare(ours, curved, now, following) == int(refused)
            fused.advance(rule, ours, curved, now, following)
            if not refused:
                loop.advance(rule, plain, curved, now, following)
            elif following:
                loop.draw(plain, following)
            else:
                for slot in plain:
                    slot.parameter.copy_(slot.state["mean"])
            for a, b in zip(ours, plain):
                assert torch.allclose(a.parameter, b.parameter, **close), (prior, rule, following)
                for name, value in a.state.items():
                    assert torch.allclose(value, b.state[name], rtol=1e-5, atol=1e-6), (name, rule)
    good = slots(False, torch.float32)
    assert kernels.Fused().prepare(good, [None] * 3, now, None) == 0
    fused = kernels.Fused()
    for bad, refused in ((float("nan"), 1), (float("-inf"), 1), (0.0, 0)):
        good[1].parameter.grad[-1] = bad
        assert fused.prepare(good, [None] * 3, now, None) == refused
    good[1].parameter.grad_dtype = None
    good[1].parameter.grad = good[1].parameter.grad.to(torch.bfloat16)  # one of another dtype
    before = [slot.state["momentum"].clone() for slot in good]
    fused.prepare(good, [None] * 3, now, None)
    fused.advance(ivon, good, [None] * 3, now, None)
    for slot, old in zip(good, before):
        expected = 0.9 * old + 0.1 * slot.parameter.grad.float()
        assert torch.allclose(slot.state["momentum"], expected, atol=1e-6)
print("agreed")
"""


def test_the_kernels_of_the_gpu_agree_with_the_plain_path():
    """On Triton's interpreter: no GPU is needed."""
    pytest.importorskip("triton", reason="Triton is for Linux only")
    assert _printed(KERNELS, TRITON_INTERPRET="1") == "agreed"


def _printed(program, **environment):
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(
        command,
        env=os.environ | environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return run.stdout.strip() or run.stderr


COMPILED = """
import torch
from torch_helpers import classification, network, small_ivon, train

settings = {SETTINGS}
found = []
for compiled in (False, True):
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model, compiled=compiled, **settings)
    train(model, optimizer, x, y, 5)
    found.append([*optimizer.posterior().mean, *optimizer.posterior().precision])
for plain, fast in zip(*found):
    torch.testing.assert_close(plain, fast, rtol=1e-4, atol=1e-6)
print("agreed")
"""


@pytest.mark.skipif(not paths.can_compile(), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "settings", [{}, slow({"variant": "icml2020", "prefetch_sample": True, "mc_samples": 2})]
)
def test_compiled_steps_agree_with_plain_ones(settings):
    """In a process without the checks of types, through which PyTorch's compiler does not see."""
    assert _printed(COMPILED.replace("{SETTINGS}", repr(settings))) == "agreed"


def test_large_networks_are_compiled_where_there_is_a_compiler(monkeypatch):
    large = small_ivon(torch.nn.Linear(400, 400))
    small = small_ivon(torch.nn.Linear(4, 4))
    assert large._weights.compiles() is paths.can_compile()
    assert not small._weights.compiles()
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not large._weights.compiles()


def test_pieces_do_not_matter(monkeypatch):
    found = []
    for chunk in (7, 2**15):
        monkeypatch.setattr(paths, "CHUNK", chunk)
        model, (x, y) = network(), classification()
        optimizer = small_ivon(model, compiled=False)
        train(model, optimizer, x, y, 2)
        found.append(optimizer.posterior().mean)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
