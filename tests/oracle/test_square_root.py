"""The square-root step against the paper's dense update, its paths against each other, its limits.

Every answer is checked in NumPy float64 from the stored factors, outside the compiled program.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from hypothesis import strategies as st

import iblr
from iblr.families.abstract_gaussian import GaussianTangent
from iblr.families.curvature import Dense, LowRank, Parameterisation, improved
from iblr.linalg import gram_rows, householder_rows
from iblr.noise import standard_normals
from iblr.structure import Structure

TOLERANCE = {np.dtype("float32"): 1e-4, np.dtype("float64"): 1e-10}


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """Both precisions, each with JAX set to it."""
    with jax.enable_x64(request.param == "float64"):
        yield np.dtype(request.param)


def non_convex(z):
    """Log density whose Hessian is indefinite in many places; works on JAX and NumPy arrays."""
    return -0.05 * (z**4).sum() + 1.5 * (z**2).sum() + 0.5 * (z[..., :1] * z).sum() - 0.2 * z.sum()


def non_convex_gradients(Z):
    """Rows: the gradient of minus the log density."""
    first = Z[:, :1]
    gradient = 0.2 * Z**3 - 3 * Z - 0.5 * first + 0.2
    gradient[:, :1] -= 0.5 * Z.sum(1, keepdims=True)
    return gradient


def non_convex_hessian(z):
    H = np.diag(0.6 * z**2 - 3.0)
    H[0, :] -= 0.5
    H[:, 0] -= 0.5
    return H


def dense_update(S, mu, H, g, t):
    """Eq. ivon_1 and ivon_2, as printed."""
    G = S - H
    Sigma = np.linalg.inv(S)
    return mu - t * Sigma @ g, S - t * G + 0.5 * t**2 * G @ Sigma @ G


def float64(*arrays):
    return [np.asarray(array, np.float64) for array in arrays]


def precision_of(factor):
    inverse = np.linalg.inv(factor)
    return inverse @ inverse.T


def relative(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


@pytest.mark.parametrize("kind", ["rep", "hess"])
@pytest.mark.parametrize("samples", [slow(1), 3, slow(20)])
@pytest.mark.parametrize(
    "d", [1, pytest.param(2, marks=pytest.mark.slow), 7, pytest.param(40, marks=pytest.mark.slow)]
)
def test_the_step_equals_the_dense_update_of_the_paper(d, samples, kind, dtype):
    estimator = iblr.Rep(samples) if kind == "rep" else iblr.Hess(samples)
    target = iblr.Target(non_convex)

    @jax.jit
    def advance(family, key, size):
        tangent = estimator(family, target, key)
        norm = jnp.abs(tangent.curvature.dense().matrix).sum(1).max()
        t = size / jnp.maximum(norm, 1)  # so that |t Ghat| <= size in every operator norm
        return *iblr.improved_step(family, tangent, t), t

    sizes = 10 ** np.random.default_rng(d).uniform(-2, 1, 50)
    family = iblr.Gaussian.standard(d)
    for k, size in enumerate(sizes):
        key = jax.random.fold_in(jax.random.key(samples), k)
        after, info, t = advance(family, key, size)
        assert info.status == iblr.Status.ok and info.limited == 0
        noise = standard_normals(jax.random.split(key)[0], (samples, d), dtype)
        mu, A, E, t = float64(family.mean, family.factor, noise, t)
        S, Z = precision_of(A), mu + E @ A
        W = non_convex_gradients(Z)
        if kind == "rep":
            H = (Z - mu).T @ W / samples
            H = 0.5 * (S @ H + H.T @ S)
        else:
            H = np.mean([non_convex_hessian(z) for z in Z], axis=0)
        mean, precision = dense_update(S, mu, H, W.mean(0), float(t))
        new_mean, new_factor = float64(after.mean, after.factor)
        assert relative(precision_of(new_factor), precision) < TOLERANCE[dtype]
        scale = np.maximum(np.abs(mean).max(), np.abs(mean - mu).max())
        assert np.abs(new_mean - mean).max() < TOLERANCE[dtype] * max(scale, 1e-3)
        family = after


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize(
    ("d", "rank"),
    [slow(7, 1), (40, 3), *(slow(d, 10) for d in (40, 700))],
)
def test_householder_gram_and_dense_paths_agree(d, rank, shift, dtype):
    keys = jax.random.split(jax.random.key(d), 3)
    left = jax.random.normal(keys[0], (rank, d), dtype) / rank
    right = jax.random.normal(keys[1], (rank, d), dtype)
    operator = LowRank(jnp.asarray(shift, dtype), left, right)
    rows = jnp.concatenate([left, right])
    spectra = [
        operator.spectrum(),
        operator.spectrum_in(*householder_rows(rows)),
        operator.spectrum_in(*gram_rows(rows)[:2]),
        operator.dense().spectrum(),
    ]
    for spectrum in spectra:
        values, rest = float64(spectrum.values, spectrum.rest)
        basis = np.asarray(spectrum.basis, np.float64)
        rebuilt = rest * np.eye(d) + basis.T @ ((values - rest)[:, None] * basis)
        product = np.asarray(left, float).T @ np.asarray(right, float)
        exact = shift * np.eye(d) - 0.5 * (product + product.T)
        assert relative(rebuilt, exact) < TOLERANCE[dtype] / 10
        assert np.abs(basis @ basis.T - np.eye(len(basis))).max() < 50 * np.finfo(dtype).eps


def matrix_of(change, d):
    rows, core, rest = float64(change.rows, change.core, change.rest)
    core = np.diag(core) if core.ndim == 1 else core
    return rest * np.eye(d) + rows.T @ core @ rows


@pytest.mark.parametrize("size", [1e-3, 0.3, 7.0])
@pytest.mark.parametrize("nearness", [1.0, 1e-3])
@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize(("d", "rank"), [slow(7, 1), (40, 3), slow(300, 10)])
def test_the_cholesky_and_the_eigenvalue_path_give_the_same_covariance(
    d, rank, shift, nearness, size, dtype
):
    left = jax.random.normal(jax.random.key(0), (rank, d), dtype)
    other = jax.random.normal(jax.random.key(1), (rank, d), dtype)
    operator = LowRank(jnp.asarray(shift, dtype), left / rank, shift * left + nearness * other)
    matrix = np.asarray(operator.dense().matrix, float)
    t = jnp.asarray(size / np.linalg.norm(matrix), dtype)
    cheap, fits = operator.cholesky_change(t)
    assert fits
    full = operator.spectrum().change(t, improved(Parameterisation.precision, False))
    expected = np.eye(d) - float(t) * matrix + 0.5 * float(t) ** 2 * matrix @ matrix
    for change in (cheap, full):
        T = matrix_of(change, d)
        assert relative(T.T @ T, np.linalg.inv(expected)) < TOLERANCE[dtype] / 10
        assert float(change.log_det) == pytest.approx(
            -0.5 * np.linalg.slogdet(expected)[1], abs=1e3 * float(np.finfo(dtype).eps)
        )


def test_the_cholesky_path_gives_way_where_it_cannot_be_trusted():
    left = jax.random.normal(jax.random.key(0), (2, 30))
    other = jax.random.normal(jax.random.key(1), (2, 30))
    none = jnp.zeros(())
    assert LowRank(none, left, other).cholesky_change(jnp.asarray(0.01))[1]
    assert not LowRank(none, left, other).cholesky_change(jnp.asarray(10.0))[1]
    assert not LowRank(none, left, 0 * left).cholesky_change(jnp.asarray(0.01))[1]
    assert not LowRank(none, left, left[::-1]).cholesky_change(jnp.asarray(0.01))[1]
    assert not LowRank(none, left, jnp.nan * left).cholesky_change(jnp.asarray(0.01))[1]


@pytest.mark.parametrize("how", ["zero", "parallel", "one direction", "same columns"])
def test_nearly_dependent_rows_still_give_an_orthonormal_basis(how, dtype):
    d, rank = 1200, 5
    left = jax.random.normal(jax.random.key(0), (rank, d), dtype)
    other = jax.random.normal(jax.random.key(1), (rank, d), dtype)
    right = {
        "zero": jnp.zeros((rank, d), dtype),
        "parallel": 3 * left,
        "one direction": jnp.ones((rank, 1), dtype) * other[:1],
        "same columns": left + jnp.finfo(dtype).eps * other,
    }[how]
    operator = LowRank(jnp.zeros((), dtype), left, right)
    spectrum = jax.jit(lambda o: o.spectrum()[:2])(operator)
    basis, values = float64(*spectrum)
    assert np.abs(basis @ basis.T - np.eye(2 * rank)).max() < 50 * np.finfo(dtype).eps
    product = np.asarray(left, float).T @ np.asarray(right, float)
    exact = -0.5 * (product + product.T)
    rebuilt = basis.T @ (values[:, None] * basis)
    assert np.abs(rebuilt - exact).max() <= 1e3 * np.finfo(dtype).eps * max(np.abs(exact).max(), 1)


def slope(errors, steps):
    return np.polyfit(np.log(steps), np.log(errors), 1)[0]


@pytest.mark.parametrize("family_type", [iblr.Gaussian, iblr.DiagonalGaussian])
def test_the_improved_rule_agrees_with_the_geodesic_to_third_order_and_the_original_to_second(
    family_type, x64
):
    family = family_type.standard(4)
    target = iblr.Target(non_convex)
    tangent = iblr.Rep(3)(family, target, jax.random.key(0))
    steps = np.array([0.04, 0.02, 0.01, 0.005]) / 4
    improved, original = [], []
    for t in steps:
        exact = np.asarray(iblr.geodesic_step(family, tangent, t)[0].precision)
        improved.append(np.abs(iblr.improved_step(family, tangent, t)[0].precision - exact).max())
        original.append(
            np.abs(iblr.natural_gradient_step(family, tangent, t)[0].precision - exact).max()
        )
    assert slope(improved, steps) == pytest.approx(3, abs=0.15)
    assert slope(original, steps) == pytest.approx(2, abs=0.15)


def test_the_geodesic_is_the_matrix_exponential_with_the_corrected_sign(x64):
    from scipy.linalg import expm, sqrtm

    A = jax.random.normal(jax.random.key(1), (3, 3)) + 2 * jnp.eye(3)
    family = iblr.Gaussian.from_covariance(jnp.ones(3), A.T @ A)
    tangent = iblr.Hess(2)(family, iblr.Target(non_convex), jax.random.key(0))
    after, _ = iblr.geodesic_step(family, tangent, 0.7)
    S, B = np.asarray(family.precision), np.linalg.inv(np.asarray(family.factor))
    G, root = B @ np.asarray(tangent.curvature.matrix) @ B.T, np.real(sqrtm(S))
    inverse = np.linalg.inv(root)
    expected = root @ expm(-0.7 * inverse @ G @ inverse) @ root
    assert relative(np.asarray(after.precision), expected) < 1e-10
    printed = root @ expm(+0.7 * inverse @ G @ inverse) @ root
    assert relative(np.asarray(after.precision), printed) > 0.1


def test_the_original_rule_equals_its_dense_form_and_says_when_it_leaves_the_set(x64):
    family = iblr.Gaussian.from_precision(jnp.ones(3), jnp.diag(jnp.array([1.0, 2.0, 3.0])))
    tangent = iblr.Hess(2)(
        family, iblr.Target(lambda z: -(z**2) @ jnp.arange(1.0, 4.0)), jax.random.key(0)
    )
    after, info = iblr.natural_gradient_step(family, tangent, 0.3)
    S = np.asarray(family.precision)
    H, g = np.diag([2.0, 4.0, 6.0]), np.asarray(tangent.gradient)
    new = 0.7 * S + 0.3 * H
    assert info.status == iblr.Status.ok
    assert relative(np.asarray(after.precision), new) < 1e-12
    assert relative(np.asarray(after.mean), np.ones(3) - 0.3 * np.linalg.solve(new, g)) < 1e-12

    tangent = iblr.Hess()(family, iblr.Target(lambda z: 5 * (z**2).sum()), jax.random.key(0))
    after, info = iblr.natural_gradient_step(family, tangent, 0.5)
    assert info.status == iblr.Status.left_set and info.refused
    assert jnp.array_equal(after.factor, family.factor)
    after, info = iblr.improved_step(family, tangent, 0.5)
    assert info.status == iblr.Status.ok
    assert np.linalg.eigvalsh(np.asarray(after.precision)).min() > 0


SHAPES = [(1, 1), slow(2, 1), slow(7, 1), (7, 3), slow(40, 1), (40, 3), (40, 20)]
CASES = 300


def random_cases(rng, d, rank, kind, dtype, count=CASES):
    """A batch of factors and tangents: scales 1e-4..1e4, gradients to 1e8, some degenerate."""
    U = np.linalg.qr(rng.normal(size=(count, d, d)))[0]
    V = np.linalg.qr(rng.normal(size=(count, d, d)))[0]
    condition = 10 ** rng.uniform(0, 2, (count, 1, 1))
    spread = condition ** np.linspace(-0.5, 0.5, d)[None, None, :] if d > 1 else 1.0
    A = (10 ** rng.uniform(-4, 4, (count, 1, 1)) * U * spread) @ V
    A = A.astype(dtype)
    log_det = 2 * np.linalg.slogdet(A.astype(np.float64))[1]
    E = rng.normal(size=(count, rank, d)).astype(dtype)
    size = 10 ** rng.uniform(-8, 8, (count, 1, 1))
    W = (size * rng.normal(size=(count, rank, d))).astype(dtype)
    Y = W @ A.transpose(0, 2, 1)
    mode = rng.integers(0, 4, (count, 1, 1))
    Y = np.where(mode == 1, E * size, np.where(mode == 2, Y[:, :1], Y)).astype(dtype)
    if kind == "hess":
        R = rng.normal(size=(count, d, d)) * size
        H = (A @ (R + R.transpose(0, 2, 1)) @ A.transpose(0, 2, 1)).astype(dtype)
        curvature = ((np.eye(d) - 0.5 * (H + H.transpose(0, 2, 1))).astype(dtype),)
    else:
        shift = np.full(count, float(kind == "rep"), dtype)
        curvature = (shift, (E / rank).astype(dtype), Y if kind == "rep" else Y - E)
    t = (10 ** rng.uniform(-6, 3, count)).astype(dtype)
    return A, log_det.astype(dtype), W.mean(1), Y.mean(1), curvature, t


def step_on(d, kind, trust_region, dtype):
    """The step as a function of one case."""

    def step(case):
        factor, log_det, gradient, whitened, curvature, t = case
        family = iblr.Gaussian(
            mean=jnp.zeros(d, dtype), factor=factor, log_det=log_det, structure=Structure.flat(d)
        )
        operator = (Dense if kind == "hess" else LowRank)(*curvature)
        tangent = GaussianTangent(gradient, whitened, operator)
        return iblr.improved_step(family, tangent, t, trust_region=trust_region)

    return step


def check_positive_definite(factor, after, status):
    assert np.all(np.asarray(status == iblr.Status.ok))
    A, B, mean, log_det = float64(factor, after.factor, after.mean, after.log_det)
    assert np.isfinite(B).all() and np.isfinite(mean).all()
    # New precision at least half the old one: T = B A^-1 has no singular value above sqrt 2.
    singular = np.linalg.svd(B @ np.linalg.inv(A), compute_uv=False)
    assert (singular**2).max() <= 2 / (1 - 1e-3)
    assert singular.min() > 0
    assert np.abs(2 * np.linalg.slogdet(B)[1] - log_det).max() < 1e-3


@pytest.mark.parametrize("trust_region", [False, slow(True)])
@pytest.mark.parametrize("kind", ["rep", "stl", "hess"])
@pytest.mark.parametrize(("d", "rank"), SHAPES)
def test_any_finite_input_keeps_the_precision_positive_definite(d, rank, kind, trust_region, dtype):
    """2 x 3 x 7 x 300 = 12 600 cases in each precision (4 of the 7 shapes here), 300 a batch."""
    cases = random_cases(np.random.default_rng(100 * d + rank), d, rank, kind, dtype)
    step = jax.jit(jax.vmap(step_on(d, kind, trust_region, dtype)))
    after, info = step(jax.tree.map(jnp.asarray, cases))
    check_positive_definite(cases[0], after, info.status)


@pytest.mark.parametrize("kind", ["rep", "stl"])
@pytest.mark.parametrize(("d", "rank"), [slow(7, 1), (7, 3), slow(60, 3)])
def test_one_by_one_where_the_cholesky_path_is_taken_it_holds_as_well(d, rank, kind, dtype):
    """A batch by `vmap` takes only the eigenvalue path; a single fit mostly the other."""
    cases = random_cases(np.random.default_rng(7 * d + rank), d, rank, kind, dtype)
    step = step_on(d, kind, False, dtype)
    one_by_one = jax.jit(lambda cases: jax.lax.map(step, cases))
    after, info = one_by_one(jax.tree.map(jnp.asarray, cases))
    check_positive_definite(cases[0], after, info.status)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    scale=st.floats(-4, 4),
    condition=st.floats(0, 2),
    step=st.floats(-6, 3),
    size=st.floats(-8, 8),
    shift=st.sampled_from([0.0, 1.0]),
    tilt=st.sampled_from([0.0, 1e-7, 1e-3, 1.0]),
    sign=st.sampled_from([-1.0, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_hypothesis_finds_no_step_that_leaves_the_set(
    scale, condition, step, size, shift, tilt, sign, seed
):
    d, rank, rng = 6, 2, np.random.default_rng(seed)
    U, V = np.linalg.qr(rng.normal(size=(2, d, d)))[0]
    A = (10**scale * (U * 10 ** (condition * np.linspace(-0.5, 0.5, d))) @ V).astype(np.float32)
    E, other = rng.normal(size=(2, rank, d)).astype(np.float32)
    right = (sign * 10**size * (E + tilt * other)).astype(np.float32)
    log_det = np.float32(2 * np.linalg.slogdet(A.astype(float))[1])
    curvature = (np.float32(shift), E / np.float32(rank), right)
    case = (A, log_det, right[0], right[0], curvature, np.float32(10**step))
    after, info = _hypothesis_step(jax.tree.map(jnp.asarray, case))
    check_positive_definite(A, after, info.status)


_hypothesis_step = jax.jit(step_on(6, "stl", False, np.float32))


@pytest.mark.parametrize("bad", [np.nan, slow(np.inf)])
@pytest.mark.parametrize("where", ["whitened", "left", "right", "step size"])
@pytest.mark.parametrize("family_type", [iblr.Gaussian, iblr.DiagonalGaussian])
def test_input_that_is_not_finite_is_refused_with_a_status(family_type, where, bad):
    family = family_type.standard(9)
    rows = jax.random.normal(jax.random.key(0), (2, 9))
    spoilt = rows.at[0, 0].set(bad)
    left, right = (spoilt if where == name else rows for name in ("left", "right"))
    gradient = spoilt[0] if where == "whitened" else rows[0]
    tangent = GaussianTangent(gradient, gradient, family.low_rank(0.0, left, right))
    after, info = iblr.improved_step(family, tangent, bad if where == "step size" else 0.1)
    assert info.status == iblr.Status.nonfinite and info.refused
    assert jax.tree.all(jax.tree.map(jnp.array_equal, after, family))


@pytest.mark.parametrize("estimator", [iblr.Rep(3), iblr.Stl(3)])
@pytest.mark.parametrize("d", [slow(5), 40])
def test_log_det_stays_what_the_factor_has_over_ten_thousand_steps(d, estimator):
    precision = jnp.logspace(-1, 1, d)
    target = iblr.Target(lambda z: -0.5 * (precision * z**2).sum() - 0.1 * jnp.cos(z).sum())

    @jax.jit
    def run(state):
        def body(state, _):
            return iblr.step(state, target, estimator=estimator, step_size=0.02)[0], None

        return jax.lax.scan(body, state, None, length=10_000)[0]

    family = run(iblr.init(iblr.Gaussian.standard(d), jax.random.key(d))).family
    factor, log_det = float64(family.factor, family.log_det)
    assert abs(2 * np.linalg.slogdet(factor)[1] - log_det) < 1e-3


def test_the_trust_region_bounds_gains_one_by_one_and_losses_by_one_factor(x64):
    family = iblr.Gaussian.standard(4)
    curvature = Dense(jnp.diag(jnp.array([-50.0, -1.0, 2.0, 8.0])))
    tangent = GaussianTangent(jnp.full(4, 100.0), jnp.full(4, 100.0), curvature)
    after, info = iblr.improved_step(family, tangent, 1.0, trust_region=True)
    x = np.array([-3.0, -1.0, 2.0 / 16, 0.5])
    expected = 1 - x + x**2 / 2
    assert np.allclose(np.diag(after.precision), expected)
    assert info.shrunk == pytest.approx(1 / 16)
    assert np.linalg.norm(after.mean) == pytest.approx(2.0)
    assert info.mean_shrunk == pytest.approx(0.01)


def test_changes_beyond_the_precision_are_limited_counted_and_in_log_det():
    family = iblr.Gaussian.standard(3)
    curvature = Dense(jnp.diag(jnp.array([-1e6, 1e5, 0.0], jnp.float32)))
    tangent = GaussianTangent(jnp.zeros(3), jnp.zeros(3), curvature)
    after, info = iblr.improved_step(family, tangent, 1.0)
    assert info.limited == 2
    assert np.allclose(np.sort(np.linalg.svd(after.factor)[1]), [0.01, 0.01, 1.0], rtol=1e-5)
    assert after.log_det == pytest.approx(4 * np.log(0.01), abs=1e-4)


@pytest.mark.parametrize("parameterisation", list(Parameterisation))
def test_every_parameterisation_agrees_with_the_geodesic_to_third_order(parameterisation, x64):
    family = iblr.Gaussian.standard(3)
    tangent = iblr.Rep(4)(family, iblr.Target(non_convex), jax.random.key(0))
    steps = np.array([0.04, 0.02, 0.01, 0.005]) / 4
    errors = []
    for t in steps:
        exact = iblr.geodesic_step(family, tangent, t)[0].covariance
        step, _ = iblr.improved_step(family, tangent, t, parameterisation=parameterisation)
        errors.append(np.abs(step.covariance - exact).max())
    assert slope(errors, steps) == pytest.approx(3, abs=0.2)
