"""Numbers in words, as tables and claims have them."""

import numpy as np
from jaxtyping import ArrayLike

NOT_RUN = "not run"


def number(value: ArrayLike, digits: int = 3) -> str:
    """With so many significant digits, and an exponent only where it saves room."""
    value = float(np.asarray(value))
    if value == 0 or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits}g}"
    return np.format_float_positional(value, digits, unique=False, fractional=False, trim="-")


def spread(values: ArrayLike, digits: int = 3) -> str:
    """The median, and the range where there are several; nan is what was not run."""
    values = np.asarray(values, float).ravel()
    if np.isnan(values).all():
        return NOT_RUN
    values = np.where(np.isnan(values), np.inf, values)  # a run that ended early
    middle = number(np.median(values), digits)
    if len(values) == 1:
        return middle
    return f"{middle} [{number(values.min(), digits)}, {number(values.max(), digits)}]"


def count(value: ArrayLike) -> str:
    """A number of iterations: 1e4, 50 000."""
    value = int(np.asarray(value))
    exponent = round(float(np.log10(max(value, 1))))
    if value == 10**exponent and exponent > 1:
        return f"1e{exponent}"
    return f"{value:,}".replace(",", " ")


def step_text(step_size: ArrayLike) -> str:
    """A step size that was chosen; nan is none."""
    return number(step_size) if np.isfinite(np.asarray(step_size)) else "default"


def confirmed(holds: bool, enough: bool) -> bool | None:
    """Whether a claim holds; one that needs more steps or seeds can only be confirmed by less."""
    return True if holds else False if enough else None


def verdict(holds: bool, *values: ArrayLike) -> bool | None:
    """Whether a claim about these values holds; None where one of them was not run."""
    return None if any(np.isnan(np.asarray(value)).any() for value in values) else bool(holds)


def mean_sd(values: ArrayLike, decimals: int) -> str:
    """The mean, and the standard deviation where there are several."""
    values = np.asarray(values, float).ravel()
    middle = f"{values.mean():.{decimals}f}"
    return middle if len(values) == 1 else f"{middle} ± {values.std(ddof=1):.{decimals}f}"
