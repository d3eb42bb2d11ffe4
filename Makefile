# Every target works on a machine that has only python3 (3.11 or newer) and make.
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# OpenBLAS's threads wait by spinning and would starve XLA's.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help run test test-slow test-torch test-report lint types wheel-check bench clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1	/p' Makefile | expand -t 14

$(INSTALLED): pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e '.[dev,cli,plot]'
	touch $@

run: $(INSTALLED) ## run the quickstart example
	$(BIN)/python examples/quickstart.py

test: $(INSTALLED) ## run the default test suite
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: $(INSTALLED) ## run the tests marked slow
	$(BIN)/pytest -m slow

TORCH := $(VENV)/.torch
$(TORCH): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e '.[torch-test,recipes]'
	touch $@

test-torch: $(TORCH) ## install PyTorch, run the tests of iblr.torch and the recipes
	$(BIN)/pytest -n 2 --dist loadfile tests/deep

CHROMIUM := /usr/bin/chromium
$(CHROMIUM):
	@command -v apt-get >/dev/null || { \
	  echo "make test-report drives $@, which is not there; install Chromium under that name." >&2; \
	  exit 1; }
	as_root=; test "$$(id -u)" = 0 || as_root=sudo; \
	{ $$as_root apt-get update --quiet && \
	  $$as_root env DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes chromium; } || { \
	  echo "Chromium could not be installed; as root: apt-get install chromium" >&2; exit 1; }

test-report: $(INSTALLED) | $(CHROMIUM) ## test the page of iblr reproduce in a browser
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e '.[report-test]'
	$(BIN)/pytest -m browser tests/browser

lint: $(INSTALLED) ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(TORCH) ## check types
	$(BIN)/pyright

define WHEEL_CHECK
import importlib.resources

import iblr
import jax

for name in ("py.typed", "datasets/NOTICE.md", "reproduce/report/page.html"):
    assert importlib.resources.files(iblr).joinpath(name).is_file(), f"the wheel lacks {name}"
for load in ("abalone", "ionosphere", "cancer_mortality", "murphy"):
    assert len(getattr(iblr.datasets, load)()[0]), f"the wheel lacks the data of {load}"
start = iblr.Gaussian.standard(2)
result = iblr.fit(lambda z: -0.5 * (z**2).sum(), start, key=jax.random.key(0), num_steps=50)
print("iblr", iblr.__version__, "status:", result.status)
endef
export WHEEL_CHECK

wheel-check: $(INSTALLED) ## build the wheel and use it in a clean environment
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	$(BIN)/python -m build --wheel --outdir "$$tmp" . && \
	$(BIN)/python -m venv "$$tmp/venv" && \
	"$$tmp/venv/bin/python" -m pip install --quiet -c constraints-dev.txt "$$tmp"/*.whl && \
	cd "$$tmp" && venv/bin/python -c "$$WHEEL_CHECK"

bench: $(INSTALLED) ## run every script in benchmarks/
	set -e; for script in benchmarks/*.py; do $(BIN)/python "$$script"; done

clean: ## remove caches and build products, but not the environment
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
