"""Supports and structures that carry them: the maps, their Jacobians, the layout of points."""

import functools
import math
import pickle
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close, no_type_hook
from scipy import integrate, stats

from iblr.structure import Structure
from iblr.support import AbstractSupport, interval, ordered, positive, real, simplex

SUPPORTS = {
    "real": (real, (3,)),
    "positive": (positive, (3,)),
    "interval": (interval(-1, 3), (3,)),
    "interval from zero": (interval(0, 1e-3), (3,)),
    "interval to zero": (interval(-100, 0), (3,)),
    "interval far from zero": (interval(1000, 1001), (3,)),
    "simplex": (simplex, (3,)),
    "simplex of two": (simplex, (1,)),
    "simplex of many": (simplex, (9,)),
    "ordered": (ordered, (4,)),
    "ordered, one number": (ordered, (1,)),
}

every_support = pytest.mark.parametrize("name", SUPPORTS)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """The precision of the world in which a test runs."""
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


def coordinates(shape, batch=(5,), seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*batch, *shape)), float)


def extremes(shape, largest=1e3):
    """All coordinates huge, all tiny, and forty mixtures of sizes and signs."""
    rows = [np.full(shape, sign * size) for sign in (-1, 1) for size in (largest, 100, 20)]
    signs = np.random.default_rng(1).choice([-1, 0, 1], size=(40, *shape))
    sizes = np.random.default_rng(2).choice([1, 20, 90, 700, largest], size=(40, *shape))
    return np.concatenate([np.stack(rows), signs * sizes])


class Facts(NamedTuple):
    """A support at coordinates x: five ordinary ones, zero, then extremes."""

    x: np.ndarray
    z: np.ndarray
    inside: np.ndarray
    back: np.ndarray
    jacobian: np.ndarray
    log_jacobian: np.ndarray
    gradient: np.ndarray
    single: np.ndarray


