"""Gaussians fitted by regressing gradients on points; see `iblr.regression.machine`."""

from iblr.regression.machine import advance as advance
from iblr.regression.pairs import num_pairs as num_pairs
from iblr.regression.state import Regression as Regression
from iblr.regression.state import begin as begin
