"""Figure 4d: a network with two hidden layers."""

from iblr.reproduce.pictures import Section
from iblr.reproduce.runner import Experiment

EXPERIMENT = Experiment(
    name="bayesian-mlp",
    title="Bayesian network on CIFAR-10",
    figure="Figure 4d",
    claim="The Adam-like optimiser does about as well as VOGN.",
    tasks=lambda plan: (),
    section=lambda plan, raw: Section(),
    waiting="it waits for the Adam-like optimiser, which this version does not have",
)
