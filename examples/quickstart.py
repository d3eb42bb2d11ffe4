"""Fit a posterior, say what came out, and draw it: a logistic regression with two weights.

Run it with `make run`. It takes a few seconds, most of them compilation, and writes the picture
`quickstart.png` into the current directory.
"""

import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import iblr

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BEST_NEG_ELBO = 3.3074  # of all Gaussians, by quadrature and BFGS instead of sampling
BLUE, ORANGE = "#0b5fa5", "#c8500a"


def log_likelihood(weights, rows):
    """Sum over the rows of a batch of log p(label | features, weights), labels -1 and +1."""
    x, y = rows
    return jax.nn.log_sigmoid(y * (x @ weights)).sum()


def main():
    """Fit, report, draw."""
    started = time.perf_counter()
    data = iblr.datasets.murphy()
    target = iblr.Target(
        log_likelihood=log_likelihood,
        data=(data.x, data.y),
        prior=iblr.Gaussian.from_covariance(jnp.zeros(2), 100.0 * jnp.eye(2)),
    )
    start = iblr.Gaussian.standard(2)

    print("Logistic regression, 60 points, two weights, prior N(0, 100 I).")
    posterior = iblr.fit(target, init=jnp.zeros(2), key=jax.random.key(0), progress=True)
    laplace = iblr.laplace(target, start, key=jax.random.key(1), progress=False)

    print()
    print(posterior.summary())
    print()
    fitted = iblr.elbo(target, posterior.family, jax.random.key(2), draws=100_000)
    at_mode = iblr.elbo(target, laplace.family, jax.random.key(2), draws=100_000)
    print(
        f"Measured once more, with 100 000 draws, the negative ELBO is {-fitted.value:.3f} ± "
        f"{fitted.standard_error:.3f}.\n"
        f"The best Gaussian there is, found by quadrature, has {BEST_NEG_ELBO}: a difference of "
        f"{-fitted.value - BEST_NEG_ELBO:+.3f} nats.\n"
        f"Laplace's approximation, which looks at the mode only, has {-at_mode.value:.0f}: the "
        "classes are nearly\nseparable, so the posterior leans to large weights, off its mode."
    )
    draw(target, posterior, laplace, "quickstart.png")
    print(f"Drawn in quickstart.png. {time.perf_counter() - started:.0f} s in all.")


def draw(target, posterior, laplace, path):
    """The exact posterior with both approximations, and the ELBO on the way."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")

    x, y, density = exact_density(target)
    levels = [level_of(density, mass) for mass in (0.99, 0.9, 0.5)]
    left.contourf(x, y, density, [*levels, density.max()], colors=["#e9e9e9", "#d0d0d0", "#b0b0b0"])
    left.contour(x, y, density, levels, colors="#888888", linewidths=0.6)
    left.fill([], [], color="#d0d0d0", label="exact: 50, 90, 99 % regions")
    for family, colour, style, name in (
        (posterior.family, BLUE, "-", "iblr.fit"),
        (laplace.family, ORANGE, "--", "iblr.laplace"),
    ):
        mean, half = np.asarray(family.mean), np.asarray(family.factor)
        for mass in (0.5, 0.9):
            path_ = ellipse(mean, half, mass)
            label = f"{name}: 50, 90 % ellipses" if mass == 0.5 else None
            left.plot(*path_, color=colour, linestyle=style, linewidth=1.8, label=label)
        left.plot(*mean, "o", color=colour, markersize=5)
    left.set(xlim=(-6, 32), ylim=(-4, 18), xlabel="first weight", ylabel="second weight")
    left.set_title("The posterior and two Gaussians")
    left.legend(loc="upper left", fontsize=9)

    trace = posterior.trace
    right.axhline(-BEST_NEG_ELBO, color="black", linewidth=1, label="best Gaussian")
    averaged = np.cumsum(trace.elbo[::-1])[::-1] / np.arange(len(trace.elbo), 0, -1)
    right.plot(trace.num_gradients, trace.elbo, ".", color=BLUE, alpha=0.4, label="of a batch")
    right.plot(trace.num_gradients, averaged, color=BLUE, label="mean from here on")
    right.set_ylim(-BEST_NEG_ELBO - 4, -BEST_NEG_ELBO + 2)
    right.set(xlabel="gradients", ylabel="ELBO in nats (higher is better)")
    right.set_title("The fit on its way")
    right.legend(loc="lower right", fontsize=9)
    right.grid(alpha=0.3)

    figure.savefig(path, dpi=130)
    plt.close(figure)


def exact_density(target, points=321):
    """The posterior on a grid, normalised to sum to one."""
    x, y = np.linspace(-10, 50, points), np.linspace(-10, 30, points)
    grid = jnp.asarray(np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2), float)
    log_density = target.whole(iblr.Gaussian.standard(2).structure, target.data)
    values = np.asarray(jax.vmap(log_density)(grid)).reshape(points, points)
    density = np.exp(values - values.max())
    return x, y, density / density.sum()


def level_of(density, mass):
    """The height above which a share `mass` of the density lies."""
    heights = np.sort(density.ravel())[::-1]
    return heights[np.searchsorted(np.cumsum(heights), mass)]


def ellipse(mean, factor, mass):
    """The ellipse that holds a share `mass` of the Gaussian with covariance factor' factor."""
    angle = np.linspace(0, 2 * np.pi, 200)
    radius = np.sqrt(-2 * np.log(1 - mass))  # chi-squared with two degrees of freedom
    circle = radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (mean + circle @ factor).T


if __name__ == "__main__":
    main()
