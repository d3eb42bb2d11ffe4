"""The runner and the command line: choose, keep, resume, refuse, tell."""

import dataclasses
import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import iblr
from iblr import baselines, cli
from iblr.datasets import DataError, MissingDataError
from iblr.families.curvature import Dense, Parameterisation, improved
from iblr.reproduce import factor_model, results, runner, trajectory, wording
from iblr.reproduce.catalogue import EXPERIMENTS
from iblr.reproduce.experiments import gamma_factor, toy_logistic
from iblr.reproduce.logistic import Gaussian
from iblr.reproduce.methods import Checkpoints, Method, Plan, Problem
from iblr.reproduce.pictures import Axis, Claim, Curve, Curves, Section
from iblr.reproduce.runs import Run

GRID = (0.01, 0.3)


def log_density(z):
    return -0.5 * ((z - 1) ** 2).sum()


def metrics(family):
    mean, covariance = trajectory.moments(family)
    return {"loss": ((mean - 1) ** 2).sum(1) + np.abs(covariance - np.eye(2)).sum((1, 2))}


START = iblr.Gaussian.standard(2)
PROBLEM = Problem(log_density, lambda key: START, metrics, "loss", trajectory.keep_moments)


def tasks(plan):
    def run(method):
        return Run(
            method.name, method, lambda: (PROBLEM,), plan.seeds, Checkpoints((20, 60), (10, 20))
        )

    return [
        run(Method("iBLR", iblr.Rep(2), step_size=GRID)),
        run(Method("BBVI", iblr.Rep(2), baselines.Bbvi(), 0.05, momentum=0.5)),
    ]


def section(plan, raw):
    best = raw["iBLR"]["loss"][-1].min()
    curve = Curve("iBLR", raw["iBLR"]["step"], np.median(raw["iBLR"]["loss"], 1))
    picture = Curves("Loss", Axis("iterations"), Axis("loss"), (curve,))
    claims = (
        Claim("it is small", f"{best:.2g}", "0", bool(best < 1)),
        Claim("it is negative", f"{best:.2g}", "-1", bool(best < 0), "a sum of squares"),
    )
    return Section(claims, (picture,))


def raising(error):
    def tasks(plan):
        raise error

    return tasks


