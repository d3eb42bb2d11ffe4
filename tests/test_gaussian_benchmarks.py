"""The benchmarks of the automatic fit: targets, models, peers written there, and tables."""

import json
import math
import os
import zipfile

import family_defaults
import gaussian_peers
import gaussian_quality
import gaussian_targets
import jax
import jax.numpy as jnp
import numpy as np
import posteriordb
import posteriordb_best
import posteriordb_models
import pytest
from scipy import stats

import iblr

RNG = np.random.default_rng(0)
Y = RNG.normal(size=10).tolist()


def batch(dim=3, size=5):
    """A Gaussian, points around it and made-up scores there."""
    rng = np.random.default_rng(1)
    root = rng.normal(size=(dim, dim)) + 2 * np.eye(dim)
    mean, z = rng.normal(size=dim), rng.normal(size=(size, dim))
    return mean, root @ root.T, z, rng.normal(size=(size, dim))


@pytest.mark.parametrize("regulariser", [0.3, 20.0])
def test_batch_and_match_minimises_its_objective(regulariser):
    mean, covariance, z, scores = batch()
    with jax.enable_x64(True):
        match = jax.jit(gaussian_peers.match)
        new_mean, new = match(mean, covariance, z, scores, regulariser)

        def objective(mu, sigma):
            sigma = 0.5 * (sigma + sigma.T)
            precision = jnp.linalg.inv(sigma)
            off = -(z - mu) @ precision - scores
            divergence = jnp.sum((off @ sigma) * off) / len(z)
            way = mean - mu
            kl = jnp.trace(precision @ covariance) + way @ precision @ way
            kl = 0.5 * (kl + jnp.linalg.slogdet(sigma)[1])
            return divergence + 2 / regulariser * kl

        slopes = jax.jit(jax.grad(objective, (0, 1)))
        small = [np.abs(part).max() for part in slopes(new_mean, new)]
        large = [np.abs(part).max() for part in slopes(new_mean + 0.1, 1.1 * new)]
    assert max(small) < 1e-9 < 1e-2 < min(large)


