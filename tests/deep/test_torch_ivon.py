"""IVON as an optimiser of PyTorch: it behaves as AdamW does, and the weights are the mean."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch_helpers import (
    classification,
    half_square,
    linear,
    network,
    regression,
    same,
    small_ivon,
    train,
    weights,
)

from iblr.torch import IVON, MeanField


def test_the_posterior_of_a_linear_model_is_found():
    """The mean in every run, the precision on average over runs."""
    x, y = regression(2000)
    exact = x.T @ x + 0.2 * torch.eye(5)
    mean = torch.linalg.solve(exact, x.T @ y)
    found = []
    for seed in range(6):
        model = linear()
        optimizer = IVON(model.parameters(), 0.1, 2000, betas=(0.9, 0.99), mc_samples=4, seed=seed)
        precision = torch.zeros(5)
        for step in range(300):
            optimizer.zero_grad()
            for _ in range(4):
                with optimizer.sampled_params(train=True):
                    half_square(model, x, y).backward()
            optimizer.step()
            if step >= 100:
                optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 300)
                precision += optimizer.posterior().precision[0][0] / 200
        torch.testing.assert_close(model.weight[0], mean, atol=0.02, rtol=0)
        found.append(precision / exact.diag())
    error = torch.stack(found).std(0) / 6**0.5
    assert error.max() < 0.1
    assert ((torch.stack(found).mean(0) - 1).abs() < 3 * error + 0.02).all()


def test_the_five_lines_of_the_readme_work():
    model = network()
    optimizer = IVON(model.parameters(), lr=0.1, ess=50_000)
    x, y = classification()
    before = nn.functional.cross_entropy(model(x), y)
    train(model, optimizer, x, y, 30)
    assert nn.functional.cross_entropy(model(x), y) < 0.8 * before


@pytest.mark.parametrize("prefetch", [False, True])
def test_outside_a_block_the_weights_are_the_mean(prefetch):
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model, prefetch_sample=prefetch)
    train(model, optimizer, x, y, 3)
    means = [optimizer.state[p]["mean"] for p in model.parameters()]
    assert same(weights(model), means) is not prefetch
    saved = model.state_dict()
    assert same(saved.values(), means)
    with optimizer.mean_params():
        assert same(weights(model), means)
    with optimizer.sampled_params():
        assert not same(weights(model), means)
    assert same(weights(model), means)  # also with prefetch: drawn anew when training goes on


def test_prefetching_changes_nothing_but_the_weights_between_steps():
    found = []
    for prefetch in (False, True):
        model, (x, y) = network(), classification()
        optimizer = small_ivon(model, prefetch_sample=prefetch)
        for _ in range(5):
            train(model, optimizer, x, y, 2)
            optimizer.predict(model, x, samples=2)
        found.append([*optimizer.posterior().mean, *optimizer.posterior().precision])
    assert same(*found)


def test_an_exception_restores_the_mean_and_the_gradients():
    for prefetch, samples in ((False, 1), (True, 1), (False, 2)):
        model, (x, y) = network(), classification()
        optimizer = small_ivon(model, prefetch_sample=prefetch, mc_samples=samples)
        train(model, optimizer, x, y, 1)
        means = [optimizer.state[p]["mean"].clone() for p in model.parameters()]
        with pytest.raises(KeyboardInterrupt), optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(x), y).backward()
            raise KeyboardInterrupt
        assert same(weights(model), means)
        train(model, optimizer, x, y, 1)


def test_a_block_within_a_block_is_refused():
    model = network()
    optimizer = small_ivon(model)
    with pytest.raises(RuntimeError, match="a sample already"):
        with optimizer.sampled_params(), optimizer.sampled_params():
            pass
    with optimizer.sampled_params():
        pass


def test_a_step_without_a_sample_is_refused():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="sampled_params"):
        optimizer.step()
    model.zero_grad()
    optimizer = small_ivon(model, mc_samples=3)
    with optimizer.sampled_params(train=True):
        nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="mc_samples=3"):
        optimizer.step()


@pytest.mark.parametrize("samples", [1, 3])
def test_a_closure_does_what_blocks_do(samples):
    x, y = classification()
    found = []
    for use_closure in (False, True):
        model = network()
        optimizer = small_ivon(model, mc_samples=samples)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            if use_closure:
                assert optimizer.step(closure).item() > 0
            else:
                train(model, optimizer, x, y, 1)
        found.append(weights(model))
    assert same(*found)


def test_a_closure_after_blocks_is_refused():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    with optimizer.sampled_params(train=True):
        nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="either blocks or a closure"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
def test_accumulated_gradients_are_those_of_the_whole_batch(samples, inside):
    x, y = classification(64)
    whole = network()
    train(whole, small_ivon(whole, mc_samples=samples), x, y, 1)
    model = network()
    optimizer = small_ivon(model, mc_samples=samples)
    parts = list(zip(x.split(16), y.split(16), strict=True))
    if inside:
        for _ in range(samples):
            with optimizer.sampled_params(train=True):
                for part in parts:
                    (nn.functional.cross_entropy(model(part[0]), part[1]) / 4).backward()
    else:
        for part in parts:
            for _ in range(samples):
                with optimizer.sampled_params(train=True):
                    (nn.functional.cross_entropy(model(part[0]), part[1]) / 4).backward()
    optimizer.step()
    for a, b in zip(weights(whole), weights(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_several_samples_are_averaged():
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = IVON([parameter], 0.1, 100, betas=(0.0, 0.9), mc_samples=2, weight_decay=1e-4)
    eps, grads = [], []
    for sample in range(2):
        with optimizer.sampled_params(train=True):
            eps.append(parameter.detach() * (100 * (1 + 1e-4)) ** 0.5)
            grads.append(torch.randn(1000))
            parameter.grad = grads[sample].clone()
    torch.testing.assert_close(parameter.grad, (grads[0] + grads[1]) / 2)
    optimizer.step()
    curved = (eps[0] * grads[0] + eps[1] * grads[1]) / 2
    root = (1 + 1e-4) ** 0.5
    factor = root + 0.1 * (10 * curved + (1e-4 - root**2) / root)
    state = optimizer.state[parameter]
    torch.testing.assert_close(state["precision"], 0.5 * (root**2 + factor**2), rtol=1e-4, atol=0)
    expected = -0.1 * root**2 * (grads[0] + grads[1]) / 2 / state["precision"]
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 2])
def test_clipping_norms_in_the_usual_place_takes_effect(samples):
    x, y = classification()
    found = []
    for scale in (1.0, 1e-3):
        model = network()
        optimizer = small_ivon(model, mc_samples=samples)
        for _ in range(samples):
            with optimizer.sampled_params(train=True):
                (1e3 * scale * nn.functional.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        found.append([*weights(model), *optimizer.posterior().precision])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_clipping_values_takes_effect_or_raises():
    x, y = classification()
    model = network()
    optimizer = small_ivon(model)
    before = weights(model)
    with optimizer.sampled_params(train=True):
        nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.0)
    optimizer.step()
    decayed = [w * (1 - 0.1 * 1e-4 * 0.5) for w in before]
    for a, b in zip(weights(model), decayed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    optimizer = small_ivon(model, mc_samples=2)
    for _ in range(2):
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="not by one factor"):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zeroed_gradients_of_a_skipped_step_leave_no_trace(set_to_none):
    x, y = classification()
    found = []
    for skip in (False, True):
        model = network()
        optimizer = small_ivon(model, mc_samples=2)
        if skip:
            for _ in range(2):
                with optimizer.sampled_params(train=True):
                    (nn.functional.cross_entropy(model(x), y) * float("inf")).backward()
            model.zero_grad(set_to_none)  # not the optimiser's own, which would start anew
        for _ in range(2):
            with optimizer.sampled_params(train=True):
                nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append(weights(model))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("inside", [False, True])
def test_training_goes_on_after_a_scaler_skipped_a_step(inside):
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model, mc_samples=2)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        if not inside:
            optimizer.zero_grad()
        for _ in range(2):
            with optimizer.sampled_params(train=True):
                if inside:
                    optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                scaler.scale(loss * (float("inf") if step == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.param_groups[0]["draws"] == 3


def test_gradients_from_outside_of_blocks_are_not_mixed_in():
    x, y = classification()
    for samples in (1, 2):
        model = network()
        optimizer = small_ivon(model, mc_samples=samples)
        before = weights(model)
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match="not taken at a sample"):
            with optimizer.sampled_params(train=True):
                nn.functional.cross_entropy(model(x), y).backward()
        assert same(weights(model), before)
        for set_to_none in (True, False):
            optimizer.zero_grad(set_to_none)
            for _ in range(samples):
                with optimizer.sampled_params(train=True):
                    nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_gradients_that_are_not_finite_refuse_the_step():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    train(model, optimizer, x, y, 2)
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    before = weights(model)
    optimizer.zero_grad()
    for bad in (float("nan"), float("inf")):
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(x), y).backward()
        next(model.parameters()).grad.view(-1)[3] = bad
        with pytest.warns(RuntimeWarning, match=r"IVON.step\(\): a gradient was not finite"):
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.refused_steps == 2
    assert same(weights(model), before)
    after = optimizer.state_dict()
    assert after["param_groups"][0]["refused"] == 2
    for number, state in kept.items():
        assert same(state.values(), after["state"][number].values())
    train(model, optimizer, x, y, 1)
    assert not same(weights(model), before)
    assert optimizer.param_groups[0]["draws"] == 5


@pytest.mark.parametrize("samples", [1, 2])
def test_a_gradient_scaler_scales_back(samples):
    x, y = classification()
    found = []
    for scaled in (False, True):
        model = network()
        optimizer = small_ivon(model, mc_samples=samples)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            for _ in range(samples):
                with optimizer.sampled_params(train=True):
                    loss = nn.functional.cross_entropy(model(x), y)
                    if scaled and step == 1:
                        loss = loss * torch.tensor(float("inf"))
                    elif step == 1:
                        continue
                    scaler.scale(loss).backward()
            if scaled or step != 1:
                scaler.step(optimizer)  # skips what is not finite
            scaler.update()
        found.append([*optimizer.posterior().mean, *optimizer.posterior().precision])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_autocast_computes_in_bfloat16_with_weights_of_float32():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    for _ in range(20):
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True), torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
    assert loss < 1.0
    assert next(model.parameters()).dtype == torch.float32


def test_weights_of_bfloat16_have_a_mean_of_float32():
    model, (x, y) = network().to(torch.bfloat16), classification()
    x = x.to(torch.bfloat16)
    optimizer = small_ivon(model, lr=1e-4)
    before = weights(model)
    train(model, optimizer, x, y, 5)
    state = optimizer.state[next(model.parameters())]
    assert {state[name].dtype for name in ("mean", "momentum", "precision")} == {torch.float32}
    assert not torch.equal(state["mean"], before[0].float())  # steps too small for bfloat16
    assert torch.equal(state["mean"].to(torch.bfloat16), weights(model)[0])
    saved = copy.deepcopy(optimizer.state_dict())
    other = network(seed=5).to(torch.bfloat16)
    again = small_ivon(other, lr=1e-4)
    again.load_state_dict(saved)
    kept = again.state[next(other.parameters())]
    assert all(torch.equal(kept[name], state[name]) for name in state)
    train(model, optimizer, x, y, 5)
    train(other, again, x, y, 5)
    assert same(weights(model), weights(other))


def test_weights_of_float64_have_a_state_of_float64():
    model, (x, y) = network().double(), classification()
    optimizer = small_ivon(model)
    train(model, optimizer, x.double(), y, 3)
    assert optimizer.state[next(model.parameters())]["mean"].dtype == torch.float64


def test_frozen_and_unused_parameters_are_left_alone():
    model, (x, y) = network(), classification()
    unused = nn.Parameter(torch.ones(4))
    model[0].weight.requires_grad_(False)
    optimizer = IVON([*model.parameters(), unused], lr=0.1, ess=64)
    frozen = model[0].weight.detach().clone()
    with optimizer.sampled_params(train=True):
        assert torch.equal(model[0].weight, frozen)
        nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, frozen)
    assert torch.equal(unused, torch.ones(4))
    assert optimizer.state[unused]["step"] == 0
    assert optimizer.state[model[2].weight]["step"] == 1
    model[0].weight.requires_grad_(True)
    train(model, optimizer, x, y, 1)
    assert not torch.equal(model[0].weight, frozen)


def test_groups_have_settings_of_their_own_and_can_be_added():
    model, (x, y) = network(), classification()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = IVON(groups, lr=0.1, ess=64)
    before = weights(model)
    train(model, optimizer, x, y, 2)
    after = weights(model)
    assert same(before[:2], after[:2]) and not same(before[2:], after[2:])
    head = nn.Linear(3, 3)
    optimizer.add_param_group({"params": head.parameters(), "weight_decay": 1e-2})
    assert optimizer.param_groups[2]["draws"] == 2
    train(nn.Sequential(model, head), optimizer, x, y, 2)
    assert optimizer.state[head.weight]["step"] == 2
    with pytest.raises(ValueError, match="weight_decay"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters(), "weight_decay": -1.0})


def test_a_schedule_of_the_learning_rate_is_followed():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for _ in range(4):
        train(model, optimizer, x, y, 1)
        schedule.step()
    before = weights(model)
    train(model, optimizer, x, y, 1)  # at a learning rate of zero
    for a, b in zip(before, weights(model), strict=True):
        torch.testing.assert_close(a, b)


def test_weights_written_from_outside_become_the_mean():
    model, (x, y) = network(), classification()
    for prefetch in (False, True):
        optimizer = small_ivon(model, prefetch_sample=prefetch)
        train(model, optimizer, x, y, 2)
        model.load_state_dict(network(seed=7).state_dict())
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, x, y, 1)
        assert same(optimizer.posterior().mean, weights(network(seed=7)))


def test_memory_in_the_order_of_channels_gives_the_same_steps_but_for_the_noise():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    losses = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(1)
        model = nn.Conv2d(3, 4, 3).to(memory_format=layout)
        optimizer = IVON(model.parameters(), 0.1, ess=1e8, betas=(0.9, 1 - 1e-7))
        for _ in range(5):
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                loss = model(x.to(memory_format=layout)).square().mean()
                loss.backward()
            optimizer.step()
        losses.append(loss.item())
        strides = {optimizer.state[model.weight]["mean"].stride(), model.weight.stride()}
        assert len(strides) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_an_optimiser_can_be_copied_and_pickled():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model, mc_samples=2)
    train(model, optimizer, x, y, 2)
    both = copy.deepcopy((model, optimizer))
    train(model, optimizer, x, y, 2)
    train(*both, x, y, 2)
    assert same(weights(model), weights(both[0]))


RUN = """
import sys, os, torch
from torch_helpers import classification, network, small_ivon, train, weights
torch.set_num_threads(1)
mode, path = sys.argv[1:]
model, (x, y) = network(width=64), classification()
optimizer = small_ivon(model, prefetch_sample=True, seed=3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
first = 0
if mode == "resume":
    kept = torch.load(path, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    schedule.load_state_dict(kept["schedule"])
    first = kept["step"]
for step in range(first, 200):
    train(model, optimizer, x, y, 1)
    schedule.step()
    if step == 99 and mode == "killed":
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**kept, "schedule": schedule.state_dict(), "step": 100}, path)
    if step == 130 and mode == "killed":
        os._exit(9)