TINY = runner.Experiment("tiny", "A Gaussian", "Figure 0", "It fits.", tasks, section)
OTHERS = (
    dataclasses.replace(TINY, name="missing", tasks=raising(MissingDataError("get it there"))),
    dataclasses.replace(TINY, name="corrupted", tasks=raising(DataError("its sha256 is not"))),
    dataclasses.replace(TINY, name="broken", tasks=raising(ZeroDivisionError("by zero"))),
    dataclasses.replace(TINY, name="later", waiting="it waits"),
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("done")
    (result,) = runner.reproduce([TINY], Plan(False, 2), folder)
    return folder, result


def raw_of(folder):
    found = results.load(folder, "tiny")
    assert found is not None
    return found[1]


def same(a, b):
    names = lambda raw: {task: sorted(kept) for task, kept in raw.items()}  # noqa: E731
    assert names(a) == names(b)
    for task, kept in a.items():
        for name, array in kept.items():
            if name != "seconds":
                np.testing.assert_array_equal(array, b[task][name], err_msg=f"{task} {name}")


def test_a_run_keeps_metrics_steps_and_the_chosen_step_size(done):
    folder, result = done
    assert result.status == "done" and result.section is not None
    raw = raw_of(folder)
    assert list(raw) == ["iBLR", "BBVI"]
    assert raw["iBLR"]["step"].tolist() == [0, 10, 20, 40, 60]
    assert raw["iBLR"]["loss"].shape == (5, 2)
    assert raw["iBLR"]["step_size"] == GRID[int(np.argmin(raw["iBLR"]["trials"]))]
    assert raw["iBLR"]["final_mean"].shape == (2, 2)
    np.testing.assert_allclose(
        raw["iBLR"]["loss"][-1],
        [
            ((m - 1) ** 2).sum() + np.abs(c - np.eye(2)).sum()
            for m, c in zip(raw["iBLR"]["final_mean"], raw["iBLR"]["final_covariance"], strict=True)
        ],
        rtol=1e-5,
    )
    stored = json.loads((folder / "tiny.json").read_text())
    assert stored["environment"]["jax"] and stored["seeds"] == 2 and stored["mode"] == "quick"
    assert not (folder / runner.SCRATCH / "tiny").exists()


@pytest.mark.parametrize("look", [3, 9])
def test_an_interrupted_run_goes_on_with_the_same_bits(done, tmp_path, monkeypatch, look):
    looks = 0
    add = trajectory.Record.add

    def interrupted(self, step, family):
        nonlocal looks
        looks += 1
        if looks == look:
            raise KeyboardInterrupt
        add(self, step, family)

    with monkeypatch.context() as patch:
        patch.setattr(trajectory.Record, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.reproduce([TINY], Plan(False, 2), tmp_path)
    found = results.load(tmp_path, "tiny")
    assert found is not None and found[0].status == "partial"
    (result,) = runner.reproduce([TINY], Plan(False, 2), tmp_path)
    assert result.status == "done"
    same(raw_of(done[0]), raw_of(tmp_path))


def test_what_is_there_is_not_done_again_unless_settings_changed(done, tmp_path, monkeypatch):
    folder = shutil.copytree(done[0], tmp_path / "copy")
    executed = []
    execute = Run.execute
    monkeypatch.setattr(
        Run, "execute", lambda self, monitor: executed.append(self.name) or execute(self, monitor)
    )
    runner.reproduce([TINY], Plan(False, 2), folder)
    assert executed == []
    other = [dataclasses.replace(tasks(Plan(False, 2))[0], first_seed=1), tasks(Plan(False, 2))[1]]
    runner.reproduce([dataclasses.replace(TINY, tasks=lambda plan: other)], Plan(False, 2), folder)
    assert executed == ["iBLR"]


@pytest.mark.slow
def test_a_limit_stops_a_run_where_it_is_and_more_time_does_it_again(tmp_path):
    def limited(plan):
        return [dataclasses.replace(task, limit=plan.limit) for task in tasks(plan)]

    experiment = dataclasses.replace(TINY, tasks=limited)
    runner.reproduce([experiment], Plan(False, 1, 0.0), tmp_path)
    raw = raw_of(tmp_path)
    assert raw["BBVI"]["step"].tolist() == [0, 10]
    assert np.isnan(trajectory.at_step(raw["BBVI"], "loss", 60)).all()
    runner.reproduce([experiment], Plan(False, 1), tmp_path)
    assert raw_of(tmp_path)["BBVI"]["step"][-1] == 60


def test_trials_of_other_settings_and_damaged_states_are_not_used(done, tmp_path):
    scratch = tmp_path / runner.SCRATCH / "tiny"
    scratch.mkdir(parents=True)
    (scratch / "iblr-grid.json").write_text('{"settings": "other", "values": [0.0, 1.0]}')
    (scratch / "bbvi-0.npz").write_bytes(b"PK damaged")
    runner.reproduce([TINY], Plan(False, 2), tmp_path)
    same(raw_of(done[0]), raw_of(tmp_path))


# The command line.


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.setattr(cli, "EXPERIMENTS", (TINY, *OTHERS))
    return lambda *words: CliRunner().invoke(cli.app, ["reproduce", *map(str, words)])


def test_the_command_line_ends_with_a_table_of_claims(invoke, tmp_path):
    out = tmp_path / "new" / "folder"
    answer = invoke("tiny", "--out", out)
    assert answer.exit_code == 0, answer.output
    for words in ("it is small", "holds", "does not hold", "1 of 2 claims hold", "a sum of sq"):
        assert words in answer.output
    assert (out / "index.html").exists() and (out / "tiny.npz").exists()
    again = invoke("tiny", "--out", out)
    assert again.exit_code == 1 and "--resume" in again.output
    assert (out / "tiny.npz").exists()
    assert invoke("tiny", "--out", out, "--resume").exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["tinny"], 1, "Did you mean 'tiny'?"),
        (["missing"], 1, "get it there"),
        (["corrupted"], 1, "its sha256 is not"),
        (["broken"], 1, "by zero"),
        (["later"], 0, "it waits"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_line(invoke, tmp_path, words, code, said):
    answer = invoke(*words, "--out", tmp_path)
    assert answer.exit_code == code
    assert said in answer.output.replace("\n", " ")
    assert "Traceback" not in answer.output


def test_missing_data_do_not_fail_a_run_of_everything(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "EXPERIMENTS", (OTHERS[0], OTHERS[3]))
    answer = invoke("--out", tmp_path)
    assert answer.exit_code == 0 and "not run" in answer.output


def test_a_folder_that_cannot_be_written_is_refused(invoke, tmp_path):
    (tmp_path / "file").write_text("")
    answer = invoke("tiny", "--out", tmp_path / "file")
    assert answer.exit_code == 1 and "Give another --out" in answer.output


def test_results_of_another_plan_are_not_resumed(invoke, done):
    before = raw_of(done[0])
    for words in (["--full", "--seeds", 2], ["--seeds", 3]):
        answer = invoke("tiny", "--out", done[0], "--resume", *words)
        assert answer.exit_code == 1 and "--quick --seeds 2" in answer.output
    same(before, raw_of(done[0]))


def test_damaged_results_of_another_experiment_are_told(invoke, tmp_path):
    (tmp_path / "later.json").write_text("{")
    answer = invoke("tiny", "--out", tmp_path)
    assert answer.exit_code == 0 and "cannot be read" in answer.output
    assert (tmp_path / "index.html").exists()


@pytest.mark.parametrize("ending", ["json", "npz"])
def test_damaged_results_are_told_and_kept(invoke, done, tmp_path, ending):
    for path in done[0].glob("tiny.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / f"tiny.{ending}"
    damaged.write_bytes(damaged.read_bytes()[:100])
    before = damaged.read_bytes()
    answer = invoke("tiny", "--out", tmp_path, "--resume", "--seeds", 2)
    assert answer.exit_code == 1 and "cannot be read" in answer.output
    assert damaged.read_bytes() == before


def test_an_interrupt_leaves_a_report_and_code_130(invoke, tmp_path, monkeypatch):
    def interrupted(self, monitor):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "execute", interrupted)
    answer = invoke("tiny", "--out", tmp_path)
    assert answer.exit_code == 130 and "--resume" in answer.output
    assert (tmp_path / "index.html").exists()


def test_data_that_cannot_be_used_fail_in_the_end_and_cost_nothing_else(tmp_path, monkeypatch):
    def wrong():
        raise DataError("cytof.mat is not the file that it should be")

    def missing():
        raise MissingDataError("not there")

    few = factor_model.synthetic(0, 200, 100)
    monkeypatch.setitem(gamma_factor.SOURCES, "synthetic", lambda: few)
    monkeypatch.setitem(gamma_factor.SOURCES, "cytof", wrong)
    monkeypatch.setitem(gamma_factor.SOURCES, "cytometry", missing)
    plan = Plan(True, 1)
    assert {task.name.split()[0] for task in gamma_factor.tasks(plan)} == {"synthetic"}
    steps = np.arange(0, 301, 10)
    fake = {"step": steps, "test": np.ones((31, 1)), "step_size": np.asarray(0.1)}
    shown = gamma_factor.section(
        plan, {f"synthetic {method.name}": fake for method in gamma_factor.METHODS}
    )
    assert shown.faults == ("cytof.mat is not the file that it should be",)
    assert [claim.verdict for claim in shown.claims] == ["does not hold", "not run", "not run"]
    faulty = dataclasses.replace(TINY, section=lambda plan, raw: Section(faults=("a wrong file",)))
    monkeypatch.setattr(cli, "EXPERIMENTS", (faulty,))
    answer = CliRunner().invoke(cli.app, ["reproduce", "--out", str(tmp_path)])
    assert answer.exit_code == 1 and "tiny: a wrong file" in answer.output


def test_the_list_names_every_experiment():
    answer = CliRunner().invoke(cli.app, ["reproduce", "--list"])
    assert answer.exit_code == 0
    assert all(experiment.name in answer.output for experiment in EXPERIMENTS)
    assert len(EXPERIMENTS) == 14


# What experiments share.


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_an_experiment_says_at_once_what_it_will_do(experiment, monkeypatch, tmp_path):
    monkeypatch.setenv("IBLR_DATA", str(tmp_path))
    for plan in (Plan(False, 1), Plan(True, 5, 60.0)):
        found = experiment.tasks(plan)
        names = [task.name for task in found]
        assert len(set(names)) == len(names)
        assert all(task.effort > 0 and task.settings for task in found)
        assert bool(found) != bool(experiment.waiting)


def test_checkpoints_are_closer_together_at_first():
    spread = Checkpoints.spread(15_000)
    assert spread == Checkpoints((100, 10_000, 15_000), (10, 100, 2000))
    assert Checkpoints.spread(50) == Checkpoints((50,), (10,))
    assert Checkpoints.even(100, 4).every == (25,)


def test_words_for_numbers():
    assert wording.spread(np.array([1.0, 3.0, 2.0])) == "2 [1, 3]"
    assert wording.spread(np.array([np.nan])) == wording.NOT_RUN
    assert wording.spread(np.array([1.0, np.nan, 2.0])) == "2 [1, inf]"
    numbers = (162.4, 30_612.0, 0.00366, 1.5e-5, 2e8, 0.0)
    assert [wording.number(x, 2) for x in numbers] == [
        "160", "31000", "0.0037", "1.5e-05", "2e+08", "0"
    ]  # fmt: skip
    assert [wording.count(n) for n in (7, 100, 50_000)] == ["7", "1e2", "50 000"]
    assert wording.verdict(True, 1.0, np.nan) is None and wording.verdict(False, 1.0) is False


def test_the_optimum_of_a_logistic_regression_is_a_minimum():
    model = toy_logistic.regression()
    for diagonal, known in ((False, 3.307444858), (True, 3.549525171)):
        best = model.optimum(diagonal)
        value = model.negative_elbo(best)
        assert value == pytest.approx(known, abs=1e-7)
        for change in (0.01 * np.eye(2), 0.01 * np.diag([1.0, -1.0])):
            for sign in (-1, 1):
                scaled = best.covariance * (1 + sign * np.diag(change).mean() + 0)
                moved = Gaussian(best.mean + sign * change[0], scaled)
                assert model.negative_elbo(moved) > value
        rng = np.random.default_rng(0)
        z = rng.multivariate_normal(best.mean, best.covariance, 200_000)
        margins = z @ (model.x * model.y[:, None]).T
        log_p = -np.logaddexp(0, -margins).sum(1) - 0.005 * (z**2).sum(1) - np.log(200 * np.pi)
        entropy = 1 + np.log(2 * np.pi) + 0.5 * np.linalg.slogdet(best.covariance)[1]
        assert -log_p.mean() - entropy == pytest.approx(value, abs=0.01)


def test_the_weights_of_a_mixture_may_step_more_slowly():
    @partial(jax.jit, static_argnums=0)
    def moved(rate):
        start = iblr.GaussianMixture.init(jax.random.key(0), 3, 2, weight_rate=rate, diagonal=True)
        tangent = iblr.Stl(pairs=2)(start, iblr.Target(log_density), jax.random.key(1))
        after, _ = iblr.improved_step(start, tangent, 0.1)
        shift = after.log_weights - start.log_weights
        return shift - shift[0]

    np.testing.assert_allclose(moved(0.01), 0.01 * moved(1.0), rtol=1e-2)
    with pytest.raises(ValueError, match="weight_rate"):
        iblr.GaussianMixture.init(jax.random.key(0), 3, 2, weight_rate=0.0)


def test_the_root_of_a_dense_curvature_is_one_by_either_way(x64):
    rule = improved(Parameterisation.precision, False)
    for size in (0.1, 3.0, 100.0):  # by a Cholesky factor, and by eigenvectors
        M = np.random.default_rng(1).normal(size=(5, 5))
        X = size * (M + M.T) / np.linalg.norm(M + M.T)
        change = jax.jit(lambda X: Dense(X).change(jnp.asarray(1.0), rule))(jnp.asarray(X))
        T = change.rest * np.eye(5) + change.rows.T @ change.core @ change.rows
        f = np.eye(5) - X + X @ X / 2
        np.testing.assert_allclose(T.T @ T @ f, np.eye(5), atol=1e-8)
        assert change.log_det == pytest.approx(np.linalg.slogdet(T)[1], abs=1e-8)
