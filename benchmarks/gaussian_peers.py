"""Other ways to a Gaussian, and ours, behind one adapter each.

    python benchmarks/gaussian_peers.py       # which are installed

`PEERS[name](log_density, start, budget)` prepares a method for a log density over R^d: it starts at
N(start, I), computes in float32 (GSM and BaM in float64) and may evaluate the density or its
gradient `budget` times. What comes back has a dict of settings (rates of Adam, sizes of batches);
`run(setting, key)` yields a `Snapshot` at the first step and whenever a twentieth (PyMC, which is
slow to look at: a half) more gradients were spent. Compiling is not in the seconds.

    ours           iblr.fit without settings, seen step by step: iblr.regression, after as many
                   evaluations as `fit` checks a target with
    NumPyro        AutoMultivariateNormal, 10 draws a step, Adam with cosine decay, five rates
    BlackJAX       full-rank VI, the same
    Pathfinder     BlackJAX, defaults, so at most 30 iterations; the draws that choose among the
                   path's Gaussians count, and one gradient an iteration (those of line searches it
                   does not tell: not counted)
    multi-path     eight Pathfinders from N(start, I), draws resampled by PSIS
    PyMC           full-rank ADVI, one draw a step as is its default, Adagrad at five rates
    GSM            the updates of `gsmvi`, batches of 2, 8 and 32 (Modi et al. 2023)
    BaM            batch and match (Cai et al. 2024), batches of 8, 32 and 128, from d = 128 on also
                   of 1.2 d, with both of its schedules
    NUTS           NumPyro, 1000 warm-up steps and up to 1000 draws, as the budget has room

BaM is written here from the paper. With z and g the draws of a batch and the gradients of log p
there, zbar, gbar, C and Gamma their means and covariances (over B), and a regulariser lambda, the
Gaussian that minimises

    (1/B) sum_b |grad log q(z_b) - g_b|^2_Sigma + (2/lambda) KL(N(mu_t, Sigma_t) || q)

solves Sigma U Sigma + Sigma = V, and mu = (mu_t + lambda (Sigma gbar + zbar)) / (1 + lambda), with

    U = lambda Gamma + lambda/(1 + lambda) gbar gbar'
    V = Sigma_t + lambda C + lambda/(1 + lambda) (mu_t - zbar)(mu_t - zbar)'.

With V = L L' the solution is L X L', where X M X + X = I for M = L'U L, so that
X = 2 / (1 + sqrt(1 + 4 M)). The schedules are lambda_t = B d / (t + 1) and the constant B d, which
the paper takes for Gaussian targets.
"""

import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import iblr
from iblr import regression
from iblr.preflight import POINTS

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SAMPLES = 10
GROWTH = 0.05
WARMUP, DRAWS = 1000, 1000


class Snapshot(NamedTuple):
    """Where a method is: N(mean, root root'), or draws where it is not a Gaussian."""

    gradients: int
    seconds: float
    mean: np.ndarray
    root: np.ndarray
    draws: np.ndarray | None = None


class Method(NamedTuple):
    """A method prepared for a target."""

    settings: dict[str, Any]
    run: Callable[[Any, jax.Array], Iterator[Snapshot]]
    compile_seconds: Callable[[], float]


def checkpoints(steps: int, growth: float = GROWTH) -> list[int]:
    found = [1]
    while found[-1] < steps:
        found.append(min(max(found[-1] + 1, math.ceil(found[-1] * (1 + growth))), steps))
    return found


def finite(*arrays) -> bool:
    return all(bool(np.isfinite(np.asarray(x)).all()) for x in arrays)


