"""Mass-cytometry data that are small and public, in place of those of the paper.

The data of the paper, 522 656 cells by 39 channels, come without a licence. These are genuine and
small, and ship with another package; nothing is downloaded from here.
"""

import hashlib
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from iblr.datasets.cells import Cells
from iblr.datasets.files import DataError, MissingDataError, check_hash, place

HASHES = {  # sha256 by batch and control
    (21, 1): "852c6c346168e4e39e7d990729d41aa6cd53d0794debeb73bc396292678f58b8",
    (21, 2): "53e2e57ef6a2c376ab43ce18b096e16d3043b1ea48c6a990b4fb2d08b6166bcd",
    (28, 1): "78b8d9afab4e79e72b6efe8c4f4e50e452ec82936481de1b7056b2f11d88dcb1",
    (28, 2): "d299ad706a5d643b2bc3ac4b49899a76b7cd2f6bc214a1fe6c1f4aada14b04f4",
    (34, 1): "413a942f6fd62a0743c65fd3b3cbe5f5952771bfefcfa898f6a5dfa54ca59d43",
    (34, 2): "2b7c0a98b1ac11f9198a1e04f6193383226c92e9ac396fc393a6bf36b9a185cd",
}
NUM_CHANNELS = 39
COFACTOR = 5.0
ADVICE = (
    "Get them by `pip download cytonormpy==1.0.2 --no-deps` and pass where the wheel is as `path=`."
)


def file_name(batch: int, control: int) -> str:
    """Of one of the six files."""
    return f"Gates_PTLG0{batch}_Unstim_Control_{control}.fcs"


def cytometry(path: str | os.PathLike[str] | None = None) -> Cells:
    """Mass cytometry of 6000 cells by 39 channels: stands in for the data of figure 4c.

    Every channel is arcsinh(x / 5), standardised over all cells.

    Args:
        path: the wheel of CytoNormPy 1.0.2, or a folder with it or with its files. Left out: the
            folder `cytometry` in the cache directory.
    """
    tables = []
    for name, content in _contents(place("cytometry", path)):
        table, channels = read_fcs(content, name)
        kept = [index for index, (_, marker) in enumerate(channels) if _is_marker(marker)]
        if len(kept) != NUM_CHANNELS:
            raise DataError(f"{name} has {len(kept)} markers, not {NUM_CHANNELS}. {ADVICE}")
        tables.append(table[:, kept])
    cells = np.arcsinh(np.concatenate(tables) / COFACTOR)
    return Cells(
        (cells - cells.mean(0)) / cells.std(0),
        "Mass cytometry of 6000 cells, 37 markers and two DNA channels: 1000 cells of each of two "
        "unstimulated controls in three batches of FlowRepository FR-FCM-Z247 (Van Gassen et al. "
        "2020, CytoNorm), as they ship with CytoNormPy 1.0.2. Its licence is unclear: not shipped.",
    )


def read_fcs(content: bytes, name: str = "file") -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Events in rows, and (short name, marker or "") of every column, of an FCS 3.x list file.

    Floating-point data with linear amplification only, which is what mass cytometers write.
    """
    if content[:4] != b"FCS3":
        raise DataError(f"{name} is not an FCS 3.x file: it starts with {content[:6]!r}")
    first, last = int(content[10:18]), int(content[18:26])
    text = content[first : last + 1].decode("utf-8", "replace")
    delimiter, body = text[0], text[1:].rstrip()
    # A delimiter inside of a value is written twice.
    words = body.removesuffix(delimiter).replace(2 * delimiter, "\0").split(delimiter)
    words = [word.replace("\0", delimiter) for word in words]
    keys = {key.upper(): value for key, value in zip(words[::2], words[1::2], strict=True)}

    columns, rows = int(keys["$PAR"]), int(keys["$TOT"])
    kind = {("F", 32): "f4", ("D", 64): "f8"}.get((keys["$DATATYPE"], int(keys["$P1B"])))
    widths = {keys[f"$P{index}B"] for index in range(1, columns + 1)}
    gains = {keys[f"$P{index}E"] for index in range(1, columns + 1)}
    if kind is None or len(widths) > 1 or keys["$MODE"] != "L":
        raise DataError(f"{name} does not hold a list of floating-point events")
    if any(float(part) != 0 for gain in gains for part in gain.split(",")):
        raise DataError(f"{name} has channels with logarithmic amplification")
    order = ">" if keys["$BYTEORD"].startswith(("4", "8")) else "<"
    # The header's own offset is 0 where it does not fit into eight digits.
    offset = int(content[26:34]) or int(keys["$BEGINDATA"])
    table = np.frombuffer(content, order + kind, rows * columns, offset).reshape(rows, columns)
    channels = [
        (keys[f"$P{index}N"], keys.get(f"$P{index}S", "").strip())
        for index in range(1, columns + 1)
    ]
    return table.astype(np.float64), channels


def _is_marker(marker: str) -> bool:
    """Markers and DNA: neither the bar code of the sample, nor the distance to a bead."""
    return bool(marker) and not re.fullmatch(r"BC\d|beadDist", marker)


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the six files, checked."""
    for (batch, control), expected in HASHES.items():
        name = file_name(batch, control)
        content = _content(path, name)
        actual = hashlib.sha256(content).hexdigest()
        check_hash(actual, expected, path / name, kind="sha256", advice=ADVICE)
        yield name, content


def _content(path: Path, name: str) -> bytes:
    found = sorted(path.rglob(name)) if path.is_dir() else []
    if found:
        return found[0].read_bytes()
    wheels = sorted(path.glob("cytonormpy-*.whl")) if path.is_dir() else [path]
    for wheel in wheels:
        if zipfile.is_zipfile(wheel):
            with zipfile.ZipFile(wheel) as archive:
                entries = [entry for entry in archive.namelist() if Path(entry).name == name]
                if entries:
                    return archive.read(entries[0])
    raise MissingDataError(f"There is no {name}, nor a wheel with it, at {path}. {ADVICE}")
