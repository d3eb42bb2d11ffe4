"""Programs that are compiled quickly rather than to the last per cent of speed."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

# On a CPU these halve the time of compilation; a program is at worst a fifth slower.
QUICK: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}
# Half of that, for what a fit does once: a long density takes up to a quarter longer there.
ONCE: dict[str, Any] = QUICK | {"xla_backend_optimization_level": 0}


@functools.cache
def _accepted(platform: str, once: bool) -> dict[str, Any]:
    """Those options that this version of XLA knows; none but on a CPU."""
    accepted = {}
    if platform == "cpu":
        program = jax.jit(lambda: 0).lower()
        for name, value in (ONCE if once else QUICK).items():
            try:
                program.compile(compiler_options={name: value})
            except jax.errors.JaxRuntimeError:  # it has been renamed or removed
                continue
            accepted[name] = value
    return accepted


def quickly_compiled(function: Callable, *, once: bool = False) -> Callable:
    """`eqx.filter_jit` of a function, with options for the platform on which it is first called.

    Args:
        function: what to compile.
        once: whether a fit calls it once, so that compiling costs more than running it slowly.
    """

    @functools.cache
    def compiled(platform: str) -> Callable:
        options: dict[str, Any] = {"compiler_options": _accepted(platform, once)}
        return eqx.filter_jit(function, **options)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return compiled(jax.default_backend())(*arguments)

    return call