@functools.cache
def facts(name, dtype) -> Facts:
    """Everything about one support, compiled at once."""
    support, shape = SUPPORTS[name]

    @jax.jit
    def everything(x):
        z = support.forward(x)
        twice = lambda x: (support.forward(x),) * 2  # noqa: E731
        jacobian, single = jax.vmap(jax.jacfwd(twice, has_aux=True))(x)
        log_jacobian = support.log_jacobian(x)
        gradient = jax.grad(lambda x: support.log_jacobian(x).sum())(x)
        return Facts(
            x=x,
            z=z,
            inside=support.contains(z),
            back=support.inverse(z),
            jacobian=jacobian,
            log_jacobian=log_jacobian,
            gradient=gradient,
            single=single,
        )

    rows = np.concatenate([coordinates(shape), np.zeros((1, *shape)), extremes(shape)])
    return jax.tree.map(np.asarray, everything(jnp.asarray(rows, dtype)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def slow_forward(support, x):
    """The maps in NumPy's float64, one point at a time and as the textbook has them."""
    x = np.asarray(x, float)
    if support == positive:
        return np.exp(x)
    if support == ordered:
        return np.array([x[0] + np.exp(x[1 : i + 1]).sum() for i in range(len(x))])
    if support == simplex:
        z, rest = [], 1.0
        for i, x_i in enumerate(x):
            z.append(rest * sigmoid(x_i - math.log(len(x) - i)))
            rest -= z[-1]
        return np.array([*z, rest])
    return x if support == real else support.low + (support.high - support.low) * sigmoid(x)


# The maps.


@every_support
def test_the_map_is_that_of_the_textbook(name, dtype):
    (support, shape), f = SUPPORTS[name], facts(name, dtype)
    assert f.z.dtype == dtype and f.z.shape == (len(f.x), *support.point_shape(shape))
    close(f.z[:6], np.stack([slow_forward(support, row) for row in f.x[:6]]), dtype)


@every_support
def test_points_go_back_to_their_coordinates(name, dtype):
    (support, _), f = SUPPORTS[name], facts(name, dtype)
    assert f.back.dtype == dtype and support.coordinate_shape(f.z.shape) == f.x.shape
    # Three digits of every point are those of 1000, where the interval is far from zero.
    close(f.back[:6], f.x[:6], dtype, units=10_000 if name == "interval far from zero" else 100)


@every_support
def test_the_log_jacobian_is_the_log_determinant_of_the_jacobian(name, dtype):
    (support, shape), f = SUPPORTS[name], facts(name, dtype)
    # The last number of a simplex is determined by the others.
    square = np.asarray(f.jacobian[:6, : shape[-1]], float)
    value = f.log_jacobian if support in (simplex, ordered) else f.log_jacobian.sum(axis=-1)
    assert value.dtype == dtype
    close(value[:6], np.linalg.slogdet(square)[1], dtype)


@every_support
def test_no_coordinate_is_mapped_onto_the_boundary(name, dtype):
    f = facts(name, dtype)
    assert f.inside.all() and np.isfinite(f.z).all() and np.isfinite(f.log_jacobian).all()
    if name not in ("real", "ordered", "ordered, one number", "interval"):
        assert (np.abs(f.z) >= jnp.finfo(dtype).tiny).all()


@every_support
def test_gradients_are_finite_everywhere(name, dtype):
    f = facts(name, dtype)
    assert np.isfinite(f.jacobian).all() and np.isfinite(f.gradient).all()


@every_support
def test_the_jacobian_does_not_reward_extreme_coordinates(name, dtype):
    """Where T is constant in this precision, nothing else would bring them back."""
    f = facts(name, dtype)
    low, high = f.gradient[6], f.gradient[9]
    assert (f.x[6] == -1e3).all() and (f.x[9] == 1e3).all()
    assert (low >= 0).all() and (high <= 0).all()


@every_support
def test_leading_axes_are_a_loop(name, dtype):
    (support, _), f = SUPPORTS[name], facts(name, dtype)
    close(f.single[:6], f.z[:6], dtype, units=4)
    terms = f.x.shape[:1] if support in (simplex, ordered) else f.x.shape
    assert f.log_jacobian.shape == f.inside.shape == terms


@pytest.mark.parametrize("name", ["real", "positive", "interval", "simplex", "ordered"])
def test_nan_stays_nan(name):
    support, shape = SUPPORTS[name]
    z, inside = jax.jit(lambda x: (support.forward(x), support.contains(support.forward(x))))(
        jnp.full(shape, jnp.nan)
    )
    assert jnp.isnan(z).all() and not inside.any()


def test_zero_is_the_middle(dtype):
    for name in ("simplex", "simplex of two", "simplex of many"):
        z = facts(name, dtype).z[5]
        close(len(z) * z, np.ones(len(z)), dtype)
    np.testing.assert_array_equal(facts("interval", dtype).z[5], 1)
    np.testing.assert_array_equal(facts("positive", dtype).z[5], 1)


def test_a_simplex_sums_to_one(dtype):
    z = facts("simplex of many", dtype).z
    close(z.sum(axis=-1), np.ones(len(z)), dtype)


def test_small_pieces_of_a_simplex_keep_their_digits(dtype):
    x = jnp.array([30.0, -30.0, 20.0], dtype)
    close(jax.jit(lambda x: simplex.inverse(simplex.forward(x)))(x), x, dtype)


def test_ordered_numbers_differ_after_rounding_too(dtype):
    """Gaps below the precision become gaps of one float, and nothing else changes."""
    forward, slopes = jax.jit(ordered.forward), jax.jit(jax.jacobian(ordered.forward))
    x = jnp.array([1e3, -90.0, -90.0, 0.0, -90.0], dtype)
    z, one = np.asarray(forward(x)), np.spacing(np.asarray(1e3, dtype))
    np.testing.assert_array_equal(z - z[0], [0, one, 2 * one, 1, 1 + one])
    np.testing.assert_array_equal(slopes(x)[:, 0], 1)
    zero = np.asarray(forward(jnp.array([0.0, -1e3, -1e3, 1e3, 1e3], dtype)))
    assert (np.diff(zero) > 0).all() and zero[0] == 0
    assert zero[1] >= jnp.finfo(dtype).tiny and zero[-1] <= jnp.finfo(dtype).max
    below = np.asarray(forward(jnp.array([-1e3, -90.0, -90.0, 0.0, -90.0], dtype)))
    np.testing.assert_array_equal(below - below[0], [0, one, 2 * one, 1, 1 + one])


PUSHED = {
    "positive": (positive, stats.gamma(2.5), (0, np.inf)),
    "interval": (interval(-1, 3), stats.beta(2, 3, loc=-1, scale=4), (-1, 3)),
}


@pytest.mark.parametrize("support, density, ends", PUSHED.values(), ids=PUSHED.keys())
def test_a_density_of_points_integrates_to_one_over_coordinates(support, density, ends, dtype):
    x = np.linspace(-40, 40, 4001)
    z, log_jacobian = (
        np.asarray(f(jnp.asarray(x))) for f in (support.forward, support.log_jacobian)
    )
    total = integrate.trapezoid(density.pdf(z) * np.exp(log_jacobian), x)
    np.testing.assert_allclose(total, 1, rtol=1e-5)


@pytest.mark.parametrize("support, density, ends", PUSHED.values(), ids=PUSHED.keys())
def test_a_density_of_coordinates_integrates_to_one_over_points(support, density, ends, x64):
    @jax.jit
    def pushed(z):
        x = support.inverse(z)
        return jnp.exp(jax.scipy.stats.norm.logpdf(x) - support.log_jacobian(x))

    pieces = (ends[0], 0.5, 2.0, ends[1])
    total = sum(
        integrate.quad(pushed, *piece)[0] for piece in zip(pieces, pieces[1:], strict=False)
    )
    np.testing.assert_allclose(total, 1, rtol=1e-6)


def test_a_dirichlet_integrates_to_one_over_coordinates(dtype):
    grid = np.linspace(-25, 25, 251)
    x = jnp.asarray(np.stack(np.meshgrid(grid, grid), axis=-1), float)
    alpha = np.array([1.5, 2.0, 3.0])
    log_constant = math.lgamma(alpha.sum()) - sum(map(math.lgamma, alpha))

    @jax.jit
    def log_density(x):
        return ((alpha - 1) * jnp.log(simplex.forward(x))).sum(axis=-1) + simplex.log_jacobian(x)

    total = (
        np.exp(np.asarray(log_density(x), float) + log_constant).sum() * (grid[1] - grid[0]) ** 2
    )
    np.testing.assert_allclose(total, 1, rtol=1e-4)


# What is on a support.


@pytest.mark.parametrize(
    "support, inside, outside",
    [
        (real, [0.0, -1e30], [np.inf, -np.inf]),
        (positive, [1e-30, 1e30], [0.0, -1.0, np.inf]),
        (interval(-1, 3), [-0.999, 2.999], [-1.0, 3.0, 4.0, -np.inf]),
        (simplex, [[0.5, 0.5], [1e-9, 1.0]], [[1.0, 0.0], [0.6, 0.6], [1.5, -0.5]]),
        (ordered, [[1.0, 2.0], [-5.0, 0.0]], [[1.0, 1.0], [2.0, 1.0], [0.0, np.inf]]),
    ],
    ids=str,
)
def test_contains_tells_points_from_others(support, inside, outside, dtype):
    assert support.contains(jnp.asarray(inside, dtype)).all()
    assert not support.contains(jnp.asarray(outside, dtype)).any()


def test_coordinates_of_what_is_outside_are_not_finite():
    for support, z in [
        (positive, [-1.0]),
        (interval(0, 1), [1.0]),
        (simplex, [0.0, 1.0]),
        (ordered, [1.0, 1.0]),
    ]:
        assert not jnp.isfinite(support.inverse(jnp.array(z))).all()


# Supports as values.


def test_supports_are_compared_by_value():
    different = [real, positive, simplex, ordered, interval(0, 1), interval(0, 2)]
    assert len(set(different)) == len(different)
    for i, a in enumerate(different):
        for j, b in enumerate(different):
            assert (a == b) is (i == j)
        copy = pickle.loads(pickle.dumps(a))
        assert copy == a and hash(copy) == hash(a) and isinstance(a, AbstractSupport)
        assert jax.tree.leaves(a) == []
    assert interval(0, 1) == interval(0.0, np.float32(1)) and hash(interval(0, 1)) == hash(
        interval(0.0, 1.0)
    )
    assert [str(s) for s in different[-3:]] == [
        "ordered",
        "interval(0.0, 1.0)",
        "interval(0.0, 2.0)",
    ]


@pytest.mark.parametrize(
    "low, high",
    [(1, 1), (2, 1), (0, math.inf), (-math.inf, 0), (math.nan, 1), ("a", 1), (None, 1), ([0], 1)],
)
def test_an_interval_needs_two_ends(low, high):
    with (
        no_type_hook(),
        pytest.raises(ValueError, match=r"`interval\(low, high\)` needs two finite .* but got"),
    ):
        interval(low, high)


def test_an_interval_that_the_precision_cannot_hold_says_so():
    for narrow in (interval(1, 1 + 1e-9), interval(-3e38, 3e38), interval(0, 1e-40)):
        with pytest.raises(
            ValueError, match=r"`interval\(.*\)` does not fit into float32.*float64"
        ):
            narrow.forward(jnp.zeros(2))


def test_shapes_that_cannot_be_are_refused():
    assert simplex.point_shape((4, 2)) == (4, 3) and simplex.coordinate_shape((4, 3)) == (4, 2)
    for shape in ((), (0,)):
        with pytest.raises(ValueError, match=r"`simplex` needs real coordinates .* but got"):
            simplex.point_shape(shape)
    for shape in ((), (1,), (3, 0)):
        with pytest.raises(ValueError, match=r"`simplex` needs points .* but got the shape"):
            simplex.coordinate_shape(shape)
    for method in (ordered.point_shape, ordered.coordinate_shape):
        with pytest.raises(ValueError, match="`ordered` needs an array .* but got a scalar"):
            method(())


# Structures.


class Pair(NamedTuple):
    scale: object
    shift: object


class Layer(eqx.Module):
    weight: object
    bias: object


def template():
    return {
        "tau": jnp.ones(()),
        "mixture": (jnp.ones((2, 3)), [jnp.ones(4)]),
        "pair": Pair(jnp.ones(2), jnp.ones(())),
        "layer": Layer(jnp.ones((2, 2)), jnp.ones(1)),
    }


SUPPORT = {
    "tau": positive,
    "mixture": (simplex, [ordered]),
    "pair": {"scale": interval(0, 2)},
    "layer": {"bias": positive},
}
# Leaves in their order: layer.weight, layer.bias, mixture.0, mixture.1.0, pair, tau.
LEAVES = (real, positive, simplex, ordered, interval(0, 2), real, positive)
SHAPES = ((2, 2), (1,), (2, 3), (4,), (2,), (), ())


def test_two_arguments_make_a_real_structure():
    structure = Structure(jax.tree.structure(0), ((3,),))
    assert structure == Structure.flat(3) == Structure.like(jnp.ones(3))
    assert structure.supports == (real,) and structure.is_real and structure.is_flat
    assert structure.dim == structure.point_dim == 3
    with pytest.raises(ValueError, match="one support a leaf, but got 2 for 1"):
        Structure(jax.tree.structure(0), ((3,),), (real, real))


def test_a_real_structure_costs_nothing():
    structure = Structure.like({"a": jnp.ones((2, 2)), "b": jnp.ones(())})
    jacobian = jax.make_jaxpr(structure.log_jacobian)(jnp.ones((3, 5)))
    assert {str(e.primitive) for e in jacobian.eqns} <= {"broadcast_in_dim"}
    unravel = jax.make_jaxpr(structure.unravel)(jnp.ones(5))
    assert {str(e.primitive) for e in unravel.eqns} <= {"slice", "reshape", "squeeze"}
    ravel = jax.make_jaxpr(lambda z: structure.ravel(z, "f"))(structure.unravel(jnp.ones(5)))
    assert {str(e.primitive) for e in ravel.eqns} <= {"concatenate", "reshape", "broadcast_in_dim"}
    zeros = structure.log_jacobian(jnp.ones((3, 5)))
    assert zeros.shape == (3,) and not zeros.any()


def test_supports_follow_the_containers_of_the_template():
    structure = Structure.like(template(), SUPPORT)
    assert structure.supports == LEAVES and structure.shapes == SHAPES
    assert structure.coordinate_shapes == ((2, 2), (1,), (2, 2), (4,), (2,), (), ())
    assert structure.dim == 4 + 1 + 4 + 4 + 2 + 1 + 1 and structure.point_dim == structure.dim + 2
    assert not structure.is_real and not structure.is_flat
    spelled = SUPPORT | {"pair": Pair(interval(0, 2), None), "mixture": {0: simplex, 1: [ordered]}}
    assert Structure.like(template(), spelled) == structure
    assert Structure.like(template(), {"mixture": [None, ordered]}).supports[2:4] == (real, ordered)
    assert set(Structure.like(template(), {"layer": positive}).supports[:2]) == {positive}
    everywhere = Structure.like(template(), positive)
    assert set(everywhere.supports) == {positive}
    assert Structure.like(template(), None).is_real and Structure.like(template(), {}).is_real


def test_points_of_a_structure_go_back_and_forth(dtype):
    structure = Structure.like(template(), SUPPORT)
    vector = coordinates((structure.dim,), (2, 3))

    @jax.jit
    def everything(vector):
        points = structure.unravel(vector)
        inside = [s.contains(z) for s, z in zip(LEAVES, jax.tree.leaves(points), strict=True)]
        there = structure.coordinates.unravel(vector)
        back = (structure.ravel(points, "f"), structure.coordinates.ravel(there, "f"))
        return points, structure.ravel_point(points, "f"), inside, back

    points, flat, inside, back = everything(vector)
    assert jax.tree.structure(points) == jax.tree.structure(template())
    assert [leaf.shape[2:] for leaf in jax.tree.leaves(points)] == list(SHAPES)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(points))
    assert all(leaf.all() for leaf in inside)
    close(back[0], vector, dtype)
    np.testing.assert_array_equal(back[1], vector)
    assert flat.shape == (2, 3, structure.point_dim)
    leaves = [np.asarray(leaf)[1, 2].ravel() for leaf in jax.tree.leaves(points)]
    np.testing.assert_array_equal(np.asarray(flat)[1, 2], np.concatenate(leaves))
    assert structure.coordinates.is_real and structure.coordinates.dim == structure.dim


def test_the_log_jacobian_of_a_structure_is_that_of_the_whole_map(dtype):
    structure = Structure.like(template(), SUPPORT)
    # The numbers of each simplex but the last.
    kept = [i for i in range(structure.point_dim) if i not in (4 + 1 + 2, 4 + 1 + 5)]

    def flat(vector):
        return structure.ravel_point(structure.unravel(vector), "f")

    @jax.jit
    def everything(rows):
        one = structure.log_jacobian(rows[1])
        return jax.vmap(jax.jacfwd(flat))(rows), structure.log_jacobian(rows), one

    jacobian, value, one = everything(coordinates((structure.dim,), (3,)))
    _, log_det = np.linalg.slogdet(np.asarray(jacobian, float)[:, kept])
    assert value.dtype == dtype and value.shape == (3,) and one.shape == ()
    close(value, log_det, dtype)
    close(one, log_det[1], dtype)


def test_whole_numbers_may_be_points():
    structure = Structure.like({"a": jnp.ones(2)}, positive)
    close(structure.ravel({"a": jnp.array([1, 2])}, "f"), [0, math.log(2)], jnp.float32)


def test_a_support_can_be_given_to_coordinates():
    like = Structure.like(template(), SUPPORT)
    assert like.coordinates.with_support(SUPPORT) == like
    flat = Structure.flat(4).with_support(simplex)
    assert flat.shapes == ((5,),) and flat.dim == 4 and flat.point_dim == 5 and flat.is_flat
    assert flat == Structure.like(jnp.ones(5), simplex)
    assert like.with_support(None) == like and like.with_support({"tau": positive}) == like
    more = like.with_support({"layer": {"weight": positive}})
    assert more.supports == (positive, *LEAVES[1:]) and more.shapes == SHAPES
    with pytest.raises(
        ValueError, match=r"gives the leaf \['tau'\] the support ordered, but it al"
    ):
        like.with_support({"tau": ordered})


def test_labels_name_every_number_of_a_point():
    structure = Structure.like(template(), SUPPORT)
    labels = structure.labels()
    assert len(labels) == len(set(labels)) == structure.point_dim
    assert labels[:6] == [*(f"layer.weight[{i}, {j}]" for i in (0, 1) for j in (0, 1)),
                          "layer.bias[0]", "mixture.0[0, 0]"]  # fmt: skip
    assert labels[-4:] == ["pair.scale[0]", "pair.scale[1]", "pair.shift", "tau"]
    assert Structure.flat(2).with_support(simplex).labels() == ["z[0]", "z[1]", "z[2]"]
    assert Structure.like(jnp.ones(())).labels() == ["z"]


def test_joined_structures_lay_their_parts_out_sorted_by_name():
    parts = {
        "b": Structure.flat(2).with_support(simplex),
        "a": Structure.like(template(), SUPPORT),
        "B": Structure.like(jnp.ones(()), positive),
    }
    joint = Structure.join(parts)
    vectors = {
        name: coordinates((part.dim,), (3,), i) for i, (name, part) in enumerate(parts.items())
    }

    @jax.jit
    def everything(vectors):
        points = {name: parts[name].unravel(vector) for name, vector in vectors.items()}
        vector = jnp.concatenate([vectors[name] for name in sorted(parts)], axis=-1)
        together = sum(part.log_jacobian(vectors[name]) for name, part in parts.items())
        apart = points, vector, together
        return apart, (joint.unravel(vector), joint.ravel(points, "f"), joint.log_jacobian(vector))

    apart, joined = everything(vectors)
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(joined), strict=True):
        close(one, other, jnp.float32)
    template_of_all = {"a": template(), "b": jnp.ones(3), "B": jnp.ones(())}
    support_of_all = {"a": SUPPORT, "b": simplex, "B": positive}
    assert joint == Structure.like(template_of_all, support_of_all)
    assert joint.dim == sum(part.dim for part in parts.values())
    assert joint.labels()[0] == "B" and joint.labels()[-1] == "b[2]"
    assert Structure.join({"b": Structure.flat(2), "a": Structure.flat(1)}) == Structure.like(
        {"a": jnp.ones(1), "b": jnp.ones(2)}
    )


