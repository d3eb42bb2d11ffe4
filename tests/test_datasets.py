"""Every data set: what ships, what is read from disk, and that nothing else ever happens."""

import gzip
import hashlib
import io
import os
import re
import tarfile
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from iblr import datasets
from iblr.datasets import cells, images
from iblr.datasets.files import Source, fetch, write_atomically

ROOT = Path(__file__).parents[1]


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache directory, and a network that nobody may touch."""

    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setenv("IBLR_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def web(monkeypatch):
    """A network that serves what is put into this dictionary, and counts the requests."""
    served, asked = {}, []

    def urlopen(url, timeout):
        asked.append(url)
        if url not in served:
            raise urllib.error.URLError("no route to host")
        return io.BytesIO(served[url])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return served, asked


@pytest.fixture
def fashion(monkeypatch):
    """Fashion-MNIST with 7 and 3 images: name without .gz -> content."""
    rng = np.random.default_rng(0)
    contents = {}
    for part, count in (("train", 7), ("t10k", 3)):
        pixels = rng.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = rng.integers(10, size=count, dtype=np.uint8)
        for kind, array in (
            (f"{part}-images-idx3-ubyte", pixels),
            (f"{part}-labels-idx1-ubyte", labels),
        ):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            contents[kind] = header + array.tobytes()
    sources = tuple(
        source._replace(sha256=sha256(contents[source.names[1]])) for source in images.FASHION_FILES
    )
    monkeypatch.setattr(images, "FASHION_FILES", sources)
    return contents


@pytest.fixture
def cifar(monkeypatch):
    """CIFAR-10 with 4 images a file: the planes, the labels, the six files and the archive."""
    rng = np.random.default_rng(1)
    planes = rng.integers(256, size=(6, 4, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(10, size=(6, 4), dtype=np.uint8)
    records = np.concatenate([labels[..., None], planes.reshape(6, 4, -1)], axis=-1)
    names = [batch.names[0] for batch in images.CIFAR_BATCHES]
    contents = dict(zip(names, (batch.tobytes() for batch in records), strict=True))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"{images.CIFAR_FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive = packed.getvalue()
    batches = tuple(
        batch._replace(sha256=sha256(contents[batch.names[0]])) for batch in images.CIFAR_BATCHES
    )
    monkeypatch.setattr(images, "CIFAR_BATCHES", batches)
    monkeypatch.setattr(
        images, "CIFAR_ARCHIVE", images.CIFAR_ARCHIVE._replace(sha256=sha256(archive))
    )
    return planes, labels, contents, archive


def write(folder, contents, compress=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# What ships


@pytest.mark.parametrize(
    ("load", "shapes", "hashes"),
    [
        (datasets.abalone, [(4177, 8), (4177,)], ["4851e226b060644b", "6d75846bed59c4af"]),
        (datasets.ionosphere, [(351, 34), (351,)], ["69468e18f3a97d2e", "475ea7977a8461b6"]),
        (datasets.cancer_mortality, [(20,), (20,)], ["04e83de10d622c54", "a60e4679af055feb"]),
        (datasets.murphy, [(60, 2), (60,)], ["a042ed5fbfb0e2c7", "0f2777e4dbb5cc87"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_shipped_set_has_its_numbers_and_says_where_they_come_from(load, shapes, hashes):
    data = load()
    arrays = data[:2]
    assert [array.shape for array in arrays] == shapes
    assert all(array.dtype == np.float64 for array in arrays)
    assert [sha256(array.astype("<f8").tobytes())[:16] for array in arrays] == hashes
    assert re.search(r"\(\d{4}\)", data.description) and "licence" in data.description.lower()


@pytest.mark.parametrize("name", ["abalone.data", "ionosphere.data"])
def test_a_shipped_file_is_the_published_one_as_the_notice_says(name):
    folder = files("iblr.datasets")
    content = gzip.decompress(folder.joinpath(f"{name}.gz").read_bytes())
    assert f"{sha256(content)}  {name}" in folder.joinpath("NOTICE.md").read_text(encoding="utf-8")


def test_the_notice_names_every_file_that_is_not_code():
    folder = ROOT / "src" / "iblr" / "datasets"
    notice = (folder / "NOTICE.md").read_text(encoding="utf-8")
    data = [path.name for path in folder.iterdir() if path.is_file()]
    data = [name for name in data if not name.endswith((".py", ".md"))]
    assert len(data) == 4 and all(f"`{name}`" in notice for name in data)


def test_names_and_codes_fit_the_columns():
    abalone, ionosphere = datasets.abalone(), datasets.ionosphere()
    assert len(abalone.names) == 8 and len(set(ionosphere.names)) == 34
    assert np.bincount(abalone.x[:, 0].astype(int)).tolist() == [0, 1528, 1307, 1342]  # M, F, I
    assert abalone.x[0].tolist() == [1, 0.455, 0.365, 0.095, 0.514, 0.2245, 0.101, 0.15]
    assert abalone.y[0] == 15 and abs(abalone.y.mean() - 9.93) < 0.01
    assert sorted(set(ionosphere.y)) == [-1, 1] and ionosphere.y[:2].tolist() == [1, -1]
    assert (ionosphere.x[:, 1] == 0).all()
    cancer = datasets.cancer_mortality()
    assert cancer.deaths[14] == 54 and cancer.population[14] == 53637


def test_scaled_abalone_is_that_of_libsvm():
    x = datasets.abalone(scaled=True).x
    assert (x.min(0) == -1).all() and (x.max(0) == 1).all()
    first = [-1, 0.027027, 0.0420168, -0.831858, -0.63733, -0.699395, -0.735352, -0.704036]
    np.testing.assert_allclose(x[0], first, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_abalone_has_the_evidence_of_the_paper(seed):
    data = datasets.abalone(scaled=True)
    train = np.random.default_rng(seed).permutation(4177)[:3341]
    x, y = np.column_stack([np.ones(3341), data.x[train]]), data.y[train]
    noise, prior = 162.9751, 0.0046
    precision = prior * np.eye(9) + x.T @ x / noise
    slope = x.T @ y / noise
    neg_evidence = 0.5 * (
        3341 * np.log(2 * np.pi * noise)
        + y @ y / noise
        + np.linalg.slogdet(precision)[1]
        - 9 * np.log(prior)
        - slope @ np.linalg.solve(precision, slope)
    )
    assert abs(neg_evidence - 11648.32) < (0.01 if seed == 0 else 10)  # seed 0 is the same split


# What is on the disk


@pytest.mark.parametrize("compress", [True, False])
def test_fashion_mnist_is_read_from_a_folder(fashion, tmp_path, compress):
    data = datasets.fashion_mnist(write(tmp_path / "files", fashion, compress))
    assert data.x_train.shape == (7, 28, 28) and data.x_test.shape == (3, 28, 28)
    assert data.x_train.dtype == np.float32 and len(data.labels) == 10
    pixels = np.rint(255 * data.x_train).astype(np.uint8).tobytes()
    assert pixels == fashion["train-images-idx3-ubyte"][16:]
    assert data.y_test.astype(np.uint8).tobytes() == fashion["t10k-labels-idx1-ubyte"][8:]
    assert "MIT" in data.description


def test_fashion_mnist_is_found_in_the_cache(fashion, cache):
    write(cache / "fashion_mnist", fashion, compress=True)
    assert datasets.fashion_mnist().y_train.shape == (7,)
    assert datasets.fashion_mnist(download=True).y_train.shape == (7,)  # nothing left to fetch


@pytest.mark.parametrize("where", ["file", "folder", "unpacked", "bin"])
def test_cifar_is_read_packed_or_unpacked(cifar, tmp_path, where):
    planes, labels, contents, archive = cifar
    if where in ("file", "folder"):
        write(tmp_path, {"cifar-10-binary.tar.gz": archive})
    else:
        write(tmp_path / images.CIFAR_FOLDER, contents)
    below = {"file": "cifar-10-binary.tar.gz", "bin": images.CIFAR_FOLDER}.get(where, "")
    data = datasets.cifar10(tmp_path / below)
    assert data.x_train.shape == (20, 32, 32, 3) and data.x_test.shape == (4, 32, 32, 3)
    assert data.x_train.dtype == np.float32 and data.x_train.flags.c_contiguous
    np.testing.assert_allclose(255 * data.x_train[5, :, :, 2], planes[1, 1, 2], atol=1e-4)
    assert data.y_train.tolist() == labels[:5].ravel().tolist()
    assert data.y_test.tolist() == labels[5].tolist()


def test_a_missing_file_of_unpacked_cifar_is_named(cifar, tmp_path):
    write(tmp_path, cifar[2])
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(datasets.MissingDataError, match=r"no data_batch_3\.bin in"):
        datasets.cifar10(tmp_path)


@pytest.mark.parametrize("name", ["y", "measurements"])
@pytest.mark.parametrize("cells_in_rows", [True, False])
def test_cytof_is_read_as_it_is_with_cells_in_rows(tmp_path, monkeypatch, name, cells_in_rows):
    x = np.random.default_rng(2).normal(3.0, 2.0, (50, 39))
    variables = {name: x if cells_in_rows else x.T, "number": 3.0, "remark": "none"}
    scipy.io.savemat(tmp_path / "cytof.mat", variables)
    content = (tmp_path / "cytof.mat").read_bytes()
    monkeypatch.setattr(cells, "BLOB_HASH", cells.git_blob_hash(content))
    for path in (tmp_path, tmp_path / "cytof.mat"):
        assert (datasets.cytof(path).x == x).all()


def test_cytof_with_two_matrices_and_no_y_is_refused(tmp_path, monkeypatch):
    scipy.io.savemat(tmp_path / "cytof.mat", {"a": np.eye(3), "b": np.eye(2)})
    content = (tmp_path / "cytof.mat").read_bytes()
    monkeypatch.setattr(cells, "BLOB_HASH", cells.git_blob_hash(content))
    with pytest.raises(datasets.DataError, match=r"holds \['a', 'b'\]"):
        datasets.cytof(tmp_path)


def test_the_git_blob_hash_is_that_of_git():
    assert cells.git_blob_hash(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


# What is not there, or wrong


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (datasets.cifar10, ["cifar-10-binary.tar.gz", "path=", "download=True", "toronto.edu"]),
        (datasets.fashion_mnist, ["train-images-idx3-ubyte.gz", "path=", "download=True"]),
        (datasets.cytof, ["cytof.mat", "path=", "gamma_sgvb"]),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_a_missing_file_says_what_to_do(load, words, given, tmp_path, cache):
    with pytest.raises(datasets.MissingDataError) as error:
        load(tmp_path / "nowhere") if given else load()
    said = one_line(error)
    assert all(word in said for word in [*words, str(tmp_path / "nowhere" if given else cache)])
    assert isinstance(error.value, FileNotFoundError) and isinstance(error.value, ValueError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("download", [True, False])
def test_a_corrupted_file_in_the_cache_is_reported_and_kept(fashion, cache, download):
    folder = write(cache / "fashion_mnist", fashion, compress=True)
    damaged = folder / "t10k-labels-idx1-ubyte.gz"
    content = fashion["t10k-labels-idx1-ubyte"][:-1] + b"\x0b"
    damaged.write_bytes(gzip.compress(content))
    before = damaged.read_bytes()
    with pytest.raises(datasets.DataError) as error:
        datasets.fashion_mnist(download=download)
    said = one_line(error)
    expected = sha256(fashion["t10k-labels-idx1-ubyte"])
    assert all(word in said for word in (str(damaged), sha256(content), expected))
    assert damaged.read_bytes() == before and len(list(folder.iterdir())) == 4


def test_a_truncated_gzip_file_is_reported(fashion, tmp_path):
    folder = write(tmp_path / "files", fashion, compress=True)
    damaged = folder / "train-images-idx3-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(datasets.DataError, match="damaged gzip file") as error:
        datasets.fashion_mnist(folder)
    assert str(damaged) in one_line(error)


@pytest.mark.parametrize("name", ["cifar-10-binary.tar.gz", "data_batch_1.bin"])
def test_a_wrong_file_of_cifar_is_reported_with_both_hashes(tmp_path, name):
    (tmp_path / name).write_bytes(b"something else")
    expected = {"data_batch_1.bin": images.CIFAR_BATCHES[0]}.get(name, images.CIFAR_ARCHIVE)
    with pytest.raises(datasets.DataError) as error:
        datasets.cifar10(tmp_path)
    said = one_line(error)
    assert sha256(b"something else") in said and expected.sha256 in said
    assert (tmp_path / name).read_bytes() == b"something else"


def test_a_wrong_file_of_cytof_is_reported_with_both_hashes(tmp_path):
    (tmp_path / "cytof.mat").write_bytes(b"hello\n")
    with pytest.raises(datasets.DataError) as error:
        datasets.cytof(tmp_path)
    said = one_line(error)
    assert "ce013625030ba8dba906f756967f9e9ca394464a" in said and cells.BLOB_HASH in said


# Downloads


def test_a_download_is_stored_once_and_found_again(cifar, cache, web):
    served, asked = web
    served[images.CIFAR_ARCHIVE.url] = cifar[3]
    first, again = datasets.cifar10(download=True), datasets.cifar10()
    assert (first.x_train == again.x_train).all() and len(asked) == 1
    assert [path.name for path in (cache / "cifar10").iterdir()] == ["cifar-10-binary.tar.gz"]


def test_only_what_is_not_there_is_downloaded(fashion, cache, web):
    served, asked = web
    write(cache / "fashion_mnist", dict(list(fashion.items())[:3]), compress=True)
    source = images.FASHION_FILES[3]
    served[source.url] = gzip.compress(fashion[source.names[1]])
    assert datasets.fashion_mnist(download=True).y_test.shape == (3,)
    assert asked == [source.url]


def test_a_wrong_download_is_set_aside(tmp_path, web):
    source = Source(("file.bin",), sha256(b"right"), "https://example.org/file.bin")
    web[0][source.url] = b"wrong"
    with pytest.raises(datasets.DataError, match=r"file\.bin\.rejected is not") as error:
        fetch(source, tmp_path / "folder")
    assert sha256(b"wrong") in one_line(error) and source.sha256 in str(error.value)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    assert kept == {"file.bin.rejected": b"wrong"}


def test_a_failed_download_leaves_nothing_behind(cache, web):
    with pytest.raises(datasets.DataError, match="no route to host") as error:
        datasets.cifar10(download=True)
    assert "path=" in one_line(error) and not cache.exists()


def test_a_path_and_a_download_exclude_each_other(tmp_path):
    with pytest.raises(datasets.DataError, match="IBLR_DATA"):
        datasets.fashion_mnist(tmp_path, download=True)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    write_atomically(path, b"old")

    def fail(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, b"newer")
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]


def test_the_cache_directory_is_the_users(monkeypatch):
    monkeypatch.setenv("IBLR_DATA", "~/data")
    assert datasets.cache_directory() == Path.home() / "data"
    monkeypatch.delenv("IBLR_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert datasets.cache_directory() == Path.home() / ".cache" / "iblr"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert datasets.cache_directory() == Path("/caches/iblr")
