"""Every piece of Python in the documentation runs as it stands."""

import doctest
import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
from helpers import slow

import iblr

ROOT = Path(__file__).parents[1]
TORCH_PAGES = {"ivon", "ivon-recipes"}  # run by make test-torch, with everything in iblr.torch
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.stem not in TORCH_PAGES]
MODULES = ["iblr", *(m.name for m in pkgutil.walk_packages(iblr.__path__, prefix="iblr."))]
MODULES = [name for name in MODULES if not name.startswith("iblr.torch")]
SHORT = {"README"}  # the other pages compile for long
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)


def blocks(page):
    """The code of every Python block, at its own line, so that tracebacks point at it."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield "\n" * text.count("\n", 0, match.start(2)) + match.group(2)


def run(page, pieces):
    """Pieces of a page's code, one after the other, in one namespace."""
    namespace = {"__name__": f"page_{page.stem}"}
    for code in pieces:
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[] if page.stem in SHORT else [pytest.mark.slow])
        for page in PAGES
    ],
)
def test_the_code_of_a_page_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, blocks(page))
    assert not list(tmp_path.iterdir()), f"{page.name} leaves files behind"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_block_of_a_page_is_overlooked(page):
    assert_all_found(page)


def assert_all_found(page):
    """No fence of Python that `blocks` does not give."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^[ >]*```(.*)$", text, flags=re.MULTILINE)
    assert len(fences) % 2 == 0
    assert len(list(blocks(page))) == sum("py" in fence.lower() for fence in fences)


class Finder(doctest.DocTestFinder):
    """Finds the docstrings of decorated functions too, whose globals are the decorator's."""

    def _from_module(self, module, object):
        return getattr(object, "__module__", None) == module.__name__


def doctests(module):
    """The examples in the docstrings of a module, by name."""
    return [test for test in Finder().find(module) if test.examples]


@pytest.mark.parametrize(
    "name", [slow(name) if name.startswith("iblr.baselines.") else name for name in MODULES]
)
def test_the_examples_in_docstrings_give_what_they_say(name):
    run_examples(name)


def run_examples(name):
    """Those of a module, all of them."""
    module = importlib.import_module(name)
    source = Path(module.__file__).read_text(encoding="utf-8")
    tests = doctests(module)
    # An example in a docstring that doctest did not find would look like one that passed.
    written = len(re.findall(r"^ *>>> ", source, flags=re.MULTILINE))
    assert sum(len(test.examples) for test in tests) == written
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST
    )
    report = []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.slow
def test_the_quickstart_runs_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "ELBO" in said and "3.3076" in said
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
