"""Reads the mass-cytometry (CyTOF) files of `gamma_factor.py`: 6000 cells by 39 channels.

The data of the paper, 522 656 cells by 39 channels, come without a licence. These are genuine and
small: 1000 cells of each of two unstimulated controls in three batches, out of FlowRepository
FR-FCM-Z247 (Van Gassen et al. 2020), as they ship with the package CytoNormPy. Nothing is
downloaded from here; `HOW_TO_GET` says how to fetch them.
"""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

NAMES = tuple(
    f"Gates_PTLG0{batch}_Unstim_Control_{index}.fcs" for batch in (21, 28, 34) for index in (1, 2)
)
NUM_CELLS, NUM_CHANNELS = 6000, 39
COFACTOR = 5.0
HOW_TO_GET = (
    "pip download cytonormpy==1.0.2 --no-deps\n"
    "and give `--data` the wheel that this leaves, or a directory with it or with its files."
)


def load(path: Path) -> tuple[np.ndarray, list[str]]:
    """Cells in rows, arcsinh(x / 5), every channel standardised over all cells; channel names."""
    tables, names = [], None
    for name, content in _contents(path):
        table, channels = read_fcs(content, name)
        kept = [index for index, (_, marker) in enumerate(channels) if _is_marker(marker)]
        markers = [channels[index][1] for index in kept]
        if names is not None and markers != names:
            raise ValueError(f"{name} has other channels than the files before it: {markers}")
        names = markers
        tables.append(table[:, kept])
    cells = np.arcsinh(np.concatenate(tables) / COFACTOR)
    if names is None or cells.shape != (NUM_CELLS, NUM_CHANNELS):
        raise ValueError(f"expected {NUM_CELLS} cells by {NUM_CHANNELS}, but read {cells.shape}")
    return (cells - cells.mean(0)) / cells.std(0), names


def read_fcs(content: bytes, name: str = "file") -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Events in rows, and (short name, marker or "") of every column, of an FCS 3.x list file.

    Floating-point data with linear amplification only, which is what mass cytometers write.
    """
    if content[:4] != b"FCS3":
        raise ValueError(f"{name} is not an FCS 3.x file: it starts with {content[:6]!r}")
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
        raise ValueError(f"{name} does not hold a list of floating-point events")
    if any(float(part) != 0 for gain in gains for part in gain.split(",")):
        raise ValueError(f"{name} has channels with logarithmic amplification")
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
    if path.is_dir():
        found = {file.name: file for file in sorted(path.rglob("*.fcs"))}
        wheels = sorted(path.glob("cytonormpy-*.whl"))
        if wheels and not set(NAMES) <= set(found):
            yield from _contents(wheels[-1])
            return
        for name in NAMES:
            if name not in found:
                raise FileNotFoundError(f"no {name} under {path}. To get the files:\n{HOW_TO_GET}")
            yield name, found[name].read_bytes()
        return
    if not zipfile.is_zipfile(path):
        raise FileNotFoundError(f"no directory or wheel at {path}. To get it:\n{HOW_TO_GET}")
    with zipfile.ZipFile(path) as wheel:
        found = {Path(entry).name: entry for entry in wheel.namelist()}
        for name in NAMES:
            if name not in found:
                raise FileNotFoundError(f"no {name} in {path}. To get the files:\n{HOW_TO_GET}")
            yield name, wheel.read(found[name])