q = optimizer.posterior()
torch.save([*q.mean, *q.precision], path + "." + mode)
"""


def test_a_killed_run_goes_on_bit_by_bit(tmp_path):
    path = str(tmp_path / "checkpoint")
    status = {}
    for mode in ("whole", "killed", "resume"):
        run = subprocess.run([sys.executable, "-c", RUN, mode, path], cwd=__file__[:-18])
        status[mode] = run.returncode
    assert status == {"whole": 0, "killed": 9, "resume": 0}
    assert same(torch.load(path + ".whole"), torch.load(path + ".resume"))


def test_predictions_average_probabilities():
    model, (x, _) = network(), classification(50)
    model = nn.Sequential(model, nn.Dropout(0.9))
    optimizer = small_ivon(model, hess_init=0.01)
    before = weights(model)
    samples = []
    torch.manual_seed(0)
    for number in range(3):
        optimizer._set_counter("predictions", number)
        with optimizer.sampled_params():
            samples.append(torch.softmax(model.eval()(x), -1).detach())
    model.train()
    optimizer._set_counter("predictions", 0)
    found = optimizer.predict(model, x, samples=3, batch_size=7)
    torch.testing.assert_close(found, sum(samples) / 3)
    assert model.training and model[1].training
    assert same(weights(model), before)
    at_mean = optimizer.predict(model, x, samples=0)
    torch.testing.assert_close(at_mean, torch.softmax(model[0](x), -1).detach())
    identity = optimizer.predict(model, x, samples=0, link=lambda outputs: outputs)
    torch.testing.assert_close(identity, model[0](x).detach())
    assert not torch.equal(optimizer.predict(model, x, samples=1), found)


def test_predictions_do_not_change_training():
    found = []
    for predict in (False, True):
        model, (x, y) = network(), classification()
        optimizer = small_ivon(model)
        for _ in range(3):
            train(model, optimizer, x, y, 1)
            if predict:
                optimizer.predict(model, x, samples=3)
        found.append(weights(model))
    assert same(*found)


def test_a_posterior_is_saved_sampled_and_the_next_prior(tmp_path):
    x, y = regression(400)
    model = linear()
    optimizer = IVON(model.parameters(), 0.1, 200, betas=(0.9, 0.99), mc_samples=4)
    loss = lambda out, target: 0.5 * (out[:, 0] - target).square().mean()  # noqa: E731
    train(model, optimizer, x[:200], y[:200], 200, loss)
    first = optimizer.posterior()
    first.save(tmp_path / "q.pt")
    loaded = MeanField.load(tmp_path / "q.pt")
    assert same(loaded.mean, first.mean) and same(loaded.precision, first.precision)
    draws = torch.stack([first.sample(torch.Generator().manual_seed(k))[0] for k in range(2000)])
    torch.testing.assert_close(draws.mean(0), first.mean[0], atol=0.01, rtol=0)
    torch.testing.assert_close(draws.std(0), first.standard_deviation[0], rtol=0.1, atol=0)
    second = IVON(
        model.parameters(),
        0.1,
        200,
        betas=(0.9, 0.99),
        mc_samples=4,
        prior_mean=loaded.mean,
        prior_precision=loaded.precision,
        seed=1,
    )
    for group in second.param_groups:
        group["lr"] = 0.05
    train(model, second, x[200:], y[200:], 250, loss)
    rest = x[200:]
    exact_precision = torch.diag(first.precision[0][0]) + rest.T @ rest
    right = first.precision[0][0] * first.mean[0][0] + rest.T @ y[200:]
    exact = torch.linalg.solve(exact_precision, right)
    torch.testing.assert_close(second.posterior().mean[0][0], exact, atol=0.03, rtol=0)
    ratio = second.posterior().precision[0][0] / exact_precision.diag()
    assert (ratio - 1).abs().max() < 0.25
    second.state_dict()  # holds the prior as well
    assert "prior_precision" in second.state_dict()["state"][0]


def test_posteriors_of_parts_of_the_data_merge_into_that_of_all():
    prior = MeanField([torch.zeros(3)], [torch.full((3,), 2.0)])
    precisions = [torch.tensor([3.0, 5.0, 2.5]), torch.tensor([4.0, 2.5, 9.0])]
    means = [torch.tensor([1.0, -1.0, 0.5]), torch.tensor([2.0, 0.0, 1.0])]
    parts = [MeanField([m], [p]) for m, p in zip(means, precisions, strict=True)]
    merged = parts[0].merged(parts[1], prior=prior)
    expected = precisions[0] + precisions[1] - 2.0
    torch.testing.assert_close(merged.precision[0], expected)
    weighted = precisions[0] * means[0] + precisions[1] * means[1]
    torch.testing.assert_close(merged.mean[0], weighted / expected)
    with pytest.raises(ValueError, match="not positive"):
        MeanField([torch.zeros(2)], [torch.tensor([1.0, 0.0])])
    with pytest.raises(ValueError, match="one precision for every entry"):
        MeanField([torch.zeros(2)], [torch.ones(3)])


def test_a_posterior_can_be_written_into_a_network():
    model, other = network(), network(seed=2)
    q = small_ivon(model).posterior()
    q.write(other.parameters())
    assert same(weights(model), weights(other))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ess": 0}, r"IVON\(ess=0\)"),
        ({"ess": -5.0}, "ess"),
        ({"ess": float("inf")}, "ess"),
        ({"lr": -0.1}, "lr"),
        ({"hess_init": 0.0}, "hess_init"),
        ({"weight_decay": 0.0}, "proper"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"clip_radius": 0.0}, "clip_radius"),
        ({"mc_samples": 0}, "mc_samples"),
        ({"variant": "adam"}, "icml2020"),
        ({"prior_precision": -1.0}, "prior_precision"),
        ({"prior_mean": [torch.zeros(3)]}, "1 tensors for 4 parameters"),
        ({"prior_precision": [torch.zeros(1)] * 4}, "shape"),
        ({"prior_mean": float("nan")}, "prior_mean"),
        ({"betas": 0.9}, "betas"),
        ({"betas": ("a", 0.9)}, "betas"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"mc_samples": True}, "mc_samples"),
        ({"weight_decay": None}, "weight_decay"),
        ({"ess": 10**400}, "ess"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    from helpers import no_type_hook

    with no_type_hook(), pytest.raises(ValueError, match=words):
        small_ivon(network(), **settings)


def test_parameters_without_a_distribution_are_refused():
    with pytest.raises(ValueError, match="meta device"):
        IVON(nn.Linear(2, 2, device="meta").parameters(), lr=0.1, ess=10)
    with pytest.raises(ValueError, match="complex64"):
        IVON([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1, ess=10)
    with pytest.raises(ValueError, match="gaps in memory"):
        IVON([nn.Parameter(torch.zeros(4, 4)[:, :2])], lr=0.1, ess=10)
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = IVON(embedding.parameters(), lr=0.1, ess=10)
    before = weights(embedding)
    with pytest.raises(RuntimeError, match="sparse"):
        with optimizer.sampled_params(train=True):
            embedding(torch.tensor([1])).sum().backward()
    assert same(weights(embedding), before)
    with pytest.raises(ValueError, match="samples=-1"):
        optimizer.predict(embedding, torch.tensor([1]), samples=-1)


def test_an_empty_parameter_and_one_of_a_single_number_are_fine():
    parameters = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor(1.0))]
    optimizer = IVON(parameters, lr=0.1, ess=10)
    with optimizer.sampled_params(train=True):
        (parameters[1].square() + parameters[0].sum()).backward()
    optimizer.step()
    assert parameters[1] != 1.0


CHANGES = {
    "one entry": lambda model: model[0].weight[0, 0].fill_(5.0),
    "a longer dtype": lambda model: model.to(torch.float64),
    "a shorter dtype": lambda model: model.to(torch.bfloat16),
    "another order of axes": lambda model: setattr(
        model[0].weight, "data", model[0].weight.data.T.contiguous().T
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_from_outside_leaves_the_other_means_although_the_weights_are_a_sample(change):
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model, prefetch_sample=True)
    train(model, optimizer, x, y, 3)
    before = [mean.clone() for mean in optimizer.posterior().mean]
    with torch.no_grad():
        change(model)
    for index, (old, new) in enumerate(zip(before, optimizer.posterior().mean, strict=True)):
        changed = old.to(new.dtype) != new
        written = index == 0 and change is CHANGES["one entry"]
        assert int(changed.sum()) == int(written), index


def test_predictions_under_inference_mode_may_come_first():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    with torch.inference_mode():
        optimizer.predict(model, x, samples=2)
    train(model, optimizer, x, y, 2)
    assert optimizer.refused_steps == 0


def test_a_step_inside_a_block_is_refused():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    for _ in range(2):
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(x), y).backward()
            with pytest.raises(RuntimeError, match="leave the block"):
                optimizer.step()
    optimizer.step()


def test_a_learning_rate_that_is_not_a_number_changes_nothing():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    train(model, optimizer, x, y, 1)
    before = weights(model)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="learning rate is nan"):
        train(model, optimizer, x, y, 1)
    assert same(weights(model), before)


def test_precisions_stay_finite_beyond_the_range_of_gradients():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = IVON([parameter], lr=0.1, ess=1e12, betas=(0.9, 0.9))
    for scale in (3e38, -3e38, 0.0, 1.0):
        with optimizer.sampled_params(train=True):
            parameter.grad = torch.full((3,), scale)
        optimizer.step()
        assert parameter.isfinite().all()
        assert optimizer.state[parameter]["precision"].isfinite().all()


def test_a_new_layout_of_memory_takes_the_state_along():
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    optimizer = IVON(model.parameters(), lr=0.1, ess=1e12)
    x = torch.randn(2, 3, 8, 8)

    def step():
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            model(x).square().mean().backward()
        optimizer.step()

    step()
    before, precision = weights(model), optimizer.posterior().precision
    saved = copy.deepcopy(optimizer.state_dict())
    model.to(memory_format=torch.channels_last)
    assert same([p.contiguous() for p in optimizer.posterior().precision], precision)
    optimizer.param_groups[0]["lr"] = 0.0
    step()
    for a, b in zip(weights(model), before, strict=True):
        torch.testing.assert_close(a, b)
    optimizer.load_state_dict(saved)  # contiguous, into weights that are not
    assert same([w.contiguous() for w in weights(model)], before)
    model.to(torch.float64)
    x = x.double()
    step()
    assert optimizer.state[model.weight]["mean"].dtype == torch.float64
    model.weight.data = torch.zeros(4, 3, 3, 6, dtype=torch.float64)[..., :3]
    with pytest.raises(ValueError, match="gaps in memory"):
        step()


def test_a_parameter_that_is_frozen_on_the_way_holds_the_mean():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model, prefetch_sample=True)
    train(model, optimizer, x, y, 2)
    first = model[0].weight
    mean = optimizer.state[first]["mean"].clone()
    first.requires_grad_(False)
    assert not torch.equal(first, mean)
    assert torch.equal(model.state_dict()["0.weight"], mean)
    optimizer.zero_grad()
    for training in (True, False):
        with optimizer.sampled_params(train=training):
            assert torch.equal(first, mean)
            if training:
                nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(first, mean)
    with torch.no_grad():
        first.fill_(0.25)
    first.requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, x, y, 1)
    assert torch.equal(optimizer.posterior().mean[0], torch.full_like(first, 0.25))
    with optimizer.sampled_params(train=True):
        assert not torch.equal(first, torch.full_like(first, 0.25))


class Tied(nn.Module):
    """Two layers with one weight, and a parameter of its own; not called itself."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 5), nn.Linear(5, 5)
        self.decode.weight = self.encode.weight
        self.scale = nn.Parameter(torch.ones(5))

    def loss(self, x):
        return (self.decode(self.encode(x).tanh()) * self.scale - x).square().mean()


