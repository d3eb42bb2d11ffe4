"""On a GPU: the same numbers as on the CPU, and nothing waits for it."""

import pytest
import torch
from torch import nn
from torch_helpers import classification, network, small_ivon, train

from iblr.torch import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def trained(device, steps=20, dtype=torch.float32, **settings):
    model, (x, y) = network(width=700).to(device, dtype), classification()
    optimizer = small_ivon(model, **settings)
    train(model, optimizer, x.to(device, dtype), y.to(device), steps)
    return model, optimizer


@pytest.mark.parametrize("variant", ["ivon", "icml2020"])
@pytest.mark.parametrize("settings", [{}, {"prefetch_sample": True}, {"mc_samples": 2}])
def test_the_gpu_takes_the_steps_of_the_cpu(variant, settings):
    _, ours = trained("cuda", variant=variant, **settings)
    assert kernels.fits(next(iter(ours.state)))
    _, expected = trained("cpu", variant=variant, compiled=False, **settings)
    for name in ("mean", "precision"):
        pairs = zip(
            getattr(ours.posterior(), name), getattr(expected.posterior(), name), strict=True
        )
        for a, b in pairs:
            torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=2e-4)


def test_weights_of_bfloat16_and_a_prior_of_entries():
    model, optimizer = trained("cuda", dtype=torch.bfloat16, prefetch_sample=True)
    q = optimizer.posterior()
    assert q.mean[0].dtype == torch.float32
    with optimizer.mean_params():
        assert torch.equal(next(model.parameters()), q.mean[0].bfloat16())
    settings = {"prior_mean": q.mean, "prior_precision": q.precision}
    _, ours = trained("cuda", **settings)
    cpu = {name: [one.cpu() for one in every] for name, every in settings.items()}
    _, expected = trained("cpu", compiled=False, **cpu)
    for a, b in zip(ours.posterior().mean, expected.posterior().mean, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=2e-4)


def test_gradients_that_are_not_finite_refuse_the_step():
    model, optimizer = trained("cuda")
    before = [p.detach().clone() for p in model.parameters()]
    with optimizer.sampled_params(train=True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    next(model.parameters()).grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.refused_steps == 1
    assert optimizer.state_dict()["param_groups"][0]["refused"] == 1
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(int(state["step"]) == 20 for state in optimizer.state.values())
    x, y = (one.cuda() for one in classification())
    with pytest.warns(RuntimeWarning, match="not finite"):
        for _ in range(3):
            torch.cuda.synchronize()
            train(model, optimizer, x, y, 8)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_gpu():
    model, optimizer = trained("cuda", prefetch_sample=True)
    x, y = (one.cuda() for one in classification())
    loss = nn.functional.cross_entropy(model(x), y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


def test_a_state_moves_between_devices():
    model, optimizer = trained("cuda")
    other, again = trained("cpu", steps=1)
    again.load_state_dict(optimizer.state_dict())
    assert again.state[next(other.parameters())]["step"].device.type == "cpu"
    x, y = classification()
    train(model, optimizer, x.cuda(), y.cuda(), 5)
    train(other, again, x, y, 5)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=2e-3, atol=2e-4)
    optimizer.load_state_dict(again.state_dict())
    train(model, optimizer, x.cuda(), y.cuda(), 5)


def test_parameters_of_two_devices_step_together():
    torch.manual_seed(0)
    on_cpu, on_gpu = nn.Linear(5, 4), nn.Linear(4, 3).cuda()
    optimizer = small_ivon(nn.ModuleList([on_cpu, on_gpu]))
    x, y = classification()
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(on_gpu(on_cpu(x).cuda()), y.cuda()).backward()
        optimizer.step()
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())


def test_a_gradient_scaler_and_float16():
    model, (x, y) = network().cuda(), classification()
    optimizer = small_ivon(model)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(20):
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True), torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert loss < 1.0
