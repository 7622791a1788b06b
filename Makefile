# Each target sets up what it needs: a virtual environment in .venv with the whole workspace, editable.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

DISTRIBUTIONS := ./ $(dir $(wildcard core/pyproject.toml plugins/*/pyproject.toml contrib_*/*/pyproject.toml))

.PHONY: demo test test-all lint audit bench docs wheels clean

demo: $(STAMP)
	@$(BIN)/python docs/examples/demo.py

test: lint docs
	$(BIN)/python -m pytest -m "not slow"

test-all: lint docs
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml core/src plugins/*/src contrib_*/*/src
	$(BIN)/python tests/budgets.py
	$(BIN)/python tests/advisories.py

audit: $(STAMP)
	$(BIN)/python tests/advisories.py --look-up

bench: $(STAMP)
	$(BIN)/python benchmarks/offline.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Needs no network.
wheels: $(STAMP)
	rm -f dist/toolkit_lm*.whl
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --wheel-dir dist $(DISTRIBUTIONS)
	@ls dist

$(STAMP): requirements-dev.txt docs/requirements.txt constraints.txt pyproject.toml $(wildcard core/pyproject.toml plugins/*/pyproject.toml contrib_*/*/pyproject.toml contrib_backends/*/compile.py contrib_backends/*/src/*/kernels/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the workspace into $(VENV) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	@touch $@

clean:
	rm -rf $(VENV) site dist build