def test_prefetched_weights_are_saved_as_the_mean_wherever_they_are(tmp_path):
    model = Tied()
    optimizer = small_ivon(model, prefetch_sample=True)
    x, _ = classification()
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            model.loss(x).backward()
        optimizer.step()
    saved = model.state_dict()
    mean = optimizer.state[model.encode.weight]["mean"]
    assert not torch.equal(model.encode.weight, mean)
    assert torch.equal(saved["encode.weight"], mean) and torch.equal(saved["decode.weight"], mean)
    assert torch.equal(saved["scale"], optimizer.state[model.scale]["mean"])
    torch.save(model, tmp_path / "model.pt")  # as it is, sample and all
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again.encode.weight, model.encode.weight)


def test_the_mean_comes_back_when_drawing_fails(monkeypatch):
    from iblr.torch import paths

    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    optimizer = small_ivon(model)
    before, real, calls = weights(model), paths.draw, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        real(*arguments)

    monkeypatch.setattr(paths, "draw", failing)
    with pytest.raises(MemoryError), optimizer.sampled_params():
        pass
    assert same(weights(model), before)
    assert len(calls) == 2


def test_the_mean_is_not_asked_for_inside_a_block():
    model, (x, _) = network(), classification()
    optimizer = small_ivon(model)
    with pytest.raises(RuntimeError, match="leave the block"), optimizer.sampled_params(train=True):
        optimizer.predict(model, x, samples=0)