@pytest.mark.parametrize("parts", [{}, {"a": 3}, {0: Structure.flat(1)}, [Structure.flat(1)]])
def test_only_named_structures_are_joined(parts):
    with no_type_hook(), pytest.raises(ValueError, match=r"`Structure.join\(parts\)` needs a dict"):
        Structure.join(parts)


@pytest.mark.parametrize(
    "support, says",
    [
        ({"sigma": positive}, r"names 'sigma', which is not .* are 'layer', 'mixture', 'pair', 't"),
        ({"pair": {"x": real}}, r"names 'x' at \['pair'\], which is not .* are 'scale', 'shift'"),
        ({"mixture": [None, None, real]}, r"names 2 at \['mixture'\], which is not .* are 0, 1"),
        ({"mixture": {1: {1: real}}}, r"names 1 at \['mixture'\]\[1\], which is not .* is 0\."),
        ({"tau": {"x": positive}}, r"has containers at \['tau'\] where the parameters have one"),
        ({"tau": "positive"}, r"needs supports such as .* but got 'positive' at \['tau'\]"),
        (3.0, r"needs supports such as `positive` .* but got 3.0\."),
        (interval, r"needs supports such as `positive` .* but got <function interval"),
        ({"tau": simplex}, r"cannot hold for the leaf \['tau'\]: `simplex` needs"),
        (ordered, r"cannot hold for the leaf \['pair'\].shift: `ordered` needs"),
        ({"layer": simplex}, r"cannot hold for the leaf \['layer'\].bias: `simplex` needs points"),
    ],
)
def test_a_support_that_does_not_fit_the_parameters_is_refused(support, says):
    with pytest.raises(ValueError, match=rf"(?s)`start\(support=...\)` {says}"):
        Structure.like(template(), support, call="start")


