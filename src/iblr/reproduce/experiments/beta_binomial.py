"""Figure 2b: a skewed posterior of two parameters."""

from iblr.reproduce.gallery import Setting, plane_experiment

EXPERIMENT = plane_experiment(
    "beta-binomial",
    "Beta-binomial model of cancer mortality",
    "Figure 2b",
    "The mixture matches the skewed posterior better and better as the number of components grows.",
    Setting(
        samples=16,
        step_size=0.004,
        weight_rate=0.01,
        steps=50_000,
        quick=(1, 2, 4, 8),
        words="which the paper does not state",
    ),
    notes=(
        "The paper states no settings here. Coordinates are centred at the pooled death rate and "
        "the mean size of a city; in an earlier code of the authors the start is far from the "
        "mode.",
        "The list K = 1 to 8 is that of the earlier code.",
    ),
)
