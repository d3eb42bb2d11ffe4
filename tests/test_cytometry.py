"""The reader of the cells that stand in for those of the paper."""

import hashlib
import sys

import numpy as np
import pytest

from iblr import datasets

cytometry = sys.modules["iblr.datasets.cytometry"]


def fcs(table, markers, *, order="1,2,3,4", **changes):
    """The bytes of a small FCS 3.0 file; a delimiter inside a value is written twice."""
    columns = range(1, len(markers) + 1)
    keys = {"$PAR": len(markers), "$TOT": len(table), "$MODE": "L", "$DATATYPE": "F"}
    keys |= {"$BYTEORD": order, "$COM": "a//b", "$BEGINDATA": "1000"}
    keys |= {f"$P{i}{key}": value for i in columns for key, value in (("B", 32), ("E", "0,0"))}
    keys |= {f"$P{i}N": f"channel {i}" for i in columns}
    keys |= {f"$P{i}S": marker for i, marker in zip(columns, markers, strict=True) if marker}
    keys |= changes
    text = "/" + "".join(f"{key}/{value}/" for key, value in keys.items())
    header = f"FCS3.0    {58:>8}{58 + len(text) - 1:>8}{0:>8}{0:>8}{0:>8}{0:>8}"
    kind = "<f4" if order == "1,2,3,4" else ">f4"
    return (header + text).ljust(1000).encode() + table.astype(kind).tobytes()


@pytest.mark.parametrize("order", ["1,2,3,4", "4,3,2,1"])
def test_the_reader_reads_fcs(order):
    table = np.arange(12.0).reshape(4, 3) - 5.5
    got, channels = cytometry.read_fcs(fcs(table, ["CD3", "", "BC1"], order=order))
    np.testing.assert_array_equal(got, table)
    assert channels == [("channel 1", "CD3"), ("channel 2", ""), ("channel 3", "BC1")]


def test_the_reader_refuses_what_it_does_not_read():
    read, table = cytometry.read_fcs, np.ones((2, 1))
    for content, message in (
        (b"PK\x03\x04", "is not an FCS 3.x file"),
        (fcs(table, ["CD3"], **{"$DATATYPE": "I"}), "floating-point"),
        (fcs(table, ["CD3"], **{"$P1E": "4,1"}), "logarithmic"),
    ):
        with pytest.raises(ValueError, match=message):
            read(content, "it")


def test_the_cells_that_stand_in_are_standardised_markers(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    tables = [rng.gamma(1.0, 50.0, (5, 4)).astype(np.float32) for _ in cytometry.HASHES]
    hashes = {}
    for place, table in zip(cytometry.HASHES, tables, strict=True):
        content = fcs(table, ["CD3", "BC1", "", "DNA1"])
        (tmp_path / cytometry.file_name(*place)).write_bytes(content)
        hashes[place] = hashlib.sha256(content).hexdigest()
    with pytest.raises(datasets.DataError, match="sha256"):
        datasets.cytometry(tmp_path)
    monkeypatch.setattr(cytometry, "HASHES", hashes)
    with pytest.raises(datasets.DataError, match="2 markers"):
        datasets.cytometry(tmp_path)
    monkeypatch.setattr(cytometry, "NUM_CHANNELS", 2)
    expected = np.arcsinh(np.concatenate(tables)[:, [0, 3]].astype(float) / 5)
    expected = (expected - expected.mean(0)) / expected.std(0)
    np.testing.assert_allclose(datasets.cytometry(tmp_path).x, expected, rtol=1e-12)


def test_missing_cells_say_how_to_get_them(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.whl"):
        with pytest.raises(datasets.MissingDataError, match="pip download cytonormpy==1.0.2"):
            datasets.cytometry(path)