def stepped(
    settings: dict[str, Any],
    begin: Callable,
    step: Callable,
    view: Callable,
    num_steps: Callable[[Any], int],
    gradients: Callable[[Any, int, Any], int],
    double: bool = False,
) -> Method:
    """A method of equal steps, many of them in one compiled loop.

    Args:
        settings: what `begin` is called with, by name.
        begin: a setting and a key to the first state.
        step: a state, its index and a key to the next state.
        view: a state and the number of steps to (mean, root) or (mean, root, draws), or None.
        num_steps: of a setting.
        gradients: of a setting, a number of steps and a state.
        double: whether to compute in float64; not around a `yield`, where others compute.
    """
    compiling = [0.0]

    @jax.jit
    def many(state, first, last, key):
        return jax.lax.fori_loop(
            first, last, lambda i, s: step(s, i, jax.random.fold_in(key, i)), state
        )

    def run(setting, key) -> Iterator[Snapshot]:
        seconds, done = 0.0, 0
        with jax.enable_x64(double):
            state = begin(setting, key)
            started = time.perf_counter()
            jax.block_until_ready(many(state, 0, 0, key))
            compiling.append(time.perf_counter() - started)
        for wanted in checkpoints(num_steps(setting)):
            with jax.enable_x64(double):
                started = time.perf_counter()
                state = jax.block_until_ready(many(state, done, wanted, key))
                seconds += time.perf_counter() - started
                done = wanted
                seen = view(state, done)
            if seen is None:
                continue
            if not finite(*seen[:1] if len(seen) > 2 else seen):
                return
            mean, root, *draws = (np.asarray(x, np.float64) for x in seen)
            yield Snapshot(gradients(setting, done, state), seconds, mean, root, *draws)

    return Method(settings, run, lambda: max(compiling))


def ours(log_density: Callable, start: jax.Array, budget: int) -> Method:
    cost = 2 * regression.num_pairs(len(start))
    target = iblr.Target(log_density)
    compiling = [0.0]

    def run(setting, key) -> Iterator[Snapshot]:
        state = around(iblr.Gaussian.standard(len(start), dtype=start.dtype), start, key)
        started = time.perf_counter()
        jax.block_until_ready(advance(state, target))
        compiling.append(time.perf_counter() - started)
        seconds, done = 0.0, 0
        for wanted in checkpoints(budget // cost):
            started = time.perf_counter()
            while done < wanted:
                state = advance(state, target)
                done += 1
            q = jax.block_until_ready(state.family)
            seconds += time.perf_counter() - started
            mean, root = np.asarray(q.mean, np.float64), np.asarray(q.factor.T, np.float64)
            if not finite(mean, root):
                return
            yield Snapshot(POINTS + done * cost, seconds, mean, root)

    return Method({"": None}, run, lambda: max(compiling))


def around(family: iblr.Gaussian, start: jax.Array, key: jax.Array) -> regression.Regression:
    """A regression that begins at `start`."""
    return regression.begin(eqx.tree_at(lambda q: q.mean, family, start), key)


@eqx.filter_jit
def advance(state: regression.Regression, target: iblr.Target) -> regression.Regression:
    return regression.advance(state, target)[0]


class Outcome(NamedTuple):
    """What the automatic fit hands over when it has stopped."""

    mean: np.ndarray
    root: np.ndarray
    gradients: int
    seconds: float
    stopped_by: str
    gap: float
    bound: float
    khat: float
    verdict: str


def automatic(target: iblr.Target, init: Any, support: Any, key: jax.Array, tol=0.01) -> Outcome:
    """`iblr.fit` without settings."""
    posterior = iblr.fit(target, init=init, support=support, key=key, tol=tol, throw=False)
    family = posterior.family
    return Outcome(
        np.asarray(family.mean, np.float64),
        np.asarray(family.factor.T, np.float64),
        int(posterior.num_gradients),
        float(posterior.seconds),
        posterior.stopped_by,
        float(posterior.gap_estimate),
        float(posterior.gap_bound),
        float(posterior.khat) if posterior.diagnosis is not None else math.nan,
        posterior.verdict if posterior.diagnosis is not None else posterior.message,
    )


def adam(steps: int) -> optax.GradientTransformation:
    """With cosine decay; `with_rate` sets the rate in a state, so that all share one program."""
    return optax.chain(
        optax.scale_by_adam(),
        optax.scale_by_schedule(optax.cosine_decay_schedule(-1.0, steps)),
        optax.inject_hyperparams(optax.scale)(step_size=1.0),
    )


def with_rate(state, rate: float):
    return optax.tree_utils.tree_set(state, step_size=jnp.asarray(rate, float))


def numpyro(log_density: Callable, start: jax.Array, budget: int) -> Method:
    import numpyro
    import numpyro.distributions as dist
    from numpyro import infer

    steps = max(budget // SAMPLES, 1)

    def model():
        z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real_vector, (), start.shape))
        numpyro.factor("target", log_density(z))

    guide = infer.autoguide.AutoMultivariateNormal(
        model, init_loc_fn=infer.init_to_value(values={"z": start}), init_scale=1.0
    )
    optimiser = numpyro.optim.optax_to_numpyro(adam(steps))
    svi = infer.SVI(model, guide, optimiser, infer.Trace_ELBO(num_particles=SAMPLES))
    first = svi.init(jax.random.key(0))

    def begin(rate, key):
        index, (params, state) = first.optim_state
        return first._replace(optim_state=(index, (params, with_rate(state, rate))), rng_key=key)

    def view(state, done):
        params = svi.get_params(state)
        return params["auto_loc"], params["auto_scale_tril"]

    return stepped(
        {f"rate {rate:g}": rate for rate in RATES},
        begin,
        lambda state, i, key: svi.update(state)[0],
        view,
        lambda rate: steps,
        lambda rate, done, state: SAMPLES * done,
    )


