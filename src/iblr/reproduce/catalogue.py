"""All experiments, in the order of the report."""

from iblr.reproduce.experiments import (
    abalone,
    banana,
    bayesian_mlp,
    beta_binomial,
    bnn,
    double_banana,
    gamma_factor,
    ionosphere,
    laplace,
    mixt_20,
    mixt_300,
    salimbeni,
    star,
    toy_logistic,
)

EXPERIMENTS = (
    toy_logistic.EXPERIMENT,
    beta_binomial.EXPERIMENT,
    laplace.EXPERIMENT,
    banana.EXPERIMENT,
    double_banana.EXPERIMENT,
    star.EXPERIMENT,
    bnn.EXPERIMENT,
    mixt_20.EXPERIMENT,
    mixt_300.EXPERIMENT,
    abalone.EXPERIMENT,
    ionosphere.EXPERIMENT,
    gamma_factor.EXPERIMENT,
    bayesian_mlp.EXPERIMENT,
    salimbeni.EXPERIMENT,
)
