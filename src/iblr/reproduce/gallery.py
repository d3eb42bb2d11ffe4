"""Mixtures of Gaussians on densities of the plane, one picture for every number of components."""

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np

import iblr
from iblr.reproduce.methods import Arrays, Checkpoints, Method, Plan, Problem
from iblr.reproduce.pictures import Claim, Gallery, Panel, Section, Table
from iblr.reproduce.plane_targets import TARGETS, Moments, PlaneTarget, Quadrature
from iblr.reproduce.runner import Experiment
from iblr.reproduce.runs import Run
from iblr.reproduce.wording import number, spread

DEFAULT_STEPS = 2000
RISE = 0.02  # nats by which more components may be worse, for chance


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the authors ran on one density, where it is known.

    Attributes:
        samples: draws an iteration.
        step_size: t.
        weight_rate: the step of the weights over t.
        steps: iterations.
        quick: components of a quick run.
        words: where it comes from.
    """

    samples: int
    step_size: float
    weight_rate: float
    steps: int
    quick: tuple[int, ...]
    words: str = "as in the authors' code"

    @property
    def method(self) -> Method:
        """The paper's own estimator."""
        return Method("iBLR-rep", iblr.Rep(self.samples), iblr.improved_step, self.step_size)


DEFAULT = Method("iBLR at our defaults")


def plane_experiment(
    name: str,
    title: str,
    figure: str,
    claim: str,
    setting: Setting,
    *,
    densities: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Experiment:
    """An experiment that fits one or more densities with every number of components."""
    targets = [TARGETS[density] for density in densities or (name,)]

    def tasks(plan: Plan) -> list[Run]:
        runs = []
        for target in targets:
            for K in plan.pick(setting.quick, target.components):
                runs.append(_run(plan, target, K, DEFAULT, 1.0, DEFAULT_STEPS))
                if plan.full:
                    runs.append(
                        _run(plan, target, K, setting.method, setting.weight_rate, setting.steps)
                    )
        return runs

    def section(plan: Plan, raw: dict[str, Arrays]) -> Section:
        parts = [_section(target, setting, raw) for target in targets]
        return Section(
            claims=tuple(item for part in parts for item in part.claims),
            pictures=tuple(item for part in parts for item in part.pictures),
            tables=tuple(item for part in parts for item in part.tables),
            settings=_settings(setting, targets[0]),
            notes=notes,
        )

    return Experiment(name, title, figure, claim, tasks, section)


def _run(
    plan: Plan, target: PlaneTarget, K: int, method: Method, weight_rate: float, steps: int
) -> Run:
    def start(key: Any) -> iblr.GaussianMixture:
        return iblr.GaussianMixture.init(
            key,
            K,
            2,
            scale=target.scale,
            spread=target.spread,
            learn_weights=weight_rate > 0,
            weight_rate=weight_rate or 1.0,
        )

    def metrics(family: Any) -> Arrays:
        weights, means, covariances = _moments(family)
        mixtures = zip(np.exp(weights), means, covariances, strict=True)
        return {
            "kl": np.array([_quadrature(target.name).kl(Moments(*mixture)) for mixture in mixtures])
        }

    def keep(family: Any) -> Arrays:
        return Moments.of(family)._asdict()

    return Run(
        f"{target.name} K={K} {method.name}",
        method,
        lambda: (Problem(target.log_density, start, metrics, "kl", keep),),
        plan.seeds,
        Checkpoints.even(steps, 4),
        effort=plan.pick(4.0, 20.0),
        limit=plan.limit,
    )


@cache
def _quadrature(name: str) -> Quadrature:
    return Quadrature(TARGETS[name])


@jax.jit
def _moments_of(family: Any) -> tuple[Any, Any, Any]:
    covariances = jax.vmap(jax.vmap(lambda q: q.covariance))(family.components)
    return family.log_weights, family.components.mean, covariances


def _moments(family: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(part, float) for part in _moments_of(family))


def _section(target: PlaneTarget, setting: Setting, raw: dict[str, Arrays]) -> Section:
    """What is to be shown of one density."""
    x, y, points = target.grid
    exact = np.exp(target.evaluate(points) - target.log_z).reshape(len(y), len(x))
    pictures, claims, cells = [], [], {}
    for method in (DEFAULT, setting.method):
        found = {
            K: raw[name]
            for K in target.components
            if (name := f"{target.name} K={K} {method.name}") in raw
        }
        if not found:
            continue
        kls = {K: arrays["kl"][-1] for K, arrays in found.items()}
        panels = [
            Panel(f"K = {K}", density.reshape(exact.shape), f"KL {spread(kls[K])}")
            for K, arrays in found.items()
            for density in [_middle(arrays).density(points)]
        ]
        pictures.append(
            Gallery(
                f"{target.name}: {method.name}",
                x + target.origin[0],
                y + target.origin[1],
                exact,
                tuple(panels),
                caption="The seed of the median KL(q || p), in nats by quadrature.",
            )
        )
        claims.append(_claim(target.name, method.name, kls))
        for K, values in kls.items():
            cells.setdefault(K, {})[method.name] = spread(values)
    columns = [picture.title.removeprefix(f"{target.name}: ") for picture in pictures]
    rows = [(str(K), *(found[name] for name in columns)) for K, found in cells.items()]
    table = Table(f"{target.name}: KL(q || p) in nats", ("K", *columns), tuple(rows))
    return Section(claims=tuple(claims), pictures=tuple(pictures), tables=(table,))


def _middle(arrays: Arrays) -> Moments:
    """The mixture of the seed with the median KL."""
    order = np.argsort(arrays["kl"][-1])
    run = order[(len(order) - 1) // 2]
    return Moments(*(arrays[f"final_{name}"][run] for name in Moments._fields))


def _claim(density: str, method: str, kls: dict[int, np.ndarray]) -> Claim:
    middle = np.array([np.median(values) for values in kls.values()])
    sizes = list(kls)
    best = np.minimum.accumulate(middle)[:-1]
    rise = float(np.max(np.where(middle[1:] <= best, -np.inf, middle[1:] - best), initial=-np.inf))
    better = bool(middle[-1] < middle[0] and rise <= RISE)
    ours = f"KL {number(middle[0])} at K = {sizes[0]}, {number(middle[-1])} at K = {sizes[-1]}"
    ours += f", largest rise {number(rise)}" if rise > 0 else ", falls throughout"
    failed = sum(int(np.isinf(values).sum()) for values in kls.values())
    ours += f"; {failed} runs failed" if failed else ""
    return Claim(
        f"{method} matches {density} better as K grows",
        ours,
        "a picture",
        better,
        ""
        if better
        else "From random starts a seed may end in a poorer local optimum than with fewer "
        "components.",
    )


def _settings(setting: Setting, target: PlaneTarget) -> tuple[tuple[str, str], ...]:
    return (
        ("Start", f"means N(0, {target.spread:g}^2 I), covariances {target.scale:g}^2 I"),
        ("Our defaults", f"Stl(pairs=1), {DEFAULT_STEPS} iterations, learned weights"),
        (
            "iBLR-rep (with --full)",
            f"{setting.samples} draws, t = {setting.step_size:g}, weights at "
            f"{setting.weight_rate:g} t, {setting.steps} iterations, {setting.words}",
        ),
        ("KL", "Gauss-Legendre panels in double precision"),
    )
