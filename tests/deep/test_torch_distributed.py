"""Several processes with parts of a batch do what one does with all of it.

They agree up to the order in which gradients are summed: 1e-4 after 20 steps.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def run(kind, world, folder, samples=1):
    folder.mkdir()
    program = [sys.executable, str(HERE / "torch_worker.py"), kind]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [*program, str(rank), str(world), str(samples), str(folder)], env=environment
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(timeout=120) for process in started] == [0] * world
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run("ddp", 1, tmp_path_factory.mktemp("alone") / "run")[0][0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_equal_one(kind, alone, tmp_path):
    for kept, refused in run(kind, 2, tmp_path / "run"):
        assert refused == 0
        for ours, expected in zip(kept, alone, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_equal_one_with_several_samples(kind, tmp_path):
    expected = run("ddp", 1, tmp_path / "alone", samples=2)[0][0]
    for kept, _ in run(kind, 2, tmp_path / "run", samples=2):
        for ours, one in zip(kept, expected, strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-5)


def test_a_parameter_without_a_gradient_on_one_process_does_not_hang(tmp_path):
    (first, _), (second, _) = run("unused", 2, tmp_path / "run")
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("default")
def test_a_shard_that_is_not_finite_refuses_the_step_everywhere(tmp_path):
    (first, refused), (second, also) = run("fsdp_nan", 2, tmp_path / "run")
    assert refused == also == 1
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
