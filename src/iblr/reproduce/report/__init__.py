"""The report of `iblr reproduce`: one page that needs no network."""

from collections.abc import Sequence
from pathlib import Path

from iblr.datasets.files import write_atomically
from iblr.reproduce.report.page import page
from iblr.reproduce.results import Result, ResultError


def write(folder: Path, results: Sequence[Result]) -> Path:
    """Write `index.html` into `folder`, whole or not at all, and return its path."""
    path = folder / "index.html"
    content = page(results).encode()
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ResultError(
            f"The report cannot be written to {folder}: {error.strerror}. Give another --out."
        ) from error
    return path
