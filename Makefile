# Two targets do all the set-up on a fresh machine: `make verify` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Beside the Triton of constraints.txt, which everything runs with: the oldest that the package takes, and the newest.
TRITONS := 3.6.0 3.9.0

.PHONY: help verify bench test test-all test-slow test-tritons inspect docs lint types format clean

help:
	@echo "make verify    install, then check every operator against its reference"
	@echo "make bench     install, then time every operator beside what a user would pick instead, into bench/"
	@echo "make test      install, then lint, types and tests"
	@echo "make test-all  the same with the tests marked slow"
	@echo "make test-tritons  install Triton $(TRITONS), then with each compile every kernel and interpret every operator"
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

$(VENV)/triton-%/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

# Make would delete it as a step on the way, and install again the next time.
.PRECIOUS: $(VENV)/triton-%/.ready

test-tritons: $(TRITONS:%=test-triton-%)

test-triton-%: $(VENV)/triton-%/.ready
	@PYTHONPATH=$(CURDIR)/$(<D) $(BIN)/python -c "import triton; assert triton.__version__ == '$*', triton.__version__"
	PYTHONPATH=$(CURDIR)/$(<D) $(BIN)/pytest -n auto tests/test_other_tritons.py

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