def blackjax(log_density: Callable, start: jax.Array, budget: int) -> Method:
    from blackjax.vi import fullrank_vi

    steps = max(budget // SAMPLES, 1)
    optimiser = adam(steps)

    def begin(rate, key):
        state = fullrank_vi.init(start, optimiser)
        return state._replace(mu=start, opt_state=with_rate(state.opt_state, rate))

    def view(state, done):
        return state.mu, fullrank_vi._unflatten_cholesky(state.chol_params, len(start))

    return stepped(
        {f"rate {rate:g}": rate for rate in RATES},
        begin,
        lambda state, i, key: fullrank_vi.step(key, state, log_density, optimiser, SAMPLES)[0],
        view,
        lambda rate: steps,
        lambda rate, done, state: SAMPLES * done,
    )


def at_once(solve: Callable, view: Callable) -> Method:
    """A method that ends by itself; `view` makes a snapshot of what it returns and the seconds."""
    compiling = [0.0]
    solve = jax.jit(solve)

    def run(setting, key) -> Iterator[Snapshot]:
        started = time.perf_counter()
        jax.block_until_ready(solve(key))
        compiling.append(time.perf_counter() - started)
        started = time.perf_counter()
        found = jax.block_until_ready(solve(key))
        seconds = time.perf_counter() - started
        snapshot = view(found, seconds)
        if finite(snapshot.mean):
            yield snapshot

    return Method({"": None}, run, lambda: max(compiling))


def pathfinder(log_density: Callable, start: jax.Array, budget: int) -> Method:
    from blackjax.vi import pathfinder

    draws = 200

    def view(found, seconds):
        state, iterations = found
        alpha, beta, gamma = (np.asarray(x, np.float64) for x in state[3:])
        covariance = np.diag(alpha) + beta @ gamma @ beta.T
        mean = np.asarray(state.position, np.float64) + covariance @ np.asarray(state.grad_position)
        return Snapshot(int(iterations) * (1 + draws), seconds, mean, root_of(covariance))

    def solve(key):
        state, info = pathfinder.approximate(key, log_density, start, draws)
        return state, 1 + jnp.isfinite(info.path.elbo).sum()

    return at_once(solve, view)


def multipath(log_density: Callable, start: jax.Array, budget: int) -> Method:
    from blackjax.vi import multipathfinder, pathfinder

    draws, paths = 200, 8

    def solve(key):
        keys = jax.random.split(key, 4)
        starts = start + jax.random.normal(keys[0], (paths, len(start)), start.dtype)

        def one(keys, position):  # as multi_approximate does, which does not tell the iterations
            state, info = pathfinder.approximate(keys[0], log_density, position, draws)
            rows, log_q = pathfinder.sample(keys[1], state, draws)
            iterations = 1 + jnp.isfinite(info.path.elbo).sum()
            return state, rows, jax.vmap(log_density)(rows), log_q, iterations

        # one after the other: under vmap XLA was seen to hang on two cores
        inputs = jax.random.split(keys[1], (paths, 2)), starts
        *parts, iterations = jax.lax.map(lambda x: one(*x), inputs)
        state = multipathfinder.MultipathfinderState(*parts)
        log_weights, _ = multipathfinder.psis_weights(state)
        pool = state.samples.reshape(-1, len(start))
        rows = jax.random.choice(keys[2], len(pool), (DRAWS,), p=jnp.exp(log_weights))
        return pool[rows], iterations.sum() * (1 + draws) + paths * draws

    def view(found, seconds):
        return of_draws(int(found[1]), seconds, np.asarray(found[0], np.float64))

    return at_once(solve, view)


def of_draws(gradients: int, seconds: float, rows: np.ndarray) -> Snapshot:
    covariance = np.cov(rows.T).reshape(rows.shape[1], -1)
    return Snapshot(gradients, seconds, rows.mean(0), root_of(covariance), rows)


def root_of(covariance: np.ndarray) -> np.ndarray:
    """nan where it is singular."""
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return np.full_like(covariance, np.nan)


def pymc(log_density: Callable, start: jax.Array, budget: int) -> Method:
    warnings.filterwarnings("ignore", category=FutureWarning)
    import logging

    import pymc
    import pytensor

    logging.getLogger("pymc").setLevel(logging.ERROR)
    d, compiling = len(start), [0.0]

    def run(rate, key) -> Iterator[Snapshot]:
        began = time.perf_counter()
        optimiser = pymc.adagrad_window(learning_rate=rate)
        with pytensor.config.change_flags(floatX="float32"), pymc.Model():
            z = pymc.Flat("z", shape=d)
            pymc.Potential("target", pytensor.wrap_jax(log_density)(z))
            seed = int(jax.random.randint(key, (), 0, 2**31 - 1))
            advi = pymc.FullRankADVI(start={"z": np.asarray(start)}, random_seed=seed)
            look = pytensor.function([], [advi.approx.mean, advi.approx.cov])
            advi.fit(1, obj_optimizer=optimiser, progressbar=False)
            compiling.append(time.perf_counter() - began)
            seconds, done = 0.0, 1
            for wanted in checkpoints(budget, 0.5):
                if wanted > done:
                    started = time.perf_counter()
                    try:
                        advi.refine(wanted - done, progressbar=False)
                    except FloatingPointError:
                        return
                    seconds, done = seconds + time.perf_counter() - started, wanted
                mean, covariance = look()
                root = root_of(covariance.astype(np.float64))
                if not finite(mean, root):
                    return
                yield Snapshot(done, seconds, mean.astype(np.float64), root)

    return Method({f"rate {rate:g}": rate for rate in RATES}, run, lambda: max(compiling))


def matched(log_density: Callable, start: jax.Array, budget: int, sizes, update) -> Method:
    """Methods that match scores at a batch of draws; an update that is no covariance is refused.

    In float64: in float32 the updates lose digits (BaM then needs 384 gradients on the Gaussian
    with d = 100, not 128).
    """
    score = jax.vmap(jax.grad(log_density))
    d = len(start)
    identity, start = np.eye(d), np.asarray(start, np.float64)
    methods = {}
    for size in sizes:

        def step(state, i, key, size=size):
            mean, covariance, root = state
            z = mean + jax.random.normal(key, (size, d), mean.dtype) @ root.T
            new_mean, new = update(mean, covariance, z, score(z), i)
            new = 0.5 * (new + new.T)
            new_root = jnp.linalg.cholesky(new)
            good = jnp.isfinite(new_root).all() & jnp.isfinite(new_mean).all()
            return jax.tree.map(
                lambda a, b: jnp.where(good, a, b), (new_mean, new, new_root), state
            )

        methods[f"batch {size}"] = stepped(
            {"": None},
            lambda setting, key: jax.tree.map(jnp.asarray, (start, identity, identity)),
            step,
            lambda state, done: (state[0], state[2]),
            lambda setting, size=size: max(budget // size, 1),
            lambda setting, done, state, size=size: size * done,
            double=True,
        )
    return Method(
        {name: name for name in methods},
        lambda setting, key: methods[setting].run(None, key),
        lambda: max(method.compile_seconds() for method in methods.values()),
    )


def gsm(log_density: Callable, start: jax.Array, budget: int) -> Method:
    from gsmvi.gsm import gsm_update

    def update(mean, covariance, z, scores, i):
        return gsm_update(z, scores, mean, covariance)

    return matched(log_density, start, budget, (2, 8, 32), update)


def match(mean, covariance, z, scores, regulariser):
    """The update of batch and match; see the head of this file."""
    share = regulariser / (1 + regulariser)
    z_mean, g_mean = z.mean(0), scores.mean(0)
    dz, dg, way = z - z_mean, scores - g_mean, mean - z_mean
    U = regulariser * dg.T @ dg / len(z) + share * jnp.outer(g_mean, g_mean)
    V = covariance + regulariser * dz.T @ dz / len(z) + share * jnp.outer(way, way)
    L = jnp.linalg.cholesky(V)
    values, turn = jnp.linalg.eigh(L.T @ U @ L)
    scale = 2 / (1 + jnp.sqrt(1 + 4 * jnp.maximum(values, 0)))
    LT = L @ turn
    new = (LT * scale) @ LT.T
    return (1 - share) * mean + share * (new @ g_mean + z_mean), new


def bam(log_density: Callable, start: jax.Array, budget: int) -> Method:
    def decaying(mean, covariance, z, scores, i):
        return match(mean, covariance, z, scores, z.size / (i + 1.0))

    def constant(mean, covariance, z, scores, i):
        return match(mean, covariance, z, scores, float(z.size))

    sizes = [8, 32, 128]
    if len(start) >= max(sizes):  # one batch that is larger than d solves a Gaussian
        sizes.append(math.ceil(1.2 * len(start)))
    schedules = {"": decaying, " const": constant}
    found = {
        name: matched(log_density, start, budget, sizes, update)
        for name, update in schedules.items()
    }
    settings = {key + name: (name, key) for name in found for key in found[name].settings}
    return Method(
        settings,
        lambda setting, key: found[setting[0]].run(setting[1], key),
        lambda: max(method.compile_seconds() for method in found.values()),
    )


def nuts(log_density: Callable, start: jax.Array, budget: int) -> Method:
    from numpyro.infer import NUTS

    kernel = NUTS(potential_fn=lambda z: -log_density(z))
    d = len(start)

    def begin(setting, key):
        state = kernel.init(key, WARMUP, start, (), {})
        return state, jnp.zeros((DRAWS, d), start.dtype), jnp.zeros((), jnp.int32)

    def step(carry, i, key):
        state, rows, spent = carry

        def move():
            after = kernel.sample(state, (), {})
            kept = jnp.where(i < WARMUP, rows, rows.at[jnp.maximum(i - WARMUP, 0)].set(after.z))
            return after, kept, spent + after.num_steps.astype(jnp.int32)

        return jax.lax.cond(spent < budget, move, lambda: carry)

    def view(carry, done):
        number = min(done, int(carry[0].i)) - WARMUP
        if number < max(2 * d, 20):
            return None
        rows = np.asarray(carry[1][:number], np.float64)
        seen = of_draws(0, 0.0, rows)
        return seen.mean, seen.root, rows

    return stepped(
        {"": None},
        begin,
        step,
        view,
        lambda setting: WARMUP + DRAWS,
        lambda setting, done, carry: int(carry[2]),
    )


class Peer(NamedTuple):
    """An adapter and what must be installed for it."""

    prepare: Callable[[Callable, jax.Array, int], Method]
    needs: str = "iblr"


PEERS = {
    "ours": Peer(ours),
    "NumPyro": Peer(numpyro, "numpyro"),
    "BlackJAX": Peer(blackjax, "blackjax"),
    "Pathfinder": Peer(pathfinder, "blackjax"),
    "multi-path": Peer(multipath, "blackjax"),
    "PyMC": Peer(pymc, "pymc"),
    "GSM": Peer(gsm, "gsmvi"),
    "BaM": Peer(bam),
    "NUTS": Peer(nuts, "numpyro"),
}
SCHEDULED = ("NumPyro", "BlackJAX")  # whose steps depend on the budget


def installed() -> tuple[list[str], list[str]]:
    """Names of the peers that can run, and of those that cannot."""
    here = {name: importlib.util.find_spec(peer.needs) is not None for name, peer in PEERS.items()}
    return [n for n in here if here[n]], [n for n in here if not here[n]]


def presented(asked: Iterable[str]) -> Iterator[str]:
    """Which peers take part in a benchmark, of what versions, and which do not."""
    asked, (here, missing) = list(asked), installed()
    for name in [name for name in asked if name in missing]:
        yield f"left out: {name} (not installed: {PEERS[name].needs})"
    unasked = [name for name in PEERS if name not in [*asked, "ours"]]
    if unasked:
        yield f"not asked for: {', '.join(unasked)}"
    libraries = {PEERS[name].needs: None for name in asked if name in here}
    versions = [f"{name} {metadata.version(name)}" for name in libraries if name != "iblr"]
    yield f"peers: {', '.join(versions) or 'none'}"


def main() -> None:
    here, missing = installed()
    print("installed:", ", ".join(here))
    for name in missing:
        print(f"left out:  {name} (pip install {PEERS[name].needs})")


if __name__ == "__main__":
    main()
