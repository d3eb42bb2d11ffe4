"""The result a user keeps: the fitted family, how well it fits, and what it predicts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from iblr.families.base import AbstractFamily, marginals
from iblr.status import Status, describe


class Trace(NamedTuple):
    """The history of a fit, one entry a chunk (and, in a batch of runs, a column a run)."""

    step: np.ndarray
    elbo: np.ndarray
    elbo_se: np.ndarray
    step_size: np.ndarray


class Prediction(NamedTuple):
    """Draws of a function of the parameters, with the moments of each of its outputs."""

    draws: PyTree
    mean: PyTree
    standard_deviation: PyTree

    def interval(self, probability: float = 0.9) -> tuple[PyTree, PyTree]:
        """Lower and upper ends of the central interval of that probability."""
        if not 0 < probability < 1:
            raise ValueError(
                f"`interval(probability)` must be between 0 and 1, but got {probability}."
            )
        tail = 0.5 * (1 - probability)
        ends = jax.tree.map(
            lambda x: jnp.quantile(x, jnp.array([tail, 1 - tail]), axis=0), self.draws
        )
        return jax.tree.map(lambda x: x[0], ends), jax.tree.map(lambda x: x[1], ends)


class Posterior(eqx.Module):
    """A fitted approximation. From a batch of keys it holds all runs: `posterior[i]` is one.

    Attributes:
        family: the fitted member of the family.
        elbo: evidence lower bound, higher is better; `elbo_se` is its standard error.
        status: `Status.ok`, or what went wrong (one a run); `posterior.message` says it in words.
        trace: ELBO and step size after every chunk.
        refused: steps not taken because the target was not finite at the sampled points, or a
            parameter would have left its set or the range of the precision.
        limited: directions whose change was cut to what the precision can hold, and draws of
            positive numbers that underflowed, over all steps.
        halvings: how often a step was halved to stay in the set, where no theorem keeps it there.
        excluded: draws left out because the target was not finite there.
        num_steps: steps taken since the start, those before a resumption included.
        num_gradients: evaluations of the target's gradient by this call of `fit`.
        seconds: wall-clock time of the fit, compilation included.
        state: what `fit(..., state=)` needs to go on.
    """

    family: AbstractFamily
    elbo: Float[Array, "*runs"]
    elbo_se: Float[Array, "*runs"]
    status: Any
    trace: Trace
    refused: np.ndarray
    limited: np.ndarray
    halvings: np.ndarray
    excluded: np.ndarray
    num_steps: int
    num_gradients: int
    seconds: float
    state: Any

    @property
    def is_batch(self) -> bool:
        """Whether this holds several runs."""
        return self.elbo.ndim > 0

    def __len__(self) -> int:
        if not self.is_batch:
            raise TypeError("`len(posterior)` counts the runs of a batch, but this is one run.")
        return self.elbo.shape[0]

    def __getitem__(self, run: int) -> "Posterior":
        """One run of a batch."""
        if not -len(self) <= run < len(self):
            raise IndexError(f"run {run} of a batch of {len(self)}")
        one = lambda tree: jax.tree.map(lambda x: x[run], tree)  # noqa: E731
        history = self.trace
        trace = Trace(
            history.step, history.elbo[:, run], history.elbo_se[:, run], history.step_size
        )
        return Posterior(
            family=one(self.family),
            elbo=self.elbo[run],
            elbo_se=self.elbo_se[run],
            status=one(self.status),
            trace=trace,
            refused=np.asarray(self.refused[run]),
            limited=np.asarray(self.limited[run]),
            halvings=np.asarray(self.halvings[run]),
            excluded=np.asarray(self.excluded[run]),
            num_steps=self.num_steps,
            num_gradients=self.num_gradients,
            seconds=self.seconds,
            state=self.state[run],
        )

    @property
    def best(self) -> "Posterior":
        """The run of a batch with the highest finite ELBO among those that went well."""
        if not self.is_batch:
            return self
        good = (self.status == Status.ok) & jnp.isfinite(self.elbo)
        usable = good if bool(good.any()) else jnp.isfinite(self.elbo)
        return self[int(jnp.argmax(jnp.where(usable, self.elbo, -jnp.inf)))]

    @property
    def message(self) -> str | list[str]:
        """The status in words, one a run."""
        if self.is_batch:
            return [describe(self[i].status) for i in range(len(self))]
        return describe(self.status)

    def _over_runs(self, function: Callable[[AbstractFamily], Any]) -> Any:
        return jax.vmap(function)(self.family) if self.is_batch else function(self.family)

    @property
    def mean(self) -> PyTree:
        """Posterior mean, in the structure of the parameters."""
        return self._over_runs(lambda q: q.moments()[0])

    @property
    def standard_deviation(self) -> PyTree:
        """Marginal standard deviations, in the structure of the parameters."""
        return self._over_runs(lambda q: q.moments()[1])

    @property
    def covariance(self) -> Float[Array, "*runs d d"]:
        """Covariance of the flat coordinates (on a support, of what is mapped onto it)."""
        return self._over_runs(lambda q: q.covariance)

    @property
    def precision(self) -> Float[Array, "*runs d d"]:
        """Inverse covariance of the flat coordinates."""
        return self._over_runs(lambda q: q.precision)

    def sample(self, key: Key[Array, ""], num: int | None = None) -> PyTree:
        """Draws, stacked along a first axis (after that of the runs, in a batch)."""
        if not self.is_batch:
            return self.family.sample(key, num)
        keys = jax.random.split(key, len(self))
        return jax.vmap(lambda q, key: q.sample(key, num))(self.family, keys)

    def log_prob(self, z: PyTree) -> Float[Array, "*batch"]:
        """Log density of q at stacked points; in a batch, the first axis is the run's."""
        if not self.is_batch:
            return self.family.log_prob(z)
        return jax.vmap(lambda q, z: q.log_prob(z))(self.family, z)

    def predict(
        self, function: Callable[[PyTree], PyTree], key: Key[Array, ""], *, draws: int = 1000
    ) -> Prediction:
        """Push draws through `function(params)`: a mean, a spread and intervals for each output.

        Example:
            >>> import iblr, jax, jax.numpy as jnp
            >>> posterior = iblr.fit(lambda w: -0.5 * (w**2).sum(), iblr.Gaussian.standard(2),
            ...                      key=jax.random.key(0), num_steps=50)
            >>> x = jnp.array([[1.0, 0.0], [3.0, 4.0]])
            >>> prediction = posterior.predict(lambda w: x @ w, jax.random.key(1), draws=4000)
            >>> prediction.standard_deviation.round(0).tolist()
            [1.0, 5.0]
        """
        if self.is_batch:
            raise ValueError(
                "`predict` needs one run, but this posterior holds a batch. Write "
                "`posterior.best.predict(...)` or `posterior[i].predict(...)`."
            )
        values = jax.lax.map(function, self.sample(key, draws), batch_size=min(draws, 128))
        return Prediction(
            values,
            jax.tree.map(lambda x: x.mean(axis=0), values),
            jax.tree.map(lambda x: x.std(axis=0), values),
        )

    def summary(self, *, rows: int = 20) -> str:
        """A table in plain words: the fit, then mean, sd and 90 % interval of each parameter."""
        if self.is_batch:
            runs = [
                f"run {i}: ELBO {_elbo_words(self[i])}; {self[i].message}" for i in range(len(self))
            ]
            return "\n".join([f"{len(self)} runs of {_words(self)}", *runs])
        structure = self.family.structure
        trees = marginals(self.family, 0.9)
        columns = [np.asarray(structure.ravel_point(tree, "summary")) for tree in trees]
        labels = structure.labels()
        width = max(len(label) for label in ["parameter", *labels[:rows]])
        head = f"{'parameter':<{width}} {'mean':>11} {'sd':>11} {'5 %':>11} {'95 %':>11}"
        lines = [_words(self), f"ELBO {_elbo_words(self)} nats. {self.message}", "", head]
        for label, m, s, low, high in list(zip(labels, *columns, strict=True))[:rows]:
            lines.append(f"{label:<{width}} {m:>11.4g} {s:>11.4g} {low:>11.4g} {high:>11.4g}")
        if len(labels) > rows:
            lines.append(f"... and {len(labels) - rows} more")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()


def _words(posterior: Posterior) -> str:
    family = posterior.family
    counts = f"{posterior.num_steps} steps, {posterior.num_gradients} gradients"
    text = (
        f"{family.name} over {family.structure.point_dim} parameters, {counts}, "
        f"{posterior.seconds:.1f} s"
    )
    refused, limited = int(np.sum(posterior.refused)), int(np.sum(posterior.limited))
    if refused:
        text += f", {refused} steps refused"
    if limited:
        text += f", {limited} changes or draws limited by the precision"
    if np.any(posterior.halvings):
        text += f", {int(np.sum(posterior.halvings))} halvings"
    if np.any(posterior.excluded):
        text += f", {int(np.sum(posterior.excluded))} draws left out"
    return text


def _elbo_words(posterior: Posterior) -> str:
    return f"{float(posterior.elbo):.4f} ± {float(posterior.elbo_se):.4f}"
