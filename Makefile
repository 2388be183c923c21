# Two commands set all up on a fresh machine: clone, then `make run`.
PYTHON ?= python3
PORT ?= 3000
BIN := .venv/bin
TEST_PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

export CORPUSMILL_HOME ?= $(CURDIR)/.corpusmill
export DAGSTER_HOME := $(abspath $(CORPUSMILL_HOME))/dagster

.PHONY: run fineweb prepare train ui test test-desk lint env env-prepare env-test bench bench-gpu

run: env            ## materialize every asset with all checks, training included
	$(BIN)/python -m pipeline_assets run

prepare: env-prepare ## the same without training: no torch needed
	$(BIN)/python -m pipeline_assets run --without-training

train: env          ## train without Dagster on the latest plan, or on PLAN=…; ARGS="--steps 200 --resume" go behind
	$(BIN)/python -m pipeline_assets train $(if $(PLAN),--plan "$(PLAN)") $(ARGS)

fineweb: export CORPUSMILL_RECIPE := fineweb-lab
fineweb: env-prepare ## the recipe fineweb-lab from the Hub, without training: needs the network
	$(BIN)/python -m pipeline_assets run --without-training

ui: env             ## Dagster's UI and daemon on the same home, one port, loopback only
	$(BIN)/python -m pipeline_assets instance
	$(BIN)/dagster dev --workspace workspace.yaml --host 127.0.0.1 --port $(PORT)

test: env-test      ## the tests, one process more than cores: some of them wait for servers
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not desk"

test-desk: env-test ## the browser's longest tests: failures, re-execution, sensor, daemon
	$(BIN)/python -m pytest -m desk tests/ui

lint: env-test      ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: env          ## side-by-side measurements: a table, and JSON in bench-results/
	$(BIN)/python benchmarks/run.py

bench-gpu: env      ## attention backends side by side on a GPU: JSON in bench-results/
	$(BIN)/python benchmarks/gpu.py

env: .venv/.train
env-prepare: .venv/.prepare
env-test: .venv/.test

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "corpusmill needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/.prepare: requirements.lock pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.venv/.train: requirements-train.lock .venv/.prepare
	$(BIN)/python -m pip install --quiet --requirement requirements-train.lock
	touch $@

.venv/.test: requirements-test.lock .venv/.train
	$(BIN)/python -m pip install --quiet --requirement requirements-test.lock
	touch $@
