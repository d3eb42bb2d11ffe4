"""Fixtures that every test may ask for."""

import jax
import pytest


@pytest.fixture
def x64():
    """Float64 for one test; the library itself never sets it."""
    with jax.enable_x64(True):
        yield
