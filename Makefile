# Everything runs inside .venv, which the first target that needs it builds. Only Python (3.11 or
# newer) and make have to be there.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check install --quiet -c constraints.txt $(INSTALL_FLAGS)
TORCH  := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
SETUPTOOLS := $(shell sed -n 's/^setuptools==/setuptools==/p' constraints.txt)

# What the verified run of `make run` serves; `make run ARGS="--sessions 80 ..."` replaces it.
ARGS ?= --verify --sessions 64

# What `make test-gpu` runs in; a Python that has a CUDA torch already takes the place of .venv.
GPU_PYTHON ?= $(BIN)/python

.PHONY: help run test test-gpu check check-lint check-mypy check-pyright mutants bench format clean
.DEFAULT_GOAL := help

help: ## print this list
	@echo 'kvlease: make TARGET, where TARGET is one of'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{printf "%-11s%s\n", $$1, $$2}'

run: $(VENV)/.run ## set up, then serve 64 tool-agent sessions and verify every answer
	$(BIN)/kvlease run $(ARGS)

test: $(VENV)/.dev ## set up, then run the test suite
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev) ## run what needs a CUDA device, and what it changes (GPU_PYTHON=... brings its own Python)
	$(GPU_PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device is to be seen from here; make test runs everything that needs none")'
	$(GPU_PYTHON) -m pytest -p no:cacheprovider tests/kernels tests/oracle tests/pools/test_device_copies.py tests/runtime/cuda

check: check-lint check-mypy check-pyright ## set up, then lint, check formatting, types and the import table

check-lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

check-mypy: $(VENV)/.dev
	$(BIN)/mypy

check-pyright: $(VENV)/.dev
	$(BIN)/basedpyright --pythonpath $(BIN)/python

mutants: $(VENV)/.dev ## set up, then take guards out one by one: each must be noticed, and seen in a log
	$(BIN)/python -m tests.mutants --witness

bench: $(VENV)/.dev ## set up, then run the benchmarks, which print ratios measured in one run
	@failed=; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file || failed="$$failed $$file"; done; test -z "$$failed" || { echo "a bound was missed, or the run failed:$$failed" >&2; exit 1; }

format: $(VENV)/.dev ## set up, then format the sources and apply the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build
	rm -rf kvlease.egg-info
	find kvlease tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch comes first and by its exact version: a range would let pip pick a build of several GB.
# setuptools comes with it, pinned, and builds the package without fetching another copy.
$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'kvlease needs Python 3.11 or newer; set PYTHON=/path/to/python3.11' >&2; exit 1; }
	@test -x $(BIN)/python || { echo 'making $(VENV)'; $(PYTHON) -m venv $(VENV); }
	@echo 'installing $(TORCH) and the run-time packages into $(VENV)'
	$(PIP) $(TORCH) $(SETUPTOOLS)
	$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo 'installing the test and check tools into $(VENV)'
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@
