"""Uncertainty for deep learning in PyTorch: optimisers that learn a Gaussian over the weights.

`IVON` is the Adam-like optimiser of [LSK20], figure 1; `VOGN` and `Vadam` are what it is compared
with. Needs `pip install "iblr[torch]"`.
"""

from iblr.torch.comparison import VOGN as VOGN
from iblr.torch.comparison import Vadam as Vadam
from iblr.torch.ivon import IVON as IVON
from iblr.torch.posterior import MeanField as MeanField
