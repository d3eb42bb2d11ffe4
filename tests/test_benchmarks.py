"""The benchmark scripts run, print what they promise and judge their bars; times are not tested."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script, *arguments):
    """Exit status and output of a script; few optimisations halve the time it takes to compile."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def table(text, title):
    """Cells of the lines below the one that starts with `title`, up to an empty line."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith(title))
    rows = []
    for line in lines[first + 1 :]:
        if not line.strip():
            break
        rows.append(line.replace("|", " ").split())
    return rows


@pytest.fixture(scope="module")
def step_cost():
    return importlib.import_module("step_cost")


@pytest.mark.slow
def test_step_cost_prints_its_table(tmp_path):
    out = tmp_path / "table.txt"
    options = ["--dims", "10", "30", "--rounds", "1", "--estimators", "Rep(10)", "--out", str(out)]
    status, text, errors = run("step_cost.py", *options)
    assert status == 0, text + errors
    rows = table(text, "dtype")
    assert [row[:3] for row in rows] == [
        [dtype, "Rep(10)", d] for dtype in ("float32", "float64") for d in ("10", "30")
    ]
    assert all(float(cell) > 0 for row in rows for cell in row[4:7] + row[9:])
    bars = table(text, "Bars")
    assert len(bars) == 36 and all(bar[-2:] == ["not", "measured"] for bar in bars)
    assert text.count("ours and dense differ") == text.count("PASS") == 2
    assert "FAIL" not in text
    assert out.read_text() == text


@pytest.mark.slow
def test_gpu_check_runs_on_a_cpu():
    status, text, errors = run("gpu_check.py", "--dims", "60", "--steps", "3")
    assert status == 0, text + errors
    assert text.count("relative error") == text.count("PASS") == 4
    assert [row[:2] for row in table(text, "d estimator")] == [["60", "Stl(1)"], ["60", "Rep(1)"]]


def rows_at(module, seconds_at):
    """Made-up measurements: ours takes `seconds_at[d]`, Adam 1 s and the dense form 20 s."""
    rows = {}
    for dtype in module.DTYPES:
        for name in module.ESTIMATORS:
            for d, ours in seconds_at.items():
                times = {"ours": ours, "dense": 20.0, "adam": 1.0}
                rows[dtype, name, d] = module.Row(times, 20.0 / ours, ours)
    return rows


def test_bars_are_met_and_missed(step_cost):
    good = {100: 2.0, 300: 0.02, 1000: 0.3, 2000: 1.0}
    assert not any(bar.missed for bar in step_cost.bars(rows_at(step_cost, good)))
    for change, missed in (
        ({1000: 2.1}, 2 * (2 + 4)),  # 9.5 times faster than the dense form, 2.1 times Adam's
        ({100: 2.6}, 2 * 4),
        ({300: 0.01}, 2 * 4),  # grows as d^2.4
        ({2000: float("nan")}, 2 * (4 + 4)),
    ):
        bars = step_cost.bars(rows_at(step_cost, good | change))
        assert sum(bar.missed for bar in bars) == missed, change
        assert sum(bar.line().endswith("FAIL") for bar in bars) == missed
