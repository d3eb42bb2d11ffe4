"""What can go wrong, each with a sentence of advice.

A `Status` is a value inside a compiled program as well as outside: it may be returned from `jit`,
batched by `vmap`, compared with `==` and, where it is one run's, printed with `describe`.
"""

import equinox as eqx
import jax.numpy as jnp


class Status(eqx.Enumeration):
    """The outcome of a step or of a fit; `Status[item]` is its sentence."""

    ok = "Finished without trouble."
    nonfinite = (
        "The log density or its gradient at the points sampled, or the step computed from them, "
        "was nan or infinite, so the step was refused and the family kept. Check the log density's "
        "support, or start from a family whose draws stay inside it, such as a narrower one; where "
        "you chose it, a smaller step size or `trust_region=True` may help too."
    )
    left_set = (
        "The step left the set of valid parameters (a precision would not be positive definite, a "
        "rate not positive), so the family was kept. Use a smaller step size, `line_search_step`, "
        "or `improved_step`, which keeps Gaussians and positive families inside and halves the "
        "steps of others."
    )
    out_of_range = (
        "The step would have taken a parameter beyond what this precision can hold (to zero or to "
        "infinity), so it was refused and the family kept. Use a smaller step size, rescale the "
        "parameters, or enable float64."
    )
    refused_steps = (
        "More than a tenth of the steps were refused because the log density or its gradient was "
        "nan or infinite there, or a parameter would have left the range of the precision; the "
        "rest were taken. Look at the support of the log density, and at the step size."
    )
    inaccurate = (
        "The approximation became too ill-conditioned or too narrow for this precision: rounding "
        "decides what its factor is, or draws are all the same. In float32, enable float64 "
        '(`jax.config.update("jax_enable_x64", True)`) or rescale the parameters; otherwise the '
        "target may be improper or the step size too large."
    )
    diverged = (
        "The fit moved away from the target: its ELBO is not finite. Use a start nearer to the "
        "posterior or, where you chose it, a smaller step size or `trust_region=True`."
    )
    not_converged = (
        "It did not settle before it was stopped. Give it more (`num_steps=`, `max_gradients=`, "
        "`max_seconds=`), or a start nearer to the posterior."
    )
    out_of_budget = (
        "The budget was spent before the fit was sure to be within `tol`; `gap_bound` says how "
        "near it came. Go on with `state=posterior.state` and a larger `max_gradients=` or "
        "`max_seconds=`."
    )
    improper = (
        "The approximation widened without end, or has an endless way to go: the target seems to "
        "be improper, a density whose integral, and so the ELBO, is infinite. Look for a parameter "
        "without a prior, a sign that is wrong, or a density that is flat in some direction; or "
        "rescale a parameter whose posterior is wider than its start by a factor of 1e8 (1e12 in "
        "float64)."
    )
    interrupted = (
        "Interrupted from the keyboard; this is the best approximation reached. Pass `state=` of "
        "this posterior to `fit` to go on."
    )


def describe(status: Status) -> str:
    """Name and sentence of one run's status, for messages and tables."""
    for name, item in Status._name_to_item.items():
        if bool(jnp.all(status == item)):
            return f"{name}: {Status[item]}"
    raise ValueError(
        f"`describe(status)` needs the status of one run, but got {status}. Index the posterior "
        "first: `posterior[0].status`."
    )