@pytest.mark.parametrize(
    "problem, mean, variance",
    [
        (gaussian_targets.quartic(2), 0.0, 12**-0.5),
        (gaussian_targets.log_exponential(2), -0.5, 1.0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_elbos_of_targets_in_the_plane_are_exact_and_best_where_they_say(problem, mean, variance):
    best = iblr.Gaussian.from_covariance(jnp.full(2, mean), variance * jnp.eye(2))
    assert problem.gap(best) == pytest.approx(0, abs=1e-6)
    q = iblr.Gaussian.from_covariance(jnp.array([0.2, -0.4]), jnp.array([[0.3, 0.1], [0.1, 0.2]]))
    sampled = iblr.elbo(problem.log_density, q, jax.random.key(0), draws=100_000)
    exact = problem.best - problem.gap(q)
    assert problem.gap(q) > 0.01 and abs(sampled.value - exact) < 5 * sampled.standard_error


def test_the_gap_of_a_diagonal_gaussian_is_exact():
    problem = family_defaults.correlated(4)
    centre = jax.grad(problem.log_density)(jnp.zeros(4))
    precision = -jax.hessian(problem.log_density)(jnp.zeros(4))
    centre = jnp.linalg.solve(precision, centre)

    def elbo(q):
        covariance = jnp.diag(q.variances)
        return problem.log_density(q.mean) - 0.5 * jnp.trace(precision @ covariance) + q.entropy()

    best = iblr.DiagonalGaussian.from_variances(centre, 1 / jnp.diagonal(precision))
    other = iblr.DiagonalGaussian.from_variances(centre + 0.3, 2.0 * jnp.ones(4))
    assert problem.gap(best) == pytest.approx(0, abs=1e-5)
    assert problem.gap(other) == pytest.approx(float(elbo(best) - elbo(other)), abs=1e-4)
    assert problem.gap(other) > 0.1


def test_the_target_is_a_fixed_point_of_batch_and_match():
    mean, covariance, z, _ = batch()
    scores = -(z - mean) @ np.linalg.inv(covariance)
    with jax.enable_x64(True):
        new_mean, new = jax.jit(gaussian_peers.match)(mean, covariance, z, scores, 7.0)
    np.testing.assert_allclose(new_mean, mean, atol=1e-10)
    np.testing.assert_allclose(new, covariance, atol=1e-10)


@pytest.mark.parametrize("schedule", ["", " const"])
def test_batch_and_match_solves_a_gaussian_and_counts_its_gradients(schedule):
    centre, precision = jnp.array([3.0, -2.0]), jnp.array([[2.0, 0.5], [0.5, 1.0]])
    log_density = lambda z: -0.5 * (z - centre) @ precision @ (z - centre)  # noqa: E731
    method = gaussian_peers.bam(log_density, jnp.zeros(2), 320)
    assert list(method.settings)[:3] == ["batch 8", "batch 32", "batch 128"]
    large = gaussian_peers.bam(log_density, jnp.zeros(200), 320).settings
    assert "batch 240 const" in large and "batch 240" in large
    seen = list(method.run(method.settings[f"batch 32{schedule}"], jax.random.key(0)))
    assert [snapshot.gradients for snapshot in seen[:2]] == [32, 64]
    assert seen[-1].gradients == 320
    assert seen[-1].seconds > 0 and method.compile_seconds() > 0
    np.testing.assert_allclose(seen[-1].mean, centre, atol=1e-2)
    covariance = seen[-1].root @ seen[-1].root.T
    np.testing.assert_allclose(covariance, np.linalg.inv(precision), rtol=2e-2, atol=1e-2)


def test_checkpoints_end_at_the_last_step():
    found = gaussian_peers.checkpoints(1000)
    assert found[0] == 1 and found[-1] == 1000 and found == sorted(set(found))
    assert all(b <= math.ceil(8 / 7 * a) or b == a + 1 for a, b in zip(found, found[1:]))  # noqa: B905
    assert gaussian_peers.checkpoints(1) == [1]


@pytest.fixture(scope="module")
def student():
    scale = np.array([[2.0, 0, 0], [0.5, 1.0, 0], [0, -0.3, 0.7]])
    return gaussian_targets.student("t", np.array([1.0, 0, -1]), scale, 5.0), scale


def test_the_elbo_of_students_t_is_that_of_draws(student):
    problem, scale = student
    rng = np.random.default_rng(2)
    root, mean = np.eye(3) + 0.3 * rng.normal(size=(3, 3)), rng.normal(size=3)
    exact = stats.multivariate_t([1.0, 0, -1], scale @ scale.T, df=5)
    values = exact.logpdf(mean + rng.normal(size=(400_000, 3)) @ root.T)
    values = values - exact.logpdf([1.0, 0, -1])  # the target is 0 at its centre
    with jax.enable_x64(True):
        elbo = float(problem.elbo(mean, root) - gaussian_targets.entropy(root))
    assert abs(elbo - values.mean()) < 4.5 * values.std() / math.sqrt(len(values))


def test_no_gaussian_near_the_best_of_students_t_is_better(student):
    problem, scale = student
    log_v = np.linspace(-1, 1, 41)
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        elbo = jax.jit(problem.elbo)
        along = [float(elbo(np.array([1.0, 0, -1]), math.exp(0.5 * v) * scale)) for v in log_v]
        best = math.exp(0.5 * log_v[np.argmax(along)])
        around = [
            float(
                elbo(
                    np.array([1.0, 0, -1]) + 0.05 * rng.normal(size=3),
                    best * scale @ (np.eye(3) + 0.05 * rng.normal(size=(3, 3))),
                )
            )
            for _ in range(20)
        ]
    assert 0 <= problem.best - max(along) < 2e-3
    assert max(around) < problem.best


DATA = {
    "arK": {"K": 2, "T": 8, "y": Y[:8]},
    "eight_schools": {"J": 3, "y": [2.0, -1.0, 0.5], "sigma": [1.0, 2.0, 1.5]},
    "kidiq": {
        "N": 4, "kid_score": [60, 90, 80, 100],
        "mom_hs": [0, 1, 1, 0], "mom_iq": [90, 100, 120, 80],
    },
    "nes2000": {
        "N": 6, "partyid7": [1, 4, 7, 2, 3, 5], "real_ideo": [1, 2, 3, 4, 5, 6],
        "race_adj": [1, 2, 1, 1, 2, 1], "age_discrete": [1, 2, 3, 4, 1, 2],
        "educ1": [1, 2, 3, 4, 2, 1], "gender": [1, 2, 1, 2, 1, 2], "income": [1, 5, 2, 3, 4, 2],
    },
    "mesquite": {
        "N": 4, "weight": [2.0, 3, 5, 4], "diam1": [1.0, 2, 3, 2], "diam2": [1.0, 3, 2, 2],
        "canopy_height": [1.0, 1.5, 2, 1], "total_height": [1.5, 2, 2.5, 2],
        "density": [1.0, 2, 1, 3], "group": [0, 1, 0, 1],
    },
    "sblrc": {"N": 6, "D": 2, "X": RNG.normal(size=(6, 2)).tolist(), "y": Y[:6]},
    "garch": {"T": 10, "y": Y, "sigma1": 0.5},
    "low_dim_gauss_mix": {"N": 5, "y": Y[:5]},
    "diamonds": {"N": 6, "K": 3, "X": RNG.normal(size=(6, 3)).tolist(), "Y": Y[:6]},
    "gp_pois_regr": {"N": 4, "x": [-1.0, 0, 1, 3], "y": Y[:4], "k": [1, 2, 0, 3]},
}  # fmt: skip


def write(path, content, zipped):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not zipped:
        path.write_text(json.dumps(content))
        return
    with zipfile.ZipFile(path.with_name(path.name + ".zip"), "w") as archive:
        archive.writestr(path.name, json.dumps(content))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A tiny checkout in the layout of a real one: made-up data, draws at random coordinates."""
    path = tmp_path_factory.mktemp("posteriordb")
    root = path / "posterior_database"
    rng = np.random.default_rng(4)
    for name, make in posteriordb_models.MODELS.items():
        data_name = name.split("-")[0]
        zipped = data_name != "garch"
        entry = {"name": name, "data_name": data_name, "reference_posterior_name": name}
        write(root / "posteriors" / f"{name}.json", entry, zipped=False)
        write(root / "data/data" / f"{data_name}.json", DATA[data_name], zipped)
        model = make(name, DATA[data_name])
        rows = (0.3 * rng.normal(size=(8, model.dim))).astype(np.float32)
        numbers = np.asarray(jax.jit(model.numbers)(rows)).T.tolist()
        chains = [
            dict(zip(model.names, [column[part] for column in numbers], strict=True))
            for part in (slice(4), slice(4, 8))
        ]
        write(root / "reference_posteriors/draws/draws" / f"{name}.json", chains, zipped)
        np.save(path / f"{name}.npy", rows)
    return posteriordb_models.Checkout(path), path


@pytest.mark.parametrize("name", posteriordb_models.MODELS)
def test_a_checkout_is_read_and_its_models_have_gradients(checkout, name):
    found, path = checkout
    model, draws = found.model(name), found.draws(name)
    single = {label: values.astype(np.float32) for label, values in draws.items()}

    @jax.jit
    def seen(draws):
        rows = model.coordinates(draws)
        starts = jnp.concatenate([model.start[None], rows])
        return rows, posteriordb_models.columns(draws), jax.vmap(jax.grad(model.flat))(starts)

    rows, numbers, slopes = (np.asarray(part) for part in seen(single))
    np.testing.assert_allclose(rows, np.load(path / f"{name}.npy"), atol=2e-5)
    assert numbers.shape == (8, len(model.names))
    assert np.isfinite(slopes).all() and (slopes != 0).any(axis=0).all()


def test_a_checkout_must_be_one(checkout, tmp_path):
    assert checkout[0].names() == list(posteriordb_models.MODELS)
    with pytest.raises(FileNotFoundError, match="posteriors is missing"):
        posteriordb_models.Checkout(tmp_path)


def scipy_density(name, z):
    """The same models in SciPy's words, constants included."""
    data = {key: np.asarray(value) for key, value in DATA[name].items()}
    cauchy, normal = stats.halfcauchy, stats.norm
    if name == "arK":
        y = data["y"]
        means = [z["alpha"] + z["beta"] @ y[t - 2 : t][::-1] for t in range(2, 8)]
        value = normal(means, z["sigma"]).logpdf(y[2:]).sum() + normal(0, 10).logpdf(z["alpha"])
        value += normal(0, 10).logpdf(z["beta"]).sum() + cauchy(scale=2.5).logpdf(z["sigma"])
    elif name == "eight_schools":
        value = normal(z["mu"] + z["tau"] * z["noise"], data["sigma"]).logpdf(data["y"]).sum()
        value += normal().logpdf(z["noise"]).sum() + normal(0, 5).logpdf(z["mu"])
        value += cauchy(scale=5).logpdf(z["tau"])
    elif name == "garch":
        a1 = z["alpha1"]
        variances = [0.25]
        for y in data["y"][:-1]:
            variance = (1 - a1) * z["share"] * variances[-1] + a1 * (y - z["mu"]) ** 2
            variances.append(z["alpha0"] + variance)
        value = normal(z["mu"], np.sqrt(variances)).logpdf(data["y"]).sum() + np.log(1 - a1)
    elif name == "low_dim_gauss_mix":
        parts = normal(z["mu"], z["sigma"]).pdf(data["y"][:, None])
        value = np.log(parts @ np.array([z["theta"], 1 - z["theta"]])).sum()
        value += normal(0, 2).logpdf(z["mu"]).sum() + normal(0, 2).logpdf(z["sigma"]).sum()
        value += stats.beta(5, 5).logpdf(z["theta"])
    elif name == "diamonds":
        x = data["X"][:, 1:] - data["X"][:, 1:].mean(0)
        value = normal(z["Intercept"] + x @ z["b"], z["sigma"]).logpdf(data["Y"]).sum()
        value += normal().logpdf(z["b"]).sum() + stats.t(3, 8, 10).logpdf(z["Intercept"])
        value += stats.t(3, 0, 10).logpdf(z["sigma"])
    else:
        squares = (data["x"][:, None] - data["x"]) ** 2
        kernel = z["alpha"] ** 2 * np.exp(-squares / (2 * z["rho"] ** 2)) + z["sigma"] * np.eye(4)
        value = stats.multivariate_normal(np.zeros(4), kernel).logpdf(data["y"])
        value += stats.gamma(25, scale=1 / 4).logpdf(z["rho"]) + normal(0, 2).logpdf(z["alpha"])
        value += normal(0, 1).logpdf(z["sigma"])
    return float(value)


LINEAR = ("kidiq", "nes2000", "mesquite", "sblrc")


@pytest.mark.parametrize(
    "name", [name for name in posteriordb_models.MODELS if name.split("-")[0] not in LINEAR]
)
def test_a_model_is_that_of_scipy_up_to_a_constant(checkout, name):
    model = checkout[0].model(name)
    rows = np.load(checkout[1] / f"{name}.npy")[:3]

    @jax.jit
    def seen(rows):
        points = model.structure.unravel(rows)
        return points, jax.vmap(model.log_density)(points)

    points, ours = jax.tree.map(np.asarray, seen(rows))
    points = [{label: leaf[i] for label, leaf in points.items()} for i in range(3)]
    exact = [scipy_density(name.split("-")[0], z) for z in points]
    np.testing.assert_allclose(np.diff(ours), np.diff(exact), rtol=1e-4, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", posteriordb_models.MODELS)
def test_the_mean_gradient_over_reference_draws_is_zero(name):
    path = os.environ.get(posteriordb_models.VARIABLE)
    if path is None:
        pytest.skip(f"needs a posteriordb checkout in {posteriordb_models.VARIABLE}")
    found = posteriordb_models.Checkout(path)
    assert np.abs(posteriordb_models.check(found.model(name), found.draws(name))).max() < 4.5


def test_the_committed_gaussian_of_eight_schools_is_the_best():
    """Its ELBO has another, exact form in gaussian_targets.py."""
    name = "eight_schools-eight_schools_noncentered"
    kept = json.loads(posteriordb_best.REFERENCES.read_text())
    assert set(kept) == set(posteriordb_models.MODELS)
    assert all(entry["noise"]["mean"] < 0.01 > entry["noise"]["sd"] for entry in kept.values())
    found = kept[name]["coordinates"]
    order = [*range(1, 9), 0, 9]  # noise, mu, log tau there; mu, noise, log tau here
    mean, root = np.array(found["mean"])[order], np.array(found["root"])[order]
    with jax.enable_x64(True):
        elbo = float(jax.jit(gaussian_targets.schools().elbo)(mean, root))
    best = gaussian_targets.references()["eight schools, non-centred"]["elbo"]
    assert 0 <= best - elbo < 1e-3


def test_the_judge_finds_no_error_in_the_best_gaussian(checkout):
    name = "kidiq-kidscore_momhsiq"
    reference = json.loads(posteriordb_best.REFERENCES.read_text())[name]
    judge = posteriordb.Judge(checkout[0].model(name), reference)
    mean, root = (np.array(reference["coordinates"][key]) for key in ("mean", "root"))
    draws, best = judge(mean, root)
    assert best.both < 0.01 and draws.fine and abs(draws.both - judge.floor.both) < 0.01
    assert not judge(mean, 1.3 * root)[1].fine
    assert math.isinf(judge(mean * np.nan, root)[1].mean)


def made_up(*gradients):
    found = np.array(gradients, float)
    return gaussian_quality.Result(found, found / 1000, 0.05, False)


def test_the_bars_of_quality_are_met_and_missed():
    never = math.inf
    good = {"ours": made_up(500, 1400, never), "BaM": made_up(900, never, never)}
    assert [line[-4:] for line in gaussian_quality.bars("breast cancer", good)] == ["PASS"] * 3
    bad = {"ours": made_up(700, 1600, never), "BaM": made_up(900, 1500, never)}
    assert [line[-4:] for line in gaussian_quality.bars("breast cancer", bad)] == ["FAIL"] * 3
    near = {"ours": made_up(100, 120, 120), "BaM": made_up(32, 32, 32)}
    assert [line[-4:] for line in gaussian_quality.bars("diabetes", near)] == ["PASS"] * 3
    lost = {"ours": made_up(never, never, never), "BaM": made_up(900, never, never)}
    assert [line[-4:] for line in gaussian_quality.bars("Ionosphere", lost)] == ["FAIL"]
    assert gaussian_quality.shown(good["BaM"]).split() == ["900", "never", "(0.05)", "never"]


def test_scripts_without_data_say_so(monkeypatch, capsys):
    monkeypatch.delenv(posteriordb_models.VARIABLE, raising=False)
    monkeypatch.setattr("sys.argv", ["script"])
    for module in (posteriordb, posteriordb_best, posteriordb_models):
        module.main()
        assert "no --path CHECKOUT" in capsys.readouterr().out
    gaussian_peers.main()
    assert "BaM" in capsys.readouterr().out


def test_the_gap_of_a_wide_gaussian_grows_without_end(x64):
    problem = gaussian_targets.student("t", np.zeros(5), np.eye(5), 5.0)
    wide = [problem.best - float(problem.elbo(np.zeros(5), 10.0**k * np.eye(5))) for k in range(21)]
    assert wide[0] > 0
    np.testing.assert_allclose(np.diff(wide)[3:], 5 * np.log(10), rtol=1e-3)  # df a decade
