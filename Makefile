# Two targets do all the set-up on a fresh machine: `make verify` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Triton's oldest release that the package takes: put before the one that is installed.
OLDEST := $(VENV)/triton-3.6.0
OLDEST_READY := $(OLDEST)/.ready

.PHONY: help verify bench test test-all test-slow test-oldest inspect docs lint types format clean

help:
	@echo "make verify    install, then check every operator against its reference"
	@echo "make bench     install, then time every operator beside what a user would pick instead, into bench/"
	@echo "make test      install, then lint, types and tests"
	@echo "make test-all  the same with the tests marked slow"
	@echo "make test-oldest  install the oldest Triton that the package takes, then compile the Hopper kernels with it"
	@echo "make inspect   install, then hold the kernels, compiled for cards that are not here, to their allowances"
	@echo "make docs      build the documentation into site/, links checked"
	@echo "make format    format the sources"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

verify: $(READY)
	$(BIN)/tilewise verify

bench: $(READY)
	@mkdir -p bench
	@failed=0; for operator in flash nsa nsa-compressed nsa-selected hstu bsa; do \
	  $(BIN)/tilewise bench $$operator --json bench/$$operator.json --plot bench/$$operator.png --html bench/$$operator.html || failed=1; \
	done; exit $$failed

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n auto -m "not slow"

test-slow: $(READY)
	$(BIN)/pytest -n auto --dist worksteal -m slow $(SLOW)

test-all: lint types
	$(BIN)/pytest -n auto

$(OLDEST_READY): $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) triton==3.6.0
	@touch $@

test-oldest: $(OLDEST_READY)
	PYTHONPATH=$(OLDEST) $(BIN)/pytest -n auto tests/ops/flash/test_compile_hopper.py tests/ops/flash/test_compile_hopper_bwd.py

inspect: $(READY)
	$(BIN)/tilewise inspect --check

# The variable keeps an announcement of Material for MkDocs out of the output.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis site
