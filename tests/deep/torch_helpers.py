"""What the tests of iblr.torch share."""

import torch
from torch import nn

from iblr.torch import IVON


def regression(rows=200, columns=5, seed=0):
    """Inputs and targets of a linear model with noise of variance one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    w = torch.randn(columns, generator=generator)
    y = x @ w + torch.randn(rows, generator=generator)
    return x, y


def linear(columns=5, dtype=torch.float32):
    """A linear model that begins at zero."""
    model = nn.Linear(columns, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    return model


def network(seed=0, width=16):
    """Two layers, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def classification(rows=64, seed=1):
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 1).long()


def half_square(model, x, y):
    """The mean loss whose sum is the negative log-likelihood."""
    return 0.5 * (model(x)[:, 0] - y).square().mean()


def train(model, optimizer, x, y, steps, loss=nn.functional.cross_entropy):
    """Steps on all rows, in blocks."""
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(optimizer.mc_samples):
            with optimizer.sampled_params(train=True):
                loss(model(x), y).backward()
        optimizer.step()


def weights(model):
    """A copy of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(first, second):
    """Whether all tensors are equal, bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def small_ivon(model, **settings):
    """IVON with settings that move fast."""
    return IVON(
        model.parameters(),
        **({"lr": 0.1, "ess": 64, "hess_init": 0.5, "betas": (0.9, 0.99)} | settings),
    )
