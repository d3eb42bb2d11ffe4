"""Results made up for tests of the report: one experiment for each kind of picture and status."""

import dataclasses

import numpy as np

from iblr.reproduce import pictures
from iblr.reproduce.results import Result

ENVIRONMENT = {
    "iblr": "0.1.0",
    "jax": "0.10.2",
    "numpy": "2.4.6",
    "python": "3.11.7",
    "machine": "Linux x86_64, 2 CPUs",
    "revision": "6ab289b-dirty",
}


def result(name, title, section, **changes):
    made = Result(
        experiment=name,
        title=title,
        figure="Figure 1, left",
        claim="The improved rule needs no line search and is as fast as the original one.",
        status="done",
        reason="",
        mode="quick",
        seeds=5,
        plan_seeds=5,
        started="2026-11-16T08:45:00+00:00",
        seconds=83.4,
        environment=ENVIRONMENT,
        tasks={"iBLR/seed 0": {"seconds": 3.25, "step_size": 0.01}},
        section=section,
    )
    return dataclasses.replace(made, **changes)


def claim(text="The precision stays positive definite", holds=True, **changes):
    made = pictures.Claim(text, "0 of 1 200 steps rejected", "not stated", holds)
    return dataclasses.replace(made, **changes)


def curves(rng):
    x = np.unique(np.geomspace(1, 1e5, 300).round())

    def losses(rate, noise=0.05, count=5):
        clean = 300 * np.exp(-x / rate) + 2 / np.sqrt(x) + 1e-3
        return clean * np.exp(noise * rng.standard_normal((count, len(x))).cumsum(1) / 3)

    made = []
    for name, rate in (
        ("iBLR", 800),
        ("BLR (line search)", 2000),
        ("BBVI-Adam", 6000),
        ("VOGN", 3500),
    ):
        runs = losses(rate)
        made.append(
            pictures.Curve(
                name,
                x,
                np.median(runs, 0),
                runs.min(0),
                runs.max(0),
                runs if name == "iBLR" else None,
            )
        )
    died = losses(2500, count=1)[0]
    died[200:] = np.nan
    made.append(pictures.Curve("BLR, t < 1 & no search", x, died))
    for name, rate in (("iBLR", 850), ("BBVI-Adam", 6500)):
        at = np.array([1e2, 1e3, 1e4, 1e5])
        read = np.interp(at, x, losses(rate, 0.0, 1)[0])
        made.append(pictures.Curve(name, at, read, published=True))
    return pictures.Curves(
        "Distance to the optimum, K < 3 & t",
        pictures.Axis("iterations", log=True, range=(1.0, 1e5)),
        pictures.Axis("‖mean − optimum‖", log=True, range=(1e-3, 1e3)),
        tuple(made),
        caption="Medians over five seeds, with bands from the lowest to the highest.",
    )


def linear_curves(rng):
    x = np.arange(1, 5001.0)
    y = 52 + 60 * np.exp(-x / 300) + rng.standard_normal(len(x)) * 0.4
    return pictures.Curves(
        "Negative log likelihood of held-out rows",
        pictures.Axis("iterations"),
        pictures.Axis("loss"),
        (
            pictures.Curve("iBLR", x, y),
            pictures.Curve("iBLR (Hess)", x, y + 1),
            pictures.Curve("Vadam", x, y + 8 * np.exp(-x / 2000), y + 3, y + 12),
            pictures.Curve("Adam", x, np.where(x > 4000, np.inf, y + 4)),
        ),
    )


def banana(x, y):
    u, v = np.meshgrid(x, y)
    return np.exp(-0.5 * (u**2 / 2 + 4 * (v - u**2 / 3 + 1) ** 2))


def plane():
    x, y = np.linspace(-4, 4, 161), np.linspace(-3, 4.5, 151)
    return pictures.Plane(
        "Posterior and its Gaussian approximations",
        x,
        y,
        banana(x, y),
        ellipses=(
            pictures.Ellipse("iBLR", np.array([0.0, -0.4]), np.array([[1.2, 0.1], [0.1, 0.5]])),
            pictures.Ellipse(
                "Laplace", np.array([0.2, -1.0]), np.array([[0.6, 0.2], [0.2, 0.2]]), dashed=True
            ),
            pictures.Ellipse("BLR", np.zeros(2), np.full((2, 2), np.nan)),
        ),
        points=(("mode", 0.0, -1.0), ("start", 2.5, 3.0)),
        caption="Ellipses at Mahalanobis distance one.",
    )


