# One list of verbs; .ci/run runs the same ones.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: help setup demo model test check format bench gpu-check clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv with pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## answer a question with a real model in separate processes
	@echo "What is gravity? Answer in two sentences." | $(VENV)/bin/sidestep chat --model smollm2 --temperature 0 --max-tokens 100

model: $(STAMP) ## fetch the default model into the cache, once
	@$(VENV)/bin/python -m proc.models

test: $(STAMP) model ## run the whole suite, offline
	$(VENV)/bin/python -m pytest -q

check: $(STAMP) ## lint, format and types; reads only
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	@$(VENV)/bin/python tests/longest.py

format: $(STAMP) ## rewrite the files in the project's format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

gpu-check: ## test the GPU worker's host side; where there is a GPU, prove and measure it there
	$(or $(wildcard $(VENV)/bin/python),python3) -m bench.gpu_check

bench: $(STAMP) ## what a step costs the scheduler alone
	$(VENV)/bin/python -m proc bench step

clean: ## remove what setup and the tools made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
