"""Results on disk: one JSON and one NPZ an experiment, with versions, seed and revision.

The JSON holds everything but arrays, for which it names an entry of the NPZ. Both are written to a
temporary name and moved into place, so that an interrupt leaves the last complete pair.
"""

import dataclasses
import io
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from iblr.datasets.files import write_atomically
from iblr.reproduce import pictures

FORMAT = 1
LIBRARIES = ("iblr", "jax", "jaxlib", "equinox", "optax", "numpy", "scipy")
ARRAY = "array"


class ResultError(RuntimeError):
    """A file of results cannot be read or written; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What is known of one experiment.

    Attributes:
        experiment: its name.
        title: of its section.
        figure: where the paper shows it.
        claim: what the paper says, in a sentence or two.
        status: "done", "partial" (interrupted), "not run" (data missing), "failed" or "waiting".
        reason: why it is not done.
        mode: "quick" or "full".
        seeds: how many were run.
        plan_seeds: how many were asked for.
        started: when, as ISO 8601.
        seconds: of computing, over all pieces of work.
        environment: versions, machine and revision.
        tasks: seconds and settings of every finished piece of work, by name.
        section: what to show; None where there is nothing yet.
    """

    experiment: str
    title: str
    figure: str
    claim: str
    status: str
    reason: str
    mode: str
    seeds: int
    plan_seeds: int
    started: str
    seconds: float
    environment: dict[str, str]
    tasks: dict[str, dict[str, Any]]
    section: pictures.Section | None


@cache
def environment() -> dict[str, str]:
    """Versions of the libraries, the machine, and the revision of a checkout."""
    found = {name: _version(name) for name in LIBRARIES}
    found["python"] = platform.python_version()
    found["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    found["revision"] = _revision()
    return found


def save(
    folder: Path, result: Result, raw: Mapping[str, Mapping[str, np.ndarray]] | None = None
) -> None:
    """Write one experiment; `raw` is what its pieces of work returned, by piece and name."""
    arrays = {f"{task}/{key}": a for task, kept in (raw or {}).items() for key, a in kept.items()}
    named = {f"raw/{name}": np.asarray(value) for name, value in arrays.items()}
    packed = _packed(result, "section", named)
    text = json.dumps({"format": FORMAT, **packed}, indent=1, allow_nan=True)
    try:
        write_arrays(folder / f"{result.experiment}.npz", named)
        write_atomically(folder / f"{result.experiment}.json", text.encode())
    except OSError as error:
        raise ResultError(
            f"Results cannot be written to {folder}: {error.strerror}. Give another --out."
        ) from error


def load(folder: Path, name: str) -> tuple[Result, dict[str, dict[str, np.ndarray]]] | None:
    """One experiment and its raw arrays, or None where there is none."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text())
        arrays = read_arrays(folder / f"{name}.npz")
        if fields.pop("format") != FORMAT:
            raise ValueError("written by another version")
        result = _unpacked(fields, arrays)
    except Exception as error:
        raise ResultError(
            f"The results {path.with_suffix('.*')} cannot be read ({error}). Move them away, or "
            "give another --out."
        ) from error
    raw: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        if key.startswith("raw/"):
            task, _, entry = key.removeprefix("raw/").rpartition("/")
            raw.setdefault(task, {})[entry] = array
    return result, raw


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """An NPZ file, complete or not there."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All of an NPZ file, which is closed then, damaged or not."""
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def load_all(folder: Path, names: Iterable[str]) -> tuple[list[Result], list[str]]:
    """The experiments that are there, in the order of names, and what is wrong with others."""
    found, wrong = [], []
    for name in names:
        try:
            pair = load(folder, name)
        except ResultError as error:
            wrong.append(str(error))
            continue
        if pair is not None:
            found.append(pair[0])
    return found, wrong


def _packed(value: Any, key: str, arrays: dict[str, np.ndarray]) -> Any:
    """Plain data for JSON; arrays go into `arrays` under their path."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: _packed(getattr(value, field.name), f"{key}/{field.name}", arrays)
            for field in dataclasses.fields(value)
        } | {"type": type(value).__name__}
    if isinstance(value, np.ndarray):
        arrays[key] = value
        return {ARRAY: key}
    if isinstance(value, list | tuple):
        return [_packed(item, f"{key}/{i}", arrays) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _packed(item, f"{key}/{name}", arrays) for name, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _unpacked(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The inverse of `_packed`."""
    if isinstance(value, list):
        return tuple(_unpacked(item, arrays) for item in value)
    if not isinstance(value, dict):
        return value
    if set(value) == {ARRAY}:
        return arrays[value[ARRAY]]
    name = value.get("type")
    kind = Result if name == "Result" else getattr(pictures, name) if name else None
    fields = {key: _unpacked(item, arrays) for key, item in value.items() if key != "type"}
    return kind(**fields) if kind is not None else fields


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _revision() -> str:
    """The commit of the checkout that is running, with a mark where it has changes."""
    git = ["git", "-C", str(Path(__file__).parent)]
    tracked, describe = (
        ["ls-files", "--error-unmatch", __file__],
        ["describe", "--always", "--dirty"],
    )
    try:
        for command in (tracked, describe):
            out = subprocess.run(
                git + command, capture_output=True, text=True, timeout=10, check=True
            )
    except (OSError, subprocess.SubprocessError):
        return "not a checkout"
    return out.stdout.strip()
