"""CIFAR-10 and Fashion-MNIST, from the user's disk or, when asked, from where they are published.

Each file is checked against a hash of its content. CIFAR-10's are those of the authors' archive of
binary files and of the files in it; Fashion-MNIST's are those of the uncompressed IDX files, so
that files compressed anew, as Debian's are, are taken as well.
"""

import io
import os
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from iblr.datasets.files import MissingDataError, Source, fetch, find, place, read, read_or_fetch


class Images(NamedTuple):
    """Labelled images to train and to test with, and where they come from.

    Attributes:
        x_train: images, pixels in [0, 1], with a last axis of colours unless they are grey.
        y_train: for each image the index of its label.
        x_test: images to test with.
        y_test: their labels.
        labels: what the indices mean.
        description: what the images are, with source, licence and citation.
    """

    x_train: Float[np.ndarray, "n ..."]
    y_train: Int[np.ndarray, " n"]
    x_test: Float[np.ndarray, "m ..."]
    y_test: Int[np.ndarray, " m"]
    labels: tuple[str, ...]
    description: str


CIFAR_ARCHIVE = Source(
    ("cifar-10-binary.tar.gz",),
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)
CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_BATCHES = tuple(  # the last one is the test set
    Source((name,), sha256, CIFAR_ARCHIVE.url)
    for name, sha256 in (
        ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    )
)
CIFAR_ADVICE = (
    "Get cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html and pass where it "
    "is, packed or unpacked, as `path=`; or let `cifar10(download=True)` fetch it (170 MB)."
)
FASHION_URL = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"
FASHION_FILES = tuple(
    Source((f"{name}.gz", name), sha256, f"{FASHION_URL}/{name}.gz", gzipped=True)
    for name, sha256 in (
        (
            "train-images-idx3-ubyte",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        (
            "train-labels-idx1-ubyte",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        (
            "t10k-images-idx3-ubyte",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        (
            "t10k-labels-idx1-ubyte",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    )
)
FASHION_ADVICE = (
    "Get the four files in data/fashion of https://github.com/zalandoresearch/fashion-mnist (or "
    "Debian's package dataset-fashion-mnist, /usr/share/datasets/fashion-mnist) and pass their "
    "folder as `path=`; or let `fashion_mnist(download=True)` fetch them (31 MB)."
)


def cifar10(path: str | os.PathLike[str] | None = None, *, download: bool = False) -> Images:
    """CIFAR-10: 50 000 + 10 000 colour images of 32 by 32 pixels, ten kinds of objects.

    Args:
        path: `cifar-10-binary.tar.gz`, or a folder with it, or the folder of its `.bin` files.
            Left out: the folder `cifar10` in the cache directory.
        download: fetch the archive (170 MB) into the cache directory if it is not there.

    Returns:
        Images: float32, (50000, 32, 32, 3) to train with and (10000, 32, 32, 3) to test with.
    """
    batches = _cifar_batches(place("cifar10", path, download=download), download)
    x_train, y_train = _cifar_images(b"".join(batches[:-1]))
    x_test, y_test = _cifar_images(batches[-1])
    return Images(
        x_train,
        y_train,
        x_test,
        y_test,
        ("airplane", "automobile", "bird", "cat", "deer")
        + ("dog", "frog", "horse", "ship", "truck"),
        "CIFAR-10: 60 000 labelled photographs, 6000 of each of ten kinds. Krizhevsky (2009), "
        "Learning Multiple Layers of Features from Tiny Images, "
        "https://www.cs.toronto.edu/~kriz/cifar.html. No licence is stated; cite the report.",
    )


def fashion_mnist(path: str | os.PathLike[str] | None = None, *, download: bool = False) -> Images:
    """Fashion-MNIST: 60 000 + 10 000 grey images of 28 by 28 pixels, ten kinds of clothing.

    Args:
        path: a folder with the four IDX files, compressed by gzip or not. Left out: the folder
            `fashion_mnist` in the cache directory.
        download: fetch what is not there (31 MB in all) into the cache directory.

    Returns:
        Images: float32, (60000, 28, 28) to train with and (10000, 28, 28) to test with.
    """
    folder = place("fashion_mnist", path, download=download)
    x_train, y_train, x_test, y_test = (
        _idx(read_or_fetch(source, folder, download=download, advice=FASHION_ADVICE))
        for source in FASHION_FILES
    )
    return Images(
        _unit(x_train),
        y_train.astype(np.int32),
        _unit(x_test),
        y_test.astype(np.int32),
        ("T-shirt/top", "trouser", "pullover", "dress", "coat")
        + ("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        "Fashion-MNIST: 70 000 labelled pictures of articles of Zalando, 7000 of each of ten "
        "kinds. Xiao, Rasul & Vollgraf (2017), arXiv:1708.07747, "
        "https://github.com/zalandoresearch/fashion-mnist. Licence: MIT, (c) 2017 Zalando SE.",
    )


def _cifar_batches(path: Path, download: bool) -> list[bytes]:
    """The six binary files: from the archive at or in `path`, or unpacked there."""
    archive = path if path.is_file() else find(CIFAR_ARCHIVE, path)
    if archive is not None:
        return _unpack(read(CIFAR_ARCHIVE, archive))
    for folder in (path, path / CIFAR_FOLDER):
        if find(CIFAR_BATCHES[0], folder) is not None:
            return [
                read_or_fetch(batch, folder, download=False, advice=CIFAR_ADVICE)
                for batch in CIFAR_BATCHES
            ]
    if download:
        return _unpack(fetch(CIFAR_ARCHIVE, path))
    raise MissingDataError(f"There is no {CIFAR_ARCHIVE.names[0]} in {path}. {CIFAR_ADVICE}")


def _unpack(archive: bytes) -> list[bytes]:
    """The binary files in the archive, which has been checked; nothing is written."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        members = [tar.extractfile(f"{CIFAR_FOLDER}/{batch.names[0]}") for batch in CIFAR_BATCHES]
        return [member.read() for member in members if member is not None]


def _cifar_images(
    content: bytes,
) -> tuple[Float[np.ndarray, "n 32 32 3"], Int[np.ndarray, " n"]]:
    """A record is a label and three planes of 32 by 32 bytes: red, green and blue."""
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return _unit(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int32)


def _idx(content: bytes) -> UInt8[np.ndarray, "..."]:
    """The array of bytes in an IDX file: two zeros, the type 8, the number of axes, their sizes."""
    axes = content[3]
    shape = np.frombuffer(content, ">i4", count=axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _unit(pixels: UInt8[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Bytes to [0, 1], in single precision and in the order of the axes."""
    values = pixels.astype(np.float32, order="C")
    values /= 255
    return values
