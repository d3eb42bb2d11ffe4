"""Imports go one way: a module of `iblr` imports only what stands before it in ORDER."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "iblr"

ORDER = [
    "iblr.status",
    "iblr.purposes",
    "iblr.compiling",
    "iblr.counter_noise",
    "iblr.noise",
    "iblr.support",
    "iblr.structure",
    "iblr.linalg",
    "iblr.special",
    "iblr.geometry",
    "iblr.datasets.files",
    "iblr.datasets.shipped",
    "iblr.datasets.images",
    "iblr.datasets.cells",
    "iblr.datasets.cytometry",
    "iblr.datasets",
    "iblr.target",
    "iblr.families",
    "iblr.families.line_search",
    "iblr.families.curvature",
    "iblr.families.base",
    "iblr.families.arguments",
    "iblr.families.abstract_gaussian",
    "iblr.families.dense_gaussian",
    "iblr.families.gaussian",
    "iblr.families.diagonal",
    "iblr.families.component",
    "iblr.families.mixture_components",
    "iblr.families.mixture_gradients",
    "iblr.families.mixture_growth",
    "iblr.families.mixture",
    "iblr.families.skew_gaussian",
    "iblr.families.positive",
    "iblr.families.gamma",
    "iblr.families.exponential",
    "iblr.families.inverse_gaussian",
    "iblr.families.product",
    "iblr.families.definition",
    "iblr.families.custom",
    "iblr.regression.pairs",
    "iblr.regression.radial",
    "iblr.regression.models",
    "iblr.regression.drift",
    "iblr.regression.state",
    "iblr.regression.approach",
    "iblr.regression.finish",
    "iblr.regression.machine",
    "iblr.regression",
    "iblr.estimators",
    "iblr.rule",
    "iblr.diagnostics",
    "iblr.metrics",
    "iblr.calibration",
    "iblr.importance",
    "iblr.tails",
    "iblr.corrected",
    "iblr.diagnosis",
    "iblr.verdict",
    "iblr.summary",
    "iblr.prediction",
    "iblr.posterior",
    "iblr.plots",
    "iblr.exports",
    "iblr.diagnose",
    "iblr.history",
    "iblr.loop",
    "iblr.rounds",
    "iblr.steps",
    "iblr.checks",
    "iblr.starts",
    "iblr.preflight",
    "iblr.told",
    "iblr.improper",
    "iblr.automatic",
    "iblr.settling",
    "iblr.climbs",
    "iblr.budgets",
    "iblr.judging",
    "iblr.unattended",
    "iblr.fit",
    "iblr.laplace",
    "iblr.optax.noise",
    "iblr.optax.rules",
    "iblr.optax.state",
    "iblr.optax.optimisers",
    "iblr.optax.squares",
    "iblr.optax",
    "iblr.baselines.outcome",
    "iblr.baselines.bbvi",
    "iblr.baselines.blr",
    "iblr.baselines.tran",
    "iblr.baselines.song",
    "iblr.baselines.vogn",
    "iblr.baselines.mixture_vogn",
    "iblr.baselines.vadam",
    "iblr.baselines.salimbeni",
    "iblr.baselines",
    "iblr",
    "iblr.torch.layout",
    "iblr.torch.noise",
    "iblr.torch.rules",
    "iblr.torch.slots",
    "iblr.torch.paths",
    "iblr.torch.triton_kernels",
    "iblr.torch.kernels",
    "iblr.torch.accumulation",
    "iblr.torch.posterior",
    "iblr.torch.refusals",
    "iblr.torch.saving",
    "iblr.torch.settings",
    "iblr.torch.weights",
    "iblr.torch.mean_field",
    "iblr.torch.ivon",
    "iblr.torch.comparison",
    "iblr.torch",
    "iblr.reproduce",
    "iblr.reproduce.pictures",
    "iblr.reproduce.results",
    "iblr.reproduce.report.strokes",
    "iblr.reproduce.report.figures",
    "iblr.reproduce.report.sections",
    "iblr.reproduce.report.page",
    "iblr.reproduce.report",
    "iblr.reproduce.wording",
    "iblr.reproduce.methods",
    "iblr.reproduce.trajectory",
    "iblr.reproduce.runs",
    "iblr.reproduce.runner",
    "iblr.reproduce.logistic",
    "iblr.reproduce.plane_targets",
    "iblr.reproduce.student_mixture",
    "iblr.reproduce.factor_model",
    "iblr.reproduce.gallery",
    "iblr.reproduce.mixture_of_t",
    "iblr.reproduce.networks",
    "iblr.reproduce.training",
    "iblr.reproduce.experiments",
    "iblr.reproduce.experiments.toy_logistic",
    "iblr.reproduce.experiments.beta_binomial",
    "iblr.reproduce.experiments.laplace",
    "iblr.reproduce.experiments.banana",
    "iblr.reproduce.experiments.double_banana",
    "iblr.reproduce.experiments.star",
    "iblr.reproduce.experiments.bnn",
    "iblr.reproduce.experiments.mixt_20",
    "iblr.reproduce.experiments.mixt_300",
    "iblr.reproduce.experiments.abalone",
    "iblr.reproduce.experiments.ionosphere",
    "iblr.reproduce.experiments.gamma_factor",
    "iblr.reproduce.experiments.bayesian_mlp",
    "iblr.reproduce.experiments.salimbeni",
    "iblr.reproduce.catalogue",
    "iblr.reproduce.parallel",
    "iblr.cli",
    "iblr.__main__",
]


# Methods of a posterior that hand it on to a module above it, each by an import inside of it.
DEFERRED = {("iblr.posterior", "iblr.plots"), ("iblr.posterior", "iblr.exports")}


def module_name(path, source=SOURCE):
    """`families/base.py` is `iblr.families.base`, a package's `__init__.py` the package."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(["iblr", *(part for part in parts if part != "__init__")])


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports(name, code, modules):
    """Modules of the package that the code of module `name` imports, wherever in it, and how."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively; write it out"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [full if full in modules else node.module for full in below]
        else:
            continue
        yield from ((node.lineno, other) for other in found if other.split(".")[0] == "iblr")


def upward_edges(name, code, order):
    """Imports of `name` from its own layer or from one above, but for those deferred."""
    place = {module: index for index, module in enumerate(order)}
    at_the_top = {node.lineno for node in ast.parse(code).body}
    return [
        f"{name}:{line} imports {other}"
        for line, other in imports(name, code, order)
        if place[other] >= place[name] and (line in at_the_top or (name, other) not in DEFERRED)
    ]


def test_every_module_has_its_place_in_the_order():
    assert sorted(MODULES) == sorted(ORDER), "put a new module into ORDER, where its imports allow"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_from_before_it(name):
    assert upward_edges(name, MODULES[name].read_text(encoding="utf-8"), ORDER) == []


def test_the_modules_do_import_one_another():
    edges = {
        (name, other)
        for name, path in MODULES.items()
        for _, other in imports(name, path.read_text(encoding="utf-8"), ORDER)
    }
    assert ("iblr.fit", "iblr.target") in edges
    assert ("iblr.families.gaussian", "iblr.families.arguments") in edges
    assert ("iblr", "iblr.datasets") in edges
    assert len(edges) > 30


@pytest.mark.parametrize(
    "code",
    [
        "from iblr.fit import fit",
        "import iblr.fit",
        "import iblr.fit as loop",
        "from iblr import fit",
        "import iblr",
        "from iblr.rule import improved_step",
        "def deferred():\n    from iblr.posterior import Posterior",
    ],
)
def test_an_upward_import_would_be_found(code):
    assert len(upward_edges("iblr.rule", code, ORDER)) == 1


def test_an_import_is_deferred_only_inside_a_method_and_only_where_that_is_listed():
    deferred = "def plot():\n    from iblr.plots import plot_pairs"
    assert upward_edges("iblr.posterior", deferred, ORDER) == []
    assert len(upward_edges("iblr.posterior", "from iblr.plots import plot_pairs", ORDER)) == 1
    assert len(upward_edges("iblr.verdict", deferred, ORDER)) == 1


@pytest.mark.parametrize(
    "code",
    ["from iblr.families.base import StepInfo", "from iblr.families import base", "import optax"],
)
def test_a_downward_import_is_allowed(code):
    assert upward_edges("iblr.rule", code, ORDER) == []


def test_a_relative_import_would_be_found():
    with pytest.raises(AssertionError, match="imports relatively"):
        upward_edges("iblr.rule", "from .fit import fit", ORDER)
