"""Networks trained by several optimisers: what they learn from, what is kept, what is shown."""

import dataclasses
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from iblr import calibration
from iblr.datasets import DataError, MissingDataError
from iblr.optax import ivon, vogn
from iblr.reproduce import networks, results, runner, training, trajectory
from iblr.reproduce.experiments import bayesian_mlp
from iblr.reproduce.methods import Plan
from iblr.reproduce.networks import Shape
from iblr.reproduce.runs import Monitor
from iblr.reproduce.training import Trainer, Training

ADAMW = Trainer("AdamW", lambda schedule, ess: optax.adamw(schedule), (1e-5, 1e-2), "defaults")
OURS = Trainer(
    "iBLR", lambda schedule, ess: ivon(schedule, ess, b2=0.999), (0.003, 0.1), "b2 0.999", True
)
MATERIAL = dataclasses.replace(  # without hidden layers: the fewer arrays, the sooner compiled
    networks.generated(1, 320, 8, 32), init=partial(networks.mlp_init, sizes=(32, 10))
)


def task(trainer, material=MATERIAL, **options):
    return Training(trainer.name, trainer, lambda: material, "", 2, 3, 2, 4, **options)


def execute(task, folder):
    return task.execute(Monitor(folder, lambda share, text: None))


# Networks and what they are trained on.


def test_labels_of_the_generated_set_are_drawn_from_the_probabilities_it_knows():
    made = networks.generated(0, 5000, 10, 50)
    assert calibration.ece(made.best, made.validation[1]) < 0.03
    assert made.train[0].shape == made.validation[0].shape == (5000, 32)
    assert not np.array_equal(made.train[0], made.validation[0])


def test_a_network_is_what_it_says():
    weights = jax.jit(partial(networks.mlp_init, sizes=(500, 400, 3)))(jax.random.key(0))
    assert weights[0]["w"].std() == pytest.approx(np.sqrt(2 / 500), rel=0.02)
    x = jax.random.normal(jax.random.key(1), (7, 500))
    hidden = np.maximum(np.asarray(x) @ np.asarray(weights[0]["w"]), 0)
    np.testing.assert_allclose(networks.mlp(weights, x), hidden @ weights[1]["w"], atol=1e-4)


def test_the_loss_is_the_mean_over_examples_and_over_their_labels():
    made = networks.characters(Shape(8, 4, 2, 1), 2, rows=6)
    made = dataclasses.replace(made, predict=lambda table, x: table[x])
    x, y = made.train
    table = np.random.default_rng(0).normal(size=(200, 200)).astype(np.float32)
    log_p = table - np.log(np.exp(table).sum(1, keepdims=True))
    loss = made.loss(jnp.asarray(table), (jnp.asarray(x), jnp.asarray(y)))
    assert loss == pytest.approx(-log_p[x, y].mean(), rel=1e-5)
    assert made.ess(made.rows(False)) == y.size == 48


@pytest.mark.slow
def test_a_character_is_predicted_from_those_before_it():
    shape = Shape(context=6, width=8, heads=2, layers=2)
    init = partial(networks.transformer_init, shape=shape, characters=5)
    weights = jax.jit(init)(jax.random.key(0))
    text = jnp.array([0, 1, 2, 3, 4, 0])
    both = jnp.stack([text, text.at[3].set(1)])
    logits, other = jax.jit(partial(networks.transformer, shape))(weights, both)
    np.testing.assert_allclose(logits[:3], other[:3], atol=1e-5)
    assert (jnp.abs(logits[3:] - other[3:]).max(1) > 1e-2).all()


def test_the_manual_is_cut_into_pieces_that_do_not_overlap():
    train, validation = networks.manual()
    assert 0.02 < len(validation) / len(train) < 0.3
    made = networks.characters(Shape(32, 4, 2, 1), 2)
    x, y = made.train
    np.testing.assert_array_equal(x.ravel()[1:], y.ravel()[:-1])
    assert len(x) == (len(train) - 1) // 32


# Training.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return execute(task(OURS), tmp_path_factory.mktemp("trained"))


def test_training_keeps_scores_of_every_epoch_and_seed(trained):
    assert trained["step"].tolist() == [0, 1, 2, 3]
    for score in training.SCORES:
        assert trained[score].shape == trained[f"averaged_{score}"].shape == (4, 2)
    assert trained["reliability"].shape == (4, 2, 3, 15)
    assert (trained["nll"][-1] < trained["nll"][0] - 0.1).all()
    assert (trained["averaged_nll"][-1] != trained["nll"][-1]).all()
    assert trained["nll"][0, 0] != trained["nll"][0, 1]  # another seed, other weights
    assert trained["trials"].shape == (2,)
    assert trained["step_size"] == OURS.grid[int(np.argmin(trained["trials"]))]
    assert not trained["cut_short"]


