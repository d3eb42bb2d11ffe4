"""Importing the package costs little more than importing what it stands on."""

import statistics
import subprocess
import sys

import pytest

# What the package stands on first, then the package itself: two times from one process, so that
# the noise of the machine is in both.
PROGRAM = """
import time
start = time.perf_counter()
import jax, equinox, optax
between = time.perf_counter()
import iblr
end = time.perf_counter()
print(between - start, end - start)
"""


@pytest.mark.slow
def test_importing_the_package_takes_less_than_a_third_longer_than_its_dependencies():
    ratios = []
    for _ in range(5):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        )
        dependencies, package = map(float, run.stdout.split())
        ratios.append(package / dependencies)
    assert statistics.median(ratios) < 1.3, ratios


def test_importing_the_package_imports_no_optional_dependency():
    optional = {"torch", "numpyro", "pymc", "arviz", "matplotlib", "typer", "rich"}
    program = "import sys, iblr; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert "iblr" in loaded and not loaded & optional
