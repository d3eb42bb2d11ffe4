"""Figure 5a: bent Gaussians."""

from iblr.reproduce.gallery import Setting, plane_experiment

EXPERIMENT = plane_experiment(
    "banana",
    "Banana",
    "Figure 5a",
    "The mixture fits better as the number of components grows.",
    Setting(
        samples=50,
        step_size=0.003,
        weight_rate=0.01,
        steps=60_000,
        quick=(1, 4, 8),
        words="which the paper does not state",
    ),
    densities=("banana-0.03", "banana-0.1"),
    notes=(
        "The paper states neither the bend nor the list of K: both bends of Haario et al. are "
        "shown, 0.03 and 0.1.",
    ),
)
