"""The result a user keeps: the fitted family, how well it fits, and what it predicts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from iblr.corrected import Corrected
from iblr.diagnosis import Diagnosis
from iblr.families.base import AbstractFamily
from iblr.prediction import Prediction
from iblr.purposes import Purpose, key_for
from iblr.status import Status, describe
from iblr.summary import summary
from iblr.verdict import is_usable, judge

COUNTS = ("refused", "limited", "halvings", "excluded")


class Trace(NamedTuple):
    """The history of a fit, one entry a chunk (and, in a batch of runs, a column a run).

    Attributes:
        step: index of the step.
        elbo: evidence lower bound, `elbo_se` its standard error.
        step_size: t; nan where there is none.
        num_gradients: gradients of the target so far, those of looks at the ELBO left out.
        gap: nats that are estimated to be missing to the best member; nan where unknown.
    """

    step: np.ndarray
    elbo: np.ndarray
    elbo_se: np.ndarray
    step_size: np.ndarray
    num_gradients: np.ndarray
    gap: np.ndarray


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
        num_gradients: evaluations of the target or its gradient by this call of `fit`; all of them
            in an automatic fit, those of steps where settings were given.
        seconds: wall-clock time of the fit, compilation included.
        state: what `fit(..., state=)` needs to go on.
        stopped_by: "tol", "max_gradients", "max_seconds", "num_steps", "callback", "interrupt" or
            "failure".
        gap_estimate: nats estimated to be missing to the best member of the family; nan if unknown.
        gap_bound: nats that are missing at most, with a probability of 95 %; nan if unknown. Like
            `stopped_by` and `gap_estimate` one a run, in a batch that was fitted without settings.
        diagnosis: how good it is, a `Diagnosis`, or None where settings were given and before
            `iblr.diagnose`; `posterior.verdict` says it in words.
        runs: those of a batch that was fitted without settings, each with its own counts; the
            batch has their sums.
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
    stopped_by: Any = "num_steps"
    gap_estimate: Any = float("nan")
    gap_bound: Any = float("nan")
    diagnosis: Any = None
    runs: tuple = ()

    @property
    def is_batch(self) -> bool:
        """Whether this holds several runs."""
        return self.elbo.ndim > 0

    def __bool__(self) -> bool:  # `len` is of a batch alone
        return True

    def __len__(self) -> int:
        if not self.is_batch:
            raise TypeError("`len(posterior)` counts the runs of a batch, but this is one run.")
        return self.elbo.shape[0]

    def __getitem__(self, run: int) -> "Posterior":
        """One run of a batch."""
        if not -len(self) <= run < len(self):
            raise IndexError(f"run {run} of a batch of {len(self)}")
        if self.runs:
            return self.runs[run]
        one = lambda tree: jax.tree.map(lambda x: x[run], tree)  # noqa: E731
        trace = Trace(*(part[:, run] if part.ndim > 1 else part for part in self.trace))
        return dataclasses.replace(
            self,
            family=one(self.family),
            elbo=self.elbo[run],
            elbo_se=self.elbo_se[run],
            status=one(self.status),
            trace=trace,
            state=self.state[run],
            **{name: np.asarray(getattr(self, name)[run]) for name in COUNTS},
        )

    @property
    def best(self) -> "Posterior":
        """The run of a batch with the highest finite ELBO among those that went best."""
        if not self.is_batch:
            return self
        finite = jnp.isfinite(self.elbo)
        sets = [(self.status == Status.ok) & finite, is_usable(self.status) & finite]
        among = next((runs for runs in sets if bool(runs.any())), finite)
        return self[int(jnp.argmax(jnp.where(among, self.elbo, -jnp.inf)))]

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
        return summary(self, rows)

    def __str__(self) -> str:
        return self.summary()

    # What `iblr.diagnose` found.

    @property
    def verdict(self) -> str:
        """Whether to trust it, in plain words that begin with Good, Fair or Bad."""
        if self.has_verdict and self.diagnosis is None:
            return f"Bad: the fit did not end well, {self.message}"
        return judge(self._diagnosed("verdict"), self.status, self.gap_bound)

    @property
    def has_verdict(self) -> bool:
        """Whether `verdict` has something to say: it was judged, or did not end well."""
        if self.diagnosis is not None or self.is_batch:
            return self.diagnosis is not None
        return not bool(is_usable(self.status)) or bool(self.status == Status.interrupted)

    @property
    def khat(self) -> float:
        """Shape of the tail of the importance weights: below 0.5 good, above 0.7 bad."""
        return self._diagnosed("khat").importance.khat

    @property
    def log_evidence(self) -> float:
        """Log of the integral of the target, by importance weights."""
        return self._diagnosed("log_evidence").importance.log_evidence

    @property
    def log_evidence_se(self) -> float:
        """Standard error of `log_evidence`, of what the draws have seen of the target.

        Too small where `khat` is above 0.7 or the target has heavier tails than q.
        """
        return self._diagnosed("log_evidence_se").importance.log_evidence_se

    @property
    def corrected(self) -> Corrected:
        """Moments and draws of the target itself, where importance weights allow it."""
        return Corrected(self.family, self._diagnosed("corrected").importance)

    def _diagnosed(self, name: str) -> Diagnosis:
        self._one_run(name)
        if self.diagnosis is None:
            raise ValueError(
                f"`posterior.{name}` needs a look at the target, which this posterior has not had. "
                "Call `posterior = iblr.diagnose(posterior, target, key=key)` first."
            )
        return self.diagnosis

    def _one_run(self, call: str) -> "Posterior":
        if self.is_batch:
            raise ValueError(
                f"`{call}` is one run's, but this posterior holds a batch. Write "
                f"`posterior.best.{call}` or `posterior[i].{call}`."
            )
        return self

    def _key(self, call: str, key: Key[Array, ""] | None) -> Key[Array, ""]:
        """The one given, or one derived from that of the diagnosis, which came from the user's."""
        self._one_run(call)
        if key is not None:
            return key
        if self.diagnosis is None:
            raise ValueError(
                f"`{call}` draws from the posterior and needs a key: `{call}(key=...)`. Only a "
                "posterior with a diagnosis has one of its own."
            )
        return key_for(self.diagnosis.importance.key, Purpose.OWN_DRAWS)

    # Pictures and other libraries, whose modules are imported where they are asked for.

    def plot_trace(self, tol: float | None = None) -> Any:
        """The way of the fit, a matplotlib figure; see `iblr.plots.plot_trace`."""
        from iblr.plots import plot_trace

        return plot_trace(self._one_run("plot_trace"), tol)

    def plot_pairs(
        self,
        parameters: str | int | Sequence[str | int] | None = None,
        *,
        key: Key[Array, ""] | None = None,
        draws: int = 1000,
    ) -> Any:
        """Draws of pairs of parameters, a matplotlib figure; see `iblr.plots.plot_pairs`."""
        from iblr.plots import plot_pairs

        key = self._key("plot_pairs", key)
        return plot_pairs(self, parameters, key=key, draws=draws)

    def to_arviz(
        self,
        key: Key[Array, ""] | None = None,
        *,
        draws: int = 1000,
        chains: int = 4,
        corrected: bool = False,
    ) -> Any:
        """Draws in ArviZ's container; see `iblr.exports.to_arviz`."""
        from iblr.exports import to_arviz

        key = self._key("to_arviz", key)
        return to_arviz(self, key, draws=draws, chains=chains, corrected=corrected)

    def to_nuts(
        self,
        target: Any = None,
        *,
        key: Key[Array, ""] | None = None,
        chains: int | None = None,
    ) -> Any:
        """Where NUTS may start, and its metric; see `iblr.exports.to_nuts`."""
        from iblr.exports import to_nuts

        return to_nuts(self._one_run("to_nuts"), target, key=key, chains=chains)


def stacked(runs: Sequence[Posterior]) -> Posterior:
    """Several fits as a batch; traces that are shorter than the longest end in nan."""
    longest = max(len(run.trace.step) for run in runs)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values.astype(float), (0, longest - len(values)), constant_values=np.nan)

    def together(name: str) -> Any:
        parts = [getattr(run, name) for run in runs]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    numbers = (*COUNTS, "gap_estimate", "gap_bound")
    fields: dict[str, Any] = {
        **{name: together(name) for name in ("family", "elbo", "elbo_se", "status")},
        **{name: np.stack([getattr(run, name) for run in runs]) for name in numbers},
        **{name: tuple(getattr(run, name) for run in runs) for name in ("state", "stopped_by")},
    }
    return Posterior(
        trace=Trace(
            *(
                np.stack([padded(part) for part in parts], axis=1)
                for parts in zip(*(run.trace for run in runs), strict=True)
            )
        ),
        num_steps=sum(run.num_steps for run in runs),
        num_gradients=sum(run.num_gradients for run in runs),
        seconds=sum(run.seconds for run in runs),
        runs=tuple(runs),
        **fields,
    )
