"""Riemannian variational inference: the improved Bayesian learning rule in JAX.

`fit` turns a log density into a posterior approximation; see Lin, Schmidt & Khan, "Handling the
Positive-Definite Constraint in the Bayesian Learning Rule", ICML 2020 ([LSK20] in the docstrings).
"""

from iblr import baselines as baselines
from iblr import calibration as calibration
from iblr import datasets as datasets
from iblr import geometry as geometry
from iblr.diagnose import diagnose as diagnose
from iblr.diagnostics import elbo as elbo
from iblr.estimators import (
    AtMean as AtMean,
)
from iblr.estimators import (
    Hess as Hess,
)
from iblr.estimators import (
    Rep as Rep,
)
from iblr.estimators import (
    Secant as Secant,
)
from iblr.estimators import (
    Stl as Stl,
)
from iblr.families.curvature import Parameterisation as Parameterisation
from iblr.families.custom import custom as custom
from iblr.families.definition import positive_definite as positive_definite
from iblr.families.diagonal import DiagonalGaussian as DiagonalGaussian
from iblr.families.exponential import Exponential as Exponential
from iblr.families.gamma import Gamma as Gamma
from iblr.families.gaussian import Gaussian as Gaussian
from iblr.families.inverse_gaussian import InverseGaussian as InverseGaussian
from iblr.families.mixture import GaussianMixture as GaussianMixture
from iblr.families.product import Product as Product
from iblr.families.skew_gaussian import SkewGaussian as SkewGaussian
from iblr.fit import FitError as FitError
from iblr.fit import fit as fit
from iblr.laplace import laplace as laplace
from iblr.loop import init as init
from iblr.loop import step as step
from iblr.metrics import mmd2 as mmd2
from iblr.posterior import Posterior as Posterior
from iblr.rule import (
    geodesic_step as geodesic_step,
)
from iblr.rule import (
    improved_step as improved_step,
)
from iblr.rule import (
    line_search_step as line_search_step,
)
from iblr.rule import (
    natural_gradient_step as natural_gradient_step,
)
from iblr.status import Status as Status
from iblr.support import interval as interval
from iblr.support import ordered as ordered
from iblr.support import positive as positive
from iblr.support import real as real
from iblr.support import simplex as simplex
from iblr.target import Target as Target

__version__ = "0.1.0"
