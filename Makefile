# `make` lists the targets. Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help grid grid-all test test-all lint format bench ui clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -e '.[dev]'
	@touch $@

grid: $(READY)  ## the main job: five optimizers x three strategies on the default model
	$(PY) -m gradbench -m 'optimizer=glob(*)' 'strategy=glob(*)'

grid-all: $(READY)  ## the same on all four models: 60 cells
	$(PY) -m gradbench -m 'model=glob(*)' 'optimizer=glob(*)' 'strategy=glob(*)'

ui: $(READY)  ## browse the results in MLflow
	$(PY) -m gradbench ui

test: $(READY) lint  ## lint, types and the default tests
	$(PY) -m pytest -n 2

test-all: $(READY) lint  ## the slow tests too
	$(PY) -m pytest -n 2 -m ''

lint: $(READY)  ## ruff, mypy, import-linter
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

format: $(READY)  ## let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(READY)  ## the measurements under tests/benchmarks/ (minutes)
	$(PY) -m tests.benchmarks

clean:  ## remove the environment and caches, never the runs
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
