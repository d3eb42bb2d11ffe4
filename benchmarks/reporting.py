"""What the benchmark scripts share: versions, a report that is printed and kept, arguments."""

import argparse
import os
import platform
from pathlib import Path

import equinox as eqx
import jax
import jaxlib
import optax

import iblr


def versions() -> str:
    """Of Python, the libraries and the machine."""
    modules = {"jax": jax, "jaxlib": jaxlib, "equinox": eqx, "optax": optax, "iblr": iblr}
    names = ", ".join(f"{name} {module.__version__}" for name, module in modules.items())
    device = jax.devices()[0]
    return (
        f"Python {platform.python_version()}, {names}\n"
        f"{os.cpu_count()} CPUs ({platform.machine()}), computing on {device.device_kind}, "
        f"LAPACK threads: {os.environ.get('OPENBLAS_NUM_THREADS', 'all')}"
    )


class Report:
    """Prints, and keeps what was printed."""

    def __init__(self):
        self.lines: list[str] = []

    def __call__(self, text: str = "") -> None:
        print(text, flush=True)
        self.lines.append(text)

    def save(self, path: Path | None) -> None:
        """Write what was printed to a file, if there is one."""
        if path is not None:
            path.write_text("\n".join(self.lines) + "\n")


def whole_number(text: str) -> int:
    """An argument that must be a whole number of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but got {text}")
    return value
