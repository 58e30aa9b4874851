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

demo: setup
	$(BIN)/lit-llm prepare python-stdlib --output $(DEMO)/store --vocab_size 2048
	$(BIN)/lit-llm fit --config configs/demo.yaml --trainer.default_root_dir $(DEMO) --data.store $(DEMO)/store
	$(BIN)/lit-llm trace $(DEMO) --html $(DEMO)/trace.html
	$(BIN)/lit-llm predict --config configs/demo.yaml --trainer.default_root_dir $(DEMO) --ckpt_path last
	@$(BIN)/python -c "import json; [print('-' * 72, r['prompt'] + r['completion'], sep='\n') \
	  for r in map(json.loads, open('$(DEMO)/predictions.jsonl'))]"
	@echo "------------------------------------------------------------------------"
	@echo "run:             $(DEMO) (checkpoints/, config.yaml; tensorboard --logdir $(DEMO)/logs)"
	@echo "generated text:  $(DEMO)/predictions.jsonl"
	@echo "a few steps:     $(DEMO)/trace.html (where their time went; again: lit-llm trace $(DEMO))"

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
