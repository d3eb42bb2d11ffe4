"""The mass-cytometry (CyTOF) data of the Gamma factor model, from the user's disk only.

They come without a licence: they are not shipped and not downloaded from here.
"""

import hashlib
import io
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from iblr.datasets.files import DataError, MissingDataError, check_hash, place

BLOB_HASH = "eb8765e3b14d2f08eb70a8b029044bd5ce5f267f"  # as `git hash-object` prints it
ADVICE = (
    "Get data/cytof.mat of https://github.com/davidaknowles/gamma_sgvb and pass where it is as "
    "`path=`. It has no licence, so that it is neither shipped nor downloaded."
)


class Cells(NamedTuple):
    """Measurements of single cells, and where they come from.

    Attributes:
        x: one row a cell, one column a channel.
        description: what the numbers are, with source, licence and citation.
    """

    x: Float[np.ndarray, "n d"]
    description: str


def cytof(path: str | os.PathLike[str] | None = None) -> Cells:
    """The CyTOF data of figure 4c: 522 656 cells by 39 channels, as they are in the file.

    Nothing is standardised, and the cells are in the order of the file; the paper standardises
    every channel over all cells and trains with the first 300 000.

    Args:
        path: the file `cytof.mat`, or a folder with it. Left out: the folder `cytof` in the cache
            directory.
    """
    file = _file(place("cytof", path))
    content = file.read_bytes()
    check_hash(git_blob_hash(content), BLOB_HASH, file, kind="git blob hash", advice=ADVICE)
    matrix = _matrix(content, file)
    cells_in_columns = matrix.shape[0] < matrix.shape[1]
    return Cells(
        matrix.T if cells_in_columns else matrix,
        "CyTOF: mass cytometry of 522 656 cells, 39 channels. Used by Knowles (2015), Stochastic "
        "gradient variational Bayes for gamma approximating distributions, arXiv:1509.01631; "
        "cytof.mat of https://github.com/davidaknowles/gamma_sgvb. No licence is stated: do not "
        "redistribute.",
    )


def git_blob_hash(content: bytes) -> str:
    """The hash by which git names a file of this content.

    Example:
        >>> git_blob_hash(b"")
        'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def _file(path: Path) -> Path:
    file = path / "cytof.mat" if path.is_dir() else path
    if file.is_file():
        return file
    raise MissingDataError(f"There is no cytof.mat at {path}. {ADVICE}")


def _matrix(content: bytes, file: Path) -> Float[np.ndarray, "n d"]:
    """The variable `y` of a MATLAB file, or the only matrix of numbers in it."""
    from scipy.io import loadmat  # takes a while, and few programs come here

    try:
        variables = loadmat(io.BytesIO(content))
    except (NotImplementedError, ValueError) as error:
        raise DataError(f"{file} is not a MATLAB file that SciPy reads ({error}).") from error
    matrices = {name: value for name, value in variables.items() if _is_matrix(value)}
    if "y" not in matrices and len(matrices) != 1:
        raise DataError(f"{file} should hold one matrix, but holds {sorted(matrices)}.")
    matrix = matrices["y"] if "y" in matrices else next(iter(matrices.values()))
    return np.asarray(matrix, matrix.dtype if matrix.dtype.kind == "f" else np.float64)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fiu" and min(value.shape) > 1
