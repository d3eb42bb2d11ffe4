"""Figure 5c: the posterior of a network with two weights."""

from iblr.reproduce.gallery import Setting, plane_experiment

EXPERIMENT = plane_experiment(
    "bnn",
    "Bayesian neural network with two weights",
    "Figure 5c",
    "With many components the mixture matches a posterior of two joined rings.",
    Setting(
        samples=50,
        step_size=0.006,
        weight_rate=0.0,
        steps=20_000,
        quick=(10, 40, 80),
        words="as in the authors' code, whose start is narrower: means N(0, I / 10), covariances "
        "I / 10",
    ),
    notes=(
        "The authors' code multiplies the gradient of the log density by 0.25 and so fits "
        "p(z | y)^(1/4): their panel for K = 80 shows filled holes that the posterior does not "
        "have. Here the posterior itself is fitted, and compared with it.",
    ),
)