def test_probabilities_are_averaged_in_float32():
    model = network().to(torch.bfloat16)
    x, _ = classification()
    found = small_ivon(model).predict(model, x.to(torch.bfloat16), samples=50)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(-1), torch.ones(64), rtol=0, atol=4e-3)


def test_a_closure_that_raises_or_returns_nothing():
    model, (x, y) = network(), classification()
    optimizer = small_ivon(model, mc_samples=2)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if len(calls) == 2:
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        optimizer.step(closure)
    assert optimizer.step(closure) is None
    assert optimizer.param_groups[0]["draws"] == 1


def test_distributed_checkpoints_can_create_the_state():
    from torch.distributed.checkpoint import state_dict as checkpoints

    model, (x, y) = network(), classification()
    optimizer = small_ivon(model)
    train(model, optimizer, x, y, 3)
    kept = copy.deepcopy(checkpoints.get_optimizer_state_dict(model, optimizer))
    other = network(seed=4)
    again = small_ivon(other)
    checkpoints.set_optimizer_state_dict(other, again, kept)
    assert same(weights(other), weights(model))
    optimizer.zero_grad()
    train(model, optimizer, x, y, 3)
    train(other, again, x, y, 3)
    assert same(weights(other), weights(model))


def test_gradients_between_blocks_are_found():
    model, (x, y) = network(), classification()
    head = nn.Linear(3, 3)
    optimizer = IVON([*model.parameters(), *head.parameters()], lr=0.1, ess=64, mc_samples=2)
    for _ in range(2):
        with optimizer.sampled_params(train=True):
            nn.functional.cross_entropy(model(x), y).backward()
    head(model(x).detach()).sum().backward()
    with pytest.raises(RuntimeError, match="not taken at a sample"):
        optimizer.step()


def test_a_seed_is_a_number_however_it_is_written():
    draws = []
    for seed in (3, np.int64(3)):
        model = network()
        with small_ivon(model, seed=seed).sampled_params():
            draws.append(weights(model))
    assert same(*draws)
