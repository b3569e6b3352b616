# Two targets do all the set-up on a fresh machine: `make verify` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help verify test test-all test-slow lint types format clean

help:
	@echo "make verify    install, then check every operator against its reference"
	@echo "make test      install, then lint, types and tests"
	@echo "make test-all  the same with the tests marked slow"
	@echo "make format    format the sources"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

verify: $(READY)
	$(BIN)/tilewise verify

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n auto -m "not slow"

test-slow: $(READY)
	$(BIN)/pytest -n auto -m slow

test-all: lint types
	$(BIN)/pytest -n auto

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
