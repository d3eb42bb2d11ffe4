"""Data sets of the paper's experiments, one loader each, as NumPy arrays with a description.

Small ones ship with the package. The others are read from the user's disk, checked against a hash,
and are downloaded only where `download=True` is written.
"""

from iblr.datasets.cells import Cells as Cells
from iblr.datasets.cells import cytof as cytof
from iblr.datasets.cytometry import cytometry as cytometry
from iblr.datasets.files import DataError as DataError
from iblr.datasets.files import MissingDataError as MissingDataError
from iblr.datasets.files import cache_directory as cache_directory
from iblr.datasets.images import Images as Images
from iblr.datasets.images import cifar10 as cifar10
from iblr.datasets.images import fashion_mnist as fashion_mnist
from iblr.datasets.shipped import Dataset as Dataset
from iblr.datasets.shipped import Mortality as Mortality
from iblr.datasets.shipped import abalone as abalone
from iblr.datasets.shipped import cancer_mortality as cancer_mortality
from iblr.datasets.shipped import ionosphere as ionosphere
from iblr.datasets.shipped import murphy as murphy
from iblr.datasets.shipped import scale_columns as scale_columns
