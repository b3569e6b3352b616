# Two targets do all the set-up on a fresh machine: `make verify` and `make test`. With SYSTEM=1 they keep the torch and
# triton that PYTHON has already, in an environment of its own: the pins of the two do not apply there.
PYTHON ?= python3
SYSTEM ?= 0
VENV := $(if $(filter-out 0,$(SYSTEM)),.venv-system,.venv)
# Tools are called as modules: one that the machine has already leaves no script there.
BIN := $(VENV)/bin
# What the commands need; then, on top, what development does: the framework, the documentation, the tests' tools.
TOOLS := $(VENV)/.tools
READY := $(VENV)/.ready
# Both are installed from their folders.
PROJECTS := pyproject.toml packages/mytorch/pyproject.toml
# Besides the Triton of constraints.txt, which everything runs with: the oldest that the package takes, and the newest.
TRITONS := 3.6.0 3.9.0
# The oldest Hugging Face transformers that the package takes, and the newest that was tried.
TRANSFORMERS := 5.4.0 5.23.0
# Hugging Face kernels: one that the transformers below takes, and the newest that was tried.
KERNELS := 0.16.2 0.17.2

.PHONY: help verify bench test test-all test-slow test-nightly test-tritons test-transformers test-hub
.PHONY: inspect docs hub lint types format clean

help:
	@echo "make verify    install, then check every operator against its reference"
	@echo "make bench     install, then time every operator against what a user would pick instead, into bench/"
	@echo "make test      install, then lint, types and tests"
	@echo "make test-slow  install, then the tests marked slow"
	@echo "make test-all  make test with the tests marked slow"
	@echo "make test-nightly  make test with every test there is"
	@echo "make test-tritons  install Triton $(TRITONS), then with each compile every kernel and interpret every operator"
	@echo "make test-transformers  install Hugging Face transformers $(TRANSFORMERS), then with each test its models"
	@echo "make test-hub  install Hugging Face kernels $(KERNELS), then with each test integrations/hub/"
	@echo "make inspect   install, then hold the kernels, compiled for cards that are not here, to their allowances"
	@echo "make docs      build the documentation into site/, links checked"
	@echo "make hub       fill integrations/hub/, a kernel of the Hugging Face Hub, from the sources"
	@echo "make format    format the sources"
	@echo "SYSTEM=1       with any of them: keep the torch and triton that PYTHON ($(PYTHON)) has, in .venv-system"

.venv/.tools: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[tools]'
	@touch $@

.venv/.ready: .venv/.tools $(PROJECTS)
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable packages/mytorch
	@touch $@

.venv-system/.ready: $(PROJECTS) constraints.txt tools/system_environment.py
	$(PYTHON) tools/system_environment.py .venv-system
	@touch $@

.venv-system/.tools: .venv-system/.ready
	@touch $@

verify: $(TOOLS)
	$(BIN)/tilewise verify

bench: $(TOOLS)
	@mkdir -p bench
	@failed=0; for operator in flash nsa nsa-compressed nsa-selected hstu bsa; do \
	  $(BIN)/tilewise bench $$operator --json bench/$$operator.json --plot bench/$$operator.png \
	    --html bench/$$operator.html || failed=1; \
	done; exit $$failed

lint: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(READY)
	$(BIN)/python -m mypy

test: lint types
	$(BIN)/python -m pytest -n auto -m "not slow and not nightly"

test-slow: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not nightly"

test-all: lint types
	$(BIN)/python -m pytest -n auto -m "not nightly"

test-nightly: lint types
	$(BIN)/python -m pytest -n auto --dist worksteal

$(VENV)/triton-%/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

# Make would delete it as a step on the way, and install again the next time.
.PRECIOUS: $(VENV)/triton-%/.ready

test-tritons: $(TRITONS:%=test-triton-%)

test-triton-%: $(VENV)/triton-%/.ready
	@PYTHONPATH=$(CURDIR)/$(<D) $(BIN)/python -c "import triton; assert triton.__version__ == '$*', triton.__version__"
	PYTHONPATH=$(CURDIR)/$(<D) $(BIN)/python -m pytest -n auto tests/test_other_tritons.py tests/gluon \
	  "tests/ops/flash/test_hopper_simulated.py::test_its_cases[packed-128]"

# In a folder of its own: the other targets run without it.
$(VENV)/transformers-%/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade --target $(@D) transformers==$*
	@touch $@

.PRECIOUS: $(VENV)/transformers-%/.ready

test-transformers: $(TRANSFORMERS:%=test-transformers-%)

test-transformers-%: $(VENV)/transformers-%/.ready
	PYTHONPATH=$(CURDIR)/$(<D) $(BIN)/python -m pytest -n auto -m transformers tests/integrations \
	  tests/benchmarks/test_scripts.py tests/examples/test_finetune_tiny.py tests/test_documents.py

$(VENV)/kernels-%/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade --target $(@D) kernels==$* transformers==5.17.0
	@touch $@

.PRECIOUS: $(VENV)/kernels-%/.ready

test-hub: $(KERNELS:%=test-hub-%)

test-hub-%: $(VENV)/kernels-%/.ready
	PYTHONPATH=$(CURDIR)/$(<D) $(BIN)/python -m pytest -m transformers tests/integrations/test_hub.py

inspect: $(READY)
	$(BIN)/tilewise inspect --check

# The variable keeps an announcement of Material for MkDocs out of the output.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

hub:
	$(PYTHON) tools/hub_kernel.py

format: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf .venv .venv-system build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis site
