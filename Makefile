# `make demo` and `make test` each set up what they need in .venv and then do their job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
TORCH := $(shell sed -n '1p' $(CONSTRAINTS))
DEMO := runs/demo

.PHONY: demo test test-slow lint format setup setup-dev clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: the pinned wheel decides which build the rest is resolved against.
$(VENV)/.torch: $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/.setup: pyproject.toml $(VENV)/.torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.setup-dev: pyproject.toml $(VENV)/.torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@ $(VENV)/.setup

setup: $(VENV)/.setup
setup-dev: $(VENV)/.setup-dev

test: setup-dev
	$(BIN)/python -m pytest

test-slow: setup-dev
	$(BIN)/python -m pytest -m slow

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs stores .pytest_cache .mypy_cache .ruff_cache
