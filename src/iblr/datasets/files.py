"""Files of data on the user's disk: where they are, what they must hash to, how they are fetched.

A file is used only if its content has the hash that is known of it. Nothing is downloaded unless
`download=True` is written, and a download appears under its own name only once it is complete and
has been checked.
"""

import gzip
import hashlib
import http.client
import os
import urllib.request
import uuid
import zlib
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 60.0  # seconds without an answer


class DataError(ValueError):
    """Data that cannot be used; the message says why, and what to do."""


class MissingDataError(DataError, FileNotFoundError):
    """Data that are not on this machine; the message says where to get them."""


class Source(NamedTuple):
    """One file of a data set.

    Attributes:
        names: what the file may be called; a download gets the first of them.
        sha256: the hash of its content.
        url: where it is published.
        gzipped: whether the hash is that of the content before it was compressed by gzip, which
            does not depend on who compressed it. The file may then be there uncompressed as well.
    """

    names: tuple[str, ...]
    sha256: str
    url: str
    gzipped: bool = False


def cache_directory() -> Path:
    """Where downloads go: the environment variable IBLR_DATA, or `iblr` in the user's cache.

    Example:
        >>> import os
        >>> os.environ["IBLR_DATA"] = "/data"
        >>> cache_directory().as_posix()
        '/data'
        >>> del os.environ["IBLR_DATA"]
    """
    chosen = os.environ.get("IBLR_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "iblr"


def place(name: str, path: str | os.PathLike[str] | None, *, download: bool = False) -> Path:
    """The user's `path`, or the folder of the data set `name` in the cache directory."""
    if path is None:
        return cache_directory() / name
    if download:
        raise DataError(
            f"`download=True` writes into {cache_directory() / name}, so `path={str(path)!r}` "
            "cannot be given with it. Leave one of them out, or set the environment variable "
            "IBLR_DATA to choose the cache directory."
        )
    return Path(path).expanduser()


def find(source: Source, folder: Path) -> Path | None:
    """The file in `folder`, or None."""
    paths = [folder / name for name in source.names]
    return next((path for path in paths if path.is_file()), None)


def read(source: Source, path: Path) -> bytes:
    """The content of the file at `path`, checked; the file is never changed."""
    return _checked(path.read_bytes(), source, path)


def read_or_fetch(source: Source, folder: Path, *, download: bool, advice: str) -> bytes:
    """The content of the file in `folder`, checked; fetched first if it is not there."""
    path = find(source, folder)
    if path is not None:
        return read(source, path)
    if not download:
        raise MissingDataError(f"There is no {source.names[0]} in {folder}. {advice}")
    return fetch(source, folder)


def fetch(source: Source, folder: Path) -> bytes:
    """The content of a file from its public source, which is then stored in `folder`."""
    raw = _download(source.url)
    rejected = folder / f"{source.names[0]}.rejected"
    try:
        content = _checked(raw, source, rejected)
    except DataError:
        write_atomically(rejected, raw)
        raise
    write_atomically(folder / source.names[0], raw)
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that appears under its name when all of it is on the disk, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_hash(actual: str, expected: str, path: Path, *, kind: str, advice: str) -> None:
    """Raises `DataError` unless the hashes agree."""
    if actual != expected:
        raise DataError(
            f"{path} is not the file that it should be: its {kind} is {actual}, not {expected}. "
            f"The file is kept as it is. {advice}"
        )


def _checked(raw: bytes, source: Source, path: Path) -> bytes:
    """The content of the bytes of a file, if it is the right one."""
    advice = f"Move it away and get {source.url} again."
    content, kind = raw, "sha256"
    if source.gzipped and raw[:2] == b"\x1f\x8b":
        kind = "sha256, uncompressed,"
        try:
            content = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} is a damaged gzip file ({error}); the {kind} should be {source.sha256}. "
                f"The file is kept as it is. {advice}"
            ) from error
    actual = hashlib.sha256(content).hexdigest()
    check_hash(actual, source.sha256, path, kind=kind, advice=advice)
    return content


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return response.read()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{url} could not be downloaded ({error}). Try again, or fetch it by other means and "
            "pass where it is as `path=`."
        ) from error
