"""Figure 2c: a density with kinks, which has no Hessian there."""

from iblr.reproduce.gallery import Setting, plane_experiment

EXPERIMENT = plane_experiment(
    "laplace",
    "Correlated Laplace",
    "Figure 2c",
    "Smooth approximations of a target that is not smooth: the reparameterisation trick needs no "
    "Hessian of it.",
    Setting(samples=25, step_size=0.003, weight_rate=0.01, steps=200_000, quick=(1, 2, 5)),
)
