"""Figures 2d and 5b: two bent modes."""

from iblr.reproduce.gallery import Setting, plane_experiment

EXPERIMENT = plane_experiment(
    "double-banana",
    "Double banana",
    "Figures 2d and 5b",
    "The mixture approximates the two skewed modes better and better as the number of components "
    "grows.",
    Setting(samples=50, step_size=0.0015, weight_rate=0.01, steps=60_000, quick=(1, 4, 7, 14)),
)