def test_with_support_refuses_too():
    with pytest.raises(ValueError, match=r"`with_support\(support=...\)` names 'a'"):
        Structure.like({"b": 1.0}).with_support({"a": positive})
    with pytest.raises(
        ValueError, match=r"`with_support\(support=...\)` cannot hold for it: `simp"
    ):
        Structure.like(1.0).with_support(simplex)


def test_points_of_another_structure_are_refused():
    structure = Structure.like({"a": jnp.ones(3), "b": jnp.ones(())}, {"a": simplex})
    good = {"a": jnp.ones((2, 3)), "b": jnp.ones(2)}
    for ravel in (structure.ravel, structure.ravel_point):
        with pytest.raises(ValueError, match=r"`f\(z\)` needs points with the structure"):
            ravel({"a": jnp.ones(3)}, "f(z)")
        with pytest.raises(
            ValueError, match=r"`f\(z\)` needs points whose trailing shape is \(3,\)"
        ):
            ravel(good | {"a": jnp.ones((2, 2))}, "f(z)")
        with pytest.raises(ValueError, match=r"`f\(z\)` needs leaves with the same leading axes"):
            ravel(good | {"b": jnp.ones(())}, "f(z)")


def test_structures_are_values():
    one, two = (Structure.like(template(), SUPPORT) for _ in range(2))
    other = Structure.like(template(), SUPPORT | {"pair": {"scale": interval(0, 3)}})
    assert one == two and hash(one) == hash(two) and one != other and one != one.coordinates
    assert jax.tree.structure(one) == jax.tree.structure(two) != jax.tree.structure(other)
    assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(two))
    assert pickle.loads(pickle.dumps(Structure.flat(2).with_support(positive))) == Structure.like(
        jnp.ones(2), positive
    )


def test_equal_structures_share_a_compiled_program():
    traces = []

    def value(structure, vector):
        traces.append(structure)
        return structure.log_jacobian(vector)

    as_static, as_pytree = jax.jit(value, static_argnums=0), jax.jit(value)
    for function in (as_static, as_pytree):
        traces.clear()
        for high in (2, 2, 3):
            structure = Structure.flat(2).with_support(interval(0, high))
            close(function(structure, jnp.zeros(2)), 2 * math.log(high / 4), jnp.float32)
        assert len(traces) == 2
