# `make` lists the targets. Everything runs in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help grid grid-all lr-sweep plan-table test test-all lint format bench ui clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): 2 GB, some minutes"
	$(PY) -m pip install --quiet -e '.[dev]'
	@touch $@

grid: $(READY)  ## the main job: five optimizers x three strategies on the default model
	$(PY) -m gradbench -m 'optimizer=glob(*)' 'strategy=glob(*)'

grid-all: $(READY)  ## the same on all four models: 60 cells
	$(PY) -m gradbench -m 'model=glob(*)' 'optimizer=glob(*)' 'strategy=glob(*)'

LR_GRIDS := sgd=0.03,0.1,0.3,1,3 adam=0.001,0.003,0.01,0.03,0.1 adagrad=0.003,0.01,0.03,0.1,0.3,1 \
	adadelta=1,3,10,30,100 cg=0.01,0.03,0.1,0.3,1

lr-sweep: $(READY)  ## the sweep behind the learning rates of conf/optimizer/: 208 cells, minutes
	for grid in $(LR_GRIDS); do \
		$(PY) -m gradbench -m 'model=glob(*)' seed=0,1 optimizer=$${grid%=*} optimizer.lr=$${grid#*=} \
			gate.enabled=false probe.audit=false || exit; \
	done

plan-table: $(READY)  ## the README's table of what the paper's cells need: 60 plans, minutes, no GPU
	$(PY) -m tests.benchmarks.plan_table

ui: $(READY)  ## browse the results in MLflow
	$(PY) -m gradbench ui

test: $(READY) lint  ## lint, types and the default tests
	$(PY) -m pytest -n 2 --dist loadfile

test-all: $(READY) lint  ## the slow tests too
	$(PY) -m pytest -n 2 --dist loadfile -m ''

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
