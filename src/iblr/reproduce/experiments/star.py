"""A star of five Gaussians: in the authors' code, not in the paper."""

from iblr.reproduce.gallery import Setting, plane_experiment

EXPERIMENT = plane_experiment(
    "star",
    "Star",
    "not in the paper",
    "Ten components find five narrow rays.",
    Setting(samples=50, step_size=0.01, weight_rate=0.05, steps=10_000, quick=(1, 5, 10)),
)