def test_an_interrupted_training_goes_on_with_the_same_bits(trained, tmp_path, monkeypatch):
    add, looks = trajectory.Record.add, []

    def interrupted(self, step, fits):
        looks.append(step)
        if looks == [0, 2, 0, 1, 2]:  # the trials, then the seeds
            raise KeyboardInterrupt
        add(self, step, fits)

    with monkeypatch.context() as patch:
        patch.setattr(trajectory.Record, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            execute(task(OURS), tmp_path)
    assert list(tmp_path.glob("*-seeds.npz"))
    again = execute(task(OURS), tmp_path)
    for name, array in trained.items():
        if name != "seconds":
            np.testing.assert_array_equal(again[name], array, err_msg=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_runs_at_once_are_those_one_after_the_other(trained, tmp_path, monkeypatch):
    material = dataclasses.replace(MATERIAL)  # not compiled yet
    monkeypatch.setattr(training.jax, "default_backend", lambda: "gpu")
    at_once = execute(task(OURS, material), tmp_path)
    np.testing.assert_allclose(at_once["nll"], trained["nll"], rtol=1e-3)


@pytest.mark.slow
def test_a_limit_stops_training_where_it_is(tmp_path):
    found = execute(task(ADAMW, limit=0.0), tmp_path)
    assert found["step"].tolist() == [0, 1] and found["cut_short"]
    assert "averaged_nll" not in found


@pytest.mark.slow
def test_learning_rates_are_tried_without_the_rows_they_are_judged_on(tmp_path):
    x, y = MATERIAL.train
    held_out = np.arange(len(y)) % 10 == 0
    spoilt = np.where(held_out[:, None], np.nan, x).astype(np.float32)
    nowhere = np.full_like(MATERIAL.validation[0], np.nan)
    material = dataclasses.replace(
        MATERIAL, train=(spoilt, y), validation=(nowhere, MATERIAL.validation[1])
    )
    train = training.prepared(ADAMW, material, 1)
    rows = material.rows(True)
    numbers = training.Numbers(1e-2, 9.0, material.ess(rows))
    key = jax.random.key(0)
    (fit,) = train.epoch((train.first(key, numbers),), [key], 0, [numbers], rows)
    assert jnp.isfinite(fit.loss) and all(jnp.isfinite(w).all() for w in jax.tree.leaves(fit[0]))
    judge = training.judged(ADAMW, dataclasses.replace(material, train=(x, y)), 4)
    assert np.isfinite(judge(fit, key, True)["nll"]) and np.isnan(judge(fit, key, False)["nll"])


def test_minibatches_have_every_row_once():
    rows = np.arange(3, 103)
    order = training._order(jax.random.key(0), rows, (12, 10))
    np.testing.assert_array_equal(np.sort(order[:10].ravel()), rows)
    assert (order[10:] == 0).all()
    assert not np.array_equal(order, training._order(jax.random.key(1), rows, (12, 10)))


@pytest.mark.slow
def test_the_whole_experiment_runs_through_with_every_optimiser(tmp_path, monkeypatch):
    small = {
        name: dataclasses.replace(source, epochs=2, trial_epochs=1)
        for name, source in bayesian_mlp.SOURCES.items()
        if not source.full
    }
    monkeypatch.setattr(bayesian_mlp, "SOURCES", small)
    (result,) = runner.reproduce([bayesian_mlp.EXPERIMENT], Plan(False, 1), tmp_path)
    assert result.status == "done", result.reason
    assert result.section is not None and not result.section.faults
    kept = results.load(tmp_path, "bayesian-mlp")
    assert kept is not None
    assert (kept[1]["generated seconds an epoch"]["seconds_an_epoch"] > 0).all()
    for arrays in (kept[1]["generated VOGN"], kept[1]["generated SGD"]):
        assert np.isfinite(arrays["nll"]).all()


@pytest.mark.slow
def test_vogn_learns_too(tmp_path):
    trainer = Trainer("VOGN", lambda s, ess: vogn(s, ess), (0.1, 0.3), "", True, True)
    found = execute(task(trainer), tmp_path)
    assert (found["nll"][-1] < found["nll"][0]).all()


@pytest.mark.slow
def test_the_time_of_an_epoch_is_that_of_the_faster_size_of_chunks(monkeypatch, tmp_path):
    now, runs = 0.0, []

    def part(trainer, chunk):
        def run():
            nonlocal now
            runs.append((trainer.name, chunk))
            now += {32: 4.0, 4: 2.0, 1: 0.5}[chunk]

        return run

    vogn_like = dataclasses.replace(ADAMW, name="VOGN", squares=True)
    sizes = lambda trainer, material: (32, 4) if trainer.squares else (1,)  # noqa: E731
    monkeypatch.setattr(training, "chunks", sizes)
    monkeypatch.setattr(training, "_ready", lambda t, material, chunk, steps: part(t, chunk))
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    timing = training.Timing("time", (vogn_like, ADAMW), lambda: MATERIAL, "")
    found = timing.execute(Monitor(tmp_path, lambda share, text: None))["seconds_an_epoch"]
    assert (found == [2.0, 0.5]).all() and found.shape == (training.ROUNDS, 2)
    assert runs[:3] == [("VOGN", 32), ("VOGN", 4), ("AdamW", 1)]


# What the experiment shows.


def fake(nll, ece, accuracy, averaged, seeds=3):
    scores = {"nll": nll, "ece": ece, "accuracy": accuracy, "brier": 0.5}
    arrays = {name: np.full((3, seeds), value) for name, value in scores.items()}
    bins = np.stack([np.linspace(0.1, 1, 15), np.linspace(0, 0.9, 15), np.full(15, 1 / 15)])
    arrays["reliability"] = np.broadcast_to(bins, (3, seeds, 3, 15))
    if averaged:
        arrays |= {f"averaged_{name}": array for name, array in arrays.items()}
    return arrays | {
        "loss": np.ones((3, seeds)),
        "step": np.arange(3),
        "grid": np.array([0.1, 0.2]),
        "trials": np.array([1.0, 2.0]),
        "trial_accuracy": np.array([0.5, 0.4]),
        "step_size": np.asarray(0.1),
        "cut_short": np.asarray(False),
    }


def shown(monkeypatch, ours, seconds, plan, seeds=3):
    source = dataclasses.replace(
        bayesian_mlp.SOURCES["generated"], make=lambda: MATERIAL, full=plan.full
    )
    monkeypatch.setattr(bayesian_mlp, "SOURCES", {"generated": source})
    others = {
        "VOGN": fake(1.4, 0.02, 0.55, True, seeds),
        "AdamW": fake(1.6, 0.1, 0.54, False, seeds),
        "SGD": fake(1.6, 0.1, 0.54, False, seeds),
    }
    found = {name: fake(*ours, True, seeds) for name in ("iBLR-adam", "IVON")}
    raw = {f"generated {name}": arrays for name, arrays in (found | others).items()}
    raw["generated seconds an epoch"] = {
        "seconds_an_epoch": np.array([seconds] * 3),
        "device": np.asarray("a machine"),
    }
    return bayesian_mlp.section(plan, raw)


def test_claims_say_what_was_found(monkeypatch):
    fast, slow = (1.0, 2.0, 9.0, 0.8, 0.8), (1.0, 4.0, 9.0, 0.8, 0.8)
    full = Plan(True, 3)
    section = shown(monkeypatch, (1.3, 0.02, 0.546), fast, full)
    assert [claim.verdict for claim in section.claims] == ["holds"] * 6
    assert len(section.pictures) == 3 and len(section.tables) == 3
    section = shown(monkeypatch, (1.7, 0.02, 0.54), slow, full)
    verdicts = [claim.verdict for claim in section.claims]
    assert [index for index, verdict in enumerate(verdicts) if verdict == "holds"] == [1]
    assert verdicts.count("does not hold") == 5
    assert section.claims[3].why == "It is faster, but by less."
    assert section.claims[4].why == "Not its NLL."
    slower = (4.0, 4.0, 9.0, 0.8, 0.8)
    section = shown(monkeypatch, (1.7, 0.2, 0.54), slower, Plan(False, 1), seeds=1)
    assert {claim.verdict for claim in section.claims} == {"too little to tell"}


def test_the_reliability_of_all_seeds_is_that_of_their_rows_together():
    arrays = fake(1.0, 0.1, 0.5, False, seeds=2)
    bins = np.full((2, 3, 15), np.nan)
    bins[:, 2] = 0
    bins[0, :, 7], bins[1, :, 7] = (0.5, 0.4, 0.75), (0.52, 0.8, 0.25)
    arrays["reliability"] = bins[None]
    curve = bayesian_mlp._reliability("AdamW", arrays)
    np.testing.assert_allclose((curve.x, curve.y), [[0.505], [0.5]])


def test_data_that_are_missing_or_wrong_are_told(monkeypatch):
    def missing():
        raise MissingDataError("not there")

    def wrong():
        raise DataError("not what it should be")

    sources = dict(bayesian_mlp.SOURCES)
    sources["CIFAR-10"] = dataclasses.replace(sources["CIFAR-10"], make=missing)
    sources["Fashion-MNIST"] = dataclasses.replace(sources["Fashion-MNIST"], make=wrong)
    monkeypatch.setattr(bayesian_mlp, "SOURCES", sources)
    plan = Plan(True, 3)
    tasks = bayesian_mlp.tasks(plan)
    assert {task.name.removesuffix(" AdamW") for task in tasks if "AdamW" in task.name} == {
        "Python's manual"
    }
    raw = {t.name: fake(1.0, 0.1, 0.5, "iBLR" in t.name) for t in tasks[:-1]}
    raw[tasks[-1].name] = {
        "seconds_an_epoch": np.array([[2.0, 1.0]]),
        "device": np.asarray("a machine"),
    }
    section = bayesian_mlp.section(plan, raw)
    assert section.faults == ("not what it should be",)
    told = [claim for claim in section.claims if claim.verdict == "not run"]
    assert [claim.text.split(":")[0] for claim in told] == ["Fashion-MNIST", "CIFAR-10"]
    assert "not on this machine" in told[1].ours


def test_a_python_without_its_manual_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", types.ModuleType("topics"))
    with pytest.raises(MissingDataError, match="standard library"):
        networks.manual()