def gallery(rng, count=8):
    x, y = np.linspace(-4, 4, 101), np.linspace(-3, 4, 101)
    exact = banana(x, y)
    u, v = np.meshgrid(x, y)

    def mixture(components):
        means = np.linspace(-2, 2, components)
        parts = [
            np.exp(-(m**2) / 4) * np.exp(-4 * (u - m) ** 2 - 4 * (v - m**2 / 3 + 1) ** 2)
            for m in means
        ]
        return np.sum(parts, 0)

    panels = tuple(
        pictures.Panel(f"K = {k}", mixture(k), f"KL {1.3 / k:.2g}, {rng.integers(9)} pruned")
        for k in range(1, count + 1)
    )
    return pictures.Gallery(
        "A banana by mixtures of K Gaussians", x, y, exact, panels, caption="Same contours in all."
    )


def marginals(rng, coordinates=20):
    centres = rng.normal(size=(coordinates, 2)) * 4
    points = np.linspace(-15, 15, 180)[None, :] + centres.mean(1)[:, None]

    def densities(width):
        gaps = points[:, None, :] - centres[:, :, None]
        return (np.exp(-0.5 * (gaps / width) ** 2) / width).mean(1)

    series = (
        pictures.Series("exact", densities(1.0)),
        pictures.Series("iBLR", densities(1.1)),
        pictures.Series("BBVI-Adam", densities(2.0)),
    )
    return pictures.Marginals(
        "Marginals of all coordinates", points, series, shown=9, caption="Twenty of them."
    )


def all_results(seed=0):
    rng = np.random.default_rng(seed)
    table = pictures.Table(
        "Final values",
        ("method", "step size", "loss", "seconds", "rejected steps", "lowest eigenvalue"),
        (
            ("iBLR", "0.01", "0.0021", "12.1", "0", "1.3e-4"),
            ("BLR", "4e-05", "–", "8.4", "17", "<0"),
        ),
        caption="At the last iteration.",
    )
    full = pictures.Section(
        claims=(
            claim(why="Counted over five seeds."),
            claim(
                "iBLR is faster than BBVI & <VOGN>",
                False,
                ours="9.7 s",
                published="4.1 s",
                why="The paper's implementation is in another language, and its timer stops early.",
            ),
            claim("With 1e6 iterations all agree", None, ours="–"),
        ),
        pictures=(curves(rng), linear_curves(rng)),
        tables=(table,),
        settings=(("step size", "0.01"), ("minibatch", "168 of 3 341"), ("prior", "N(0, 217 I)")),
        notes=(
            "The caption says K < 3; the code uses K = 3.",
            "The paper's shape matrix is a precision.",
        ),
    )
    return [
        result("logistic", "Bayesian logistic regression", full),
        result(
            "murphy",
            "Posterior in the plane",
            pictures.Section(claims=(claim(),), pictures=(plane(),)),
            figure="Figure 2",
            seconds=2.5,
        ),
        result(
            "banana",
            "Mixtures on a banana",
            pictures.Section(
                claims=(claim(), claim("More components help")), pictures=(gallery(rng),)
            ),
            figure="Figures 5 and 6",
            seeds=1,
            plan_seeds=1,
        ),
        result(
            "mixt",
            "Mixture of Student's t in 20 dimensions",
            pictures.Section(claims=(claim("All modes are found"),), pictures=(marginals(rng),)),
            figure="Figure 4",
            status="partial",
            reason="Stopped by --limit after 60 s: 3 of 5 seeds are done.",
        ),
        result(
            "cytof",
            "Gamma factor model",
            None,
            figure="Figure 8",
            status="waiting",
            reason="The data set is not on this machine: see `iblr.datasets.cytof`.",
            seconds=0.0,
            tasks={},
        ),
        result(
            "cifar",
            "CIFAR-10 <deep> & wide",
            None,
            figure="Figure 3",
            status="not run",
            reason="Only run in full mode.",
            seconds=0.0,
            tasks={},
        ),
    ]
