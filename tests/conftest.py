"""Fixtures that every test may ask for."""

import jax
import pytest


def pytest_ignore_collect(collection_path, config):
    """Leave out the tests that need PyTorch unless they are named, as `make test-torch` does."""
    named = any("deep" in argument for argument in config.args)
    return True if collection_path.name == "deep" and not named else None


@pytest.fixture
def x64():
    """Float64 for one test; the library itself never sets it."""
    with jax.enable_x64(True):
        yield
