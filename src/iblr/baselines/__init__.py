"""The methods that the paper compares with, each a rule or an estimator of the same `fit`.

| method | rule | estimator |
|---|---|---|
| black-box VI with Adam (BBVI-rep, -hess, -stl) | `Bbvi()` | `Rep`, `Hess`, `Stl` |
| the Bayesian learning rule with a line search | `blr_step` | `Rep`, `Hess`, `Stl` |
| VOGN, Khan et al. 2018 | `natural_gradient_step` | `Vogn()` |
| VOGN carried over to mixtures, which fails | `natural_gradient_step` | `MixtureVogn()` |
| Vadam, Khan et al. 2018 | `vadam_step` | `Vadam()` |
| natural gradients by reverse mode, Salimbeni et al. 2018 | `Salimbeni()` | `Rep`, `Hess`, `Stl` |
| manifold Gaussian VB, Tran et al. 2019 | `tran_step` | `Rep`, `Hess`, `Stl` |
| all Christoffel symbols, Song et al. 2018 | `song_step` | `Rep`, `Hess`, `Stl` |
"""

from iblr.baselines.bbvi import Bbvi as Bbvi
from iblr.baselines.blr import blr_step as blr_step
from iblr.baselines.mixture_vogn import MixtureVogn as MixtureVogn
from iblr.baselines.salimbeni import Salimbeni as Salimbeni
from iblr.baselines.song import song_step as song_step
from iblr.baselines.tran import tran_step as tran_step
from iblr.baselines.vadam import Vadam as Vadam
from iblr.baselines.vadam import vadam_step as vadam_step
from iblr.baselines.vogn import Vogn as Vogn
