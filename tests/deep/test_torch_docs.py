"""The pages on deep learning run as they stand, and so do the examples in iblr.torch."""

import ast
import importlib.util
import pkgutil

import pytest
import torch
from test_docs import ROOT, assert_all_found, blocks, run, run_examples

import iblr.torch

GUIDE, RECIPES = ROOT / "docs" / "ivon.md", ROOT / "docs" / "ivon-recipes.md"
MODULES = [
    "iblr.torch",
    *(m.name for m in pkgutil.walk_packages(iblr.torch.__path__, "iblr.torch.")),
]


def libraries(code):
    """The packages that a piece of code imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def missing(code):
    """Those that are not installed."""
    return sorted(name for name in set(libraries(code)) if importlib.util.find_spec(name) is None)


def titles(page):
    """The heading above every block of Python, and its number there."""
    heading, seen = "", []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ").replace("`", "")
        elif line.strip() == "```python":
            seen.append(heading)
            yield f"{heading} {seen.count(heading)}"


@pytest.fixture(autouse=True)
def one_thread():
    """Networks this small are many times slower with more threads than idle cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_guide_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(GUIDE, blocks(GUIDE))
    assert not list(tmp_path.iterdir()), "the guide leaves files behind"


@pytest.mark.filterwarnings("ignore", "error:IVON")  # the libraries' warnings are not ours
@pytest.mark.parametrize("code", list(blocks(RECIPES)), ids=list(titles(RECIPES)))
def test_a_recipe_runs_by_itself(code, tmp_path, monkeypatch):
    if absent := missing(code):
        pytest.skip(f"not installed: {', '.join(absent)} (make test-torch)")
    monkeypatch.chdir(tmp_path)
    run(RECIPES, [code])
    assert not list(tmp_path.iterdir()), "the recipe leaves files behind"


@pytest.mark.parametrize("page", [GUIDE, RECIPES], ids=lambda page: page.stem)
def test_no_block_of_a_page_is_overlooked(page):
    assert_all_found(page)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_give_what_they_say(name):
    if name == "iblr.torch.triton_kernels" and importlib.util.find_spec("triton") is None:
        pytest.skip("not installed: triton")
    run_examples(name)
