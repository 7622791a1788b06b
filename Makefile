# Each target sets up what it needs, in .venv: `make demo` what a user installs, from wheels; all others the whole workspace, editable.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
# An index of torch's CPU builds: PyPI's torch brings gigabytes of CUDA.
TORCH_INDEX ?=
RENDERERS := $(VENV)-renderers
CLIENTS := $(VENV)-clients
NIGHTLY := $(VENV)-clients-nightly
DOWNSTREAM := $(VENV)-downstream
BENCHMARKS := $(VENV)-benchmarks
TRAINERS := $(VENV)-trainers
FLOOR := $(VENV)-floor
RENTED := $(VENV)-rented
NEWEST := $(VENV)-python313
PYTHON313 ?= $(or $(lastword $(wildcard $(HOME)/.pyenv/versions/3.13.*/bin/python)),python3.13)
PYTHON312 ?= $(or $(lastword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python)),python3.12)
# pip leaves bytecode to the first import (below). Without it, each of the many processes of tests would compile all that it
# imports, which doubles its start.
unexport PYTHONDONTWRITEBYTECODE

# Files of tests that run at a time, each in one thread: on two cores three, since many tests wait
# for a process. The kernels' tests have all threads to themselves.
JOBS ?= 3
QUICK := not slow and not long and not repository and not nightly
TESTS := $(filter-out contrib_backends/cpu/tests,$(wildcard core/tests libs/*/tests plugins/*/tests contrib_*/*/tests tests))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)
PYTEST_KERNELS := $(BIN)/python -m pytest contrib_backends/cpu/tests

# Python compiles a module when it is first imported, which most of what is installed never is.
QUIETLY := --quiet --disable-pip-version-check --no-compile

PROJECTS := pyproject.toml $(wildcard core/pyproject.toml libs/*/pyproject.toml plugins/*/pyproject.toml contrib_*/*/pyproject.toml)

.PHONY: demo dev test test-all test-nightly test-renderers test-downstream test-clients test-clients-of-servers test-clients-of-benchmarks test-clients-nightly test-trainers test-floor test-floor-here test-python313 test-python313-here test-gpu-kit test-kernel-counts gpu-kit lint audit bench docs changelog wheels sdists release-check clean

# Where the workspace is installed, the demo runs from it.
demo: $(or $(wildcard $(STAMP)),$(DEMO))
	@$(BIN)/python docs/examples/demo.py

dev: $(STAMP)

# Jobs that mostly use one core run side by side, the longest first.
BESIDE := +@$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync=target
test: $(STAMP)
	$(BESIDE) MARKS="$(QUICK)" test-renderers docs lint
	$(PYTEST) -m "$(QUICK)"
	$(PYTEST_KERNELS) -m "$(QUICK)"

# Environments are made on the way, beside what needs them not: pip takes one core at most.
test-all:
	$(BESIDE) test-floor test-clients test-trainers test-renderers lint test-downstream test-kernel-counts docs
	TOOLKIT_SITE=$(CURDIR)/site $(PYTEST) -m "not nightly"
	$(PYTEST_KERNELS) -m "not nightly"

# Cases of matrices that test-all leaves out.
test-nightly: test-all test-gpu-kit test-clients-nightly
	$(PYTEST) -m nightly
	$(PYTEST_RENDERERS) -m nightly

# mistral-common needs an older numpy than the workspace has: an environment of its own, over that of the workspace.
# litellm carries the vocabulary of gpt-oss, and is not run.
PYTEST_RENDERERS := $(RENDERERS)/bin/python -m pytest -q plugins/renderer_mistral/tests plugins/renderer_harmony/tests
MARKS ?= not nightly
test-renderers: $(RENDERERS)/.installed
	$(PYTEST_RENDERERS) -m "$(MARKS)"

# Plugins as third parties write them, installed as distributions. One that breaks shows that a contract did.
test-downstream: $(DOWNSTREAM)/.installed
	OMP_NUM_THREADS=1 $(DOWNSTREAM)/bin/python -m pytest -q -c downstream/pytest.ini --confcutdir downstream downstream

# Clients of other people's, in environments without the workspace. `python tests/clients/page.py` writes docs/clients.md.
PYTEST_CLIENTS := -m pytest -q -c tests/clients/pytest.ini --rootdir tests/clients --confcutdir tests/clients
test-clients: test-clients-of-servers test-clients-of-benchmarks
test-clients-of-servers test-clients-of-benchmarks: export TOOLKIT_PYTHON := $(abspath $(BIN)/python)
test-clients-of-servers: $(STAMP) $(CLIENTS)/.installed
	$(CLIENTS)/bin/python $(PYTEST_CLIENTS) --ignore tests/clients/benchmarks --ignore tests/clients/nightly tests/clients
test-clients-of-benchmarks: $(STAMP) $(BENCHMARKS)/.installed
	$(BENCHMARKS)/bin/python $(PYTEST_CLIENTS) tests/clients/benchmarks

# Agents, and a program that evaluates, which has other dependencies than those above. The agents of Node need npm.
test-clients-nightly: export TOOLKIT_PYTHON := $(abspath $(BIN)/python)
test-clients-nightly: export TOOLKIT_NODE := $(abspath $(NIGHTLY))/node
test-clients-nightly: $(STAMP) $(NIGHTLY)/.installed
	PYTHONPATH=tests/clients/nightly $(NIGHTLY)/bin/python $(PYTEST_CLIENTS) tests/clients/nightly

# Trainers of other people's, which import vLLM: toolkit_lm_vllm stands in its place.
test-trainers: $(TRAINERS)/.installed
	OMP_NUM_THREADS=1 $(TRAINERS)/bin/python -m pytest -q -c tests/trainers/pytest.ini --rootdir tests/trainers --confcutdir tests/trainers tests/trainers

# Core, and the plugins for GPUs on a CPU, with the oldest versions that the distributions allow. The scheduler's state
# machines call nothing that has a version.
FLOOR_TESTS := core/tests --ignore core/tests/scheduler $(patsubst %,contrib_backends/%/tests,compile flash_attn flex triton) contrib_backends/sdpa/tests/test_kernel.py
test-floor: $(if $(shell $(PYTHON312) -c '' 2>/dev/null && echo there),test-floor-here)
	@$(PYTHON312) -c '' 2>/dev/null || \
	echo "There is no $(PYTHON312): the tests with the oldest versions are left out. PYTHON312 names it."

# The workspace is found where the other environment finds it.
test-floor-here: $(FLOOR)/.installed $(STAMP)
	@rm -rf $(FLOOR)/lib/python3.12/site-packages/*toolkit_lm*
	@cp -r $(VENV)/lib/python3*/site-packages/*toolkit_lm* $(FLOOR)/lib/python3.12/site-packages/
	OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest -q -n $(JOBS) --dist loadfile -m "$(QUICK)" $(FLOOR_TESTS)

# On Python 3.13: core, and quick tests of each distribution. It shows which lines they run.
PYTHON313_TESTS := @tests/python313.txt
test-python313:
	@if $(PYTHON313) -c '' 2>/dev/null; then $(MAKE) --no-print-directory test-python313-here; \
	else echo "There is no $(PYTHON313): the tests on Python 3.13, and how many lines they run, are left out. PYTHON313 names it."; fi

test-python313-here: $(NEWEST)/.installed
	@mkdir -p build && rm -f build/coverage*
	OMP_NUM_THREADS=1 COVERAGE_CORE=sysmon $(NEWEST)/bin/python -m pytest -q -n $(JOBS) --dist loadfile \
		--cov --cov-report json:build/coverage.json --cov-fail-under 0 -m "not slow and not nightly" $(PYTHON313_TESTS)
	@$(NEWEST)/bin/python tests/covered.py build/coverage.json > build/coverage.txt; status=$$?; \
	cat build/coverage.txt; exit $$status

# A dry run of the GPU kit, by what a rented machine has and what the kit brings.
test-gpu-kit: gpu-kit
	@if $(PYTHON312) -c '' 2>/dev/null; then $(MAKE) --no-print-directory $(RENTED)/.installed && \
	OMP_NUM_THREADS=1 PYTHON=$(RENTED)/bin/python bash benchmarks/gpu_kit.sh --kit gpu-kit --quick; \
	else echo "There is no $(PYTHON312): the dry run has this environment's versions. PYTHON312 names it."; \
	OMP_NUM_THREADS=1 PYTHON=$(BIN)/python bash benchmarks/gpu_kit.sh --quick; fi

# Instructions of the kernels on CPUs against those of the commit AGAINST, by default the last one.
AGAINST ?=
test-kernel-counts: $(STAMP)
	$(BIN)/python benchmarks/kernel_counts.py $(if $(AGAINST),--against $(AGAINST))

# Files for a machine with a GPU and without a network, in the folder gpu-kit.
gpu-kit: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python -m gpu_kit.collect --to gpu-kit --python312 $(PYTHON312)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml core/src libs/*/src plugins/*/src contrib_*/*/src
	$(BIN)/python tests/budgets.py
	$(BIN)/python tests/lints.py
	$(BIN)/python tests/advisories.py
	$(BIN)/python tests/commits.py

audit: $(STAMP)
	$(BIN)/python tests/advisories.py --look-up

bench: $(STAMP)
	$(BIN)/python benchmarks/offline.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# At a release: CHANGELOG.md's section of this version, from what is in changes/, which is removed.
changelog: $(STAMP)
	$(BIN)/towncrier build --yes --version $$($(BIN)/python -c 'import toolkit_lm; print(toolkit_lm.__version__)')

# Need no network.
wheels: $(STAMP)
	$(BIN)/python deploy/distributions.py --to dist

sdists: $(STAMP)
	$(BIN)/python deploy/distributions.py --to dist --sdist

# What a release publishes, checked as the release workflow does it.
release-check: $(STAMP)
	$(BIN)/python deploy/release.py

# torch's own triton is one that fits it.
INSTALL := $(BIN)/pip install $(QUIETLY) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c build/constraints.txt
# Sources of what is in the wheels, which are built again when one has changed.
ifeq ($(wildcard $(STAMP)),)
SOURCES := $(shell find core/src libs/*/src plugins/*/src contrib_*/*/src -type f ! -name '*.pyc' ! -name '*.so' ! -name '* *')
endif

$(DEMO): deploy/distributions.py constraints.txt $(PROJECTS) $(SOURCES)
	@echo "1/4 An environment: $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p build && grep -v '^triton==' constraints.txt > build/constraints.txt
	@$(INSTALL) hatchling
	@echo "2/4 Wheels of the core and the default plugins"
	@$(BIN)/python deploy/distributions.py --to build/wheels --of toolkit-lm
	@echo "3/4 PyTorch, the largest download"
	@$(INSTALL) torch
	@echo "4/4 The wheels, and the other packages that they need"
	@$(BIN)/pip install $(QUIETLY) --no-deps --no-index --force-reinstall build/wheels/*.whl
	@$(INSTALL) build/wheels/*.whl openai
	@touch $@

$(STAMP): requirements-dev.txt docs/requirements.txt constraints.txt $(PROJECTS) $(wildcard contrib_backends/*/compile.py contrib_backends/*/src/*/kernels/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the workspace into $(VENV) ..."
	@$(BIN)/pip install $(QUIETLY) -c constraints.txt editables hatchling setuptools
	@$(BIN)/pip install $(QUIETLY) --no-build-isolation -c constraints.txt -r requirements-dev.txt
	@touch $@

# Has an environment find what the workspace's has installed, too.
define SEE_WORKSPACE
$(BIN)/python -c 'import site; print("import site; site.addsitedir(" + repr(site.getsitepackages()[0]) + ")")' \
	> $$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/workspace.pth
endef

$(RENDERERS)/.installed: $(STAMP) requirements-renderers.txt
	@rm -rf $(RENDERERS) && $(PYTHON) -m venv $(RENDERERS)
	@$(call SEE_WORKSPACE,$(RENDERERS))
	@$(RENDERERS)/bin/pip install $(QUIETLY) -r requirements-renderers.txt
	@$(RENDERERS)/bin/pip install $(QUIETLY) --no-deps litellm==1.109.1
	@touch $@

$(DOWNSTREAM)/.installed: $(STAMP) $(wildcard downstream/*/pyproject.toml downstream/*/src/*/*)
	@rm -rf $(DOWNSTREAM) && $(PYTHON) -m venv $(DOWNSTREAM)
	@$(call SEE_WORKSPACE,$(DOWNSTREAM))
	@$(DOWNSTREAM)/bin/pip install $(QUIETLY) --no-deps --no-build-isolation --no-index \
		$(dir $(wildcard downstream/*/pyproject.toml))
	@touch $@

$(CLIENTS)/.installed: requirements-clients.txt
	@rm -rf $(CLIENTS) && $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/pip install $(QUIETLY) -r requirements-clients.txt
	@touch $@

$(NIGHTLY)/.installed: requirements-clients-nightly.txt tests/clients/nightly/node/package.json
	@rm -rf $(NIGHTLY) && $(PYTHON) -m venv $(NIGHTLY)
	@$(NIGHTLY)/bin/pip install $(QUIETLY) -r requirements-clients-nightly.txt
	@mkdir -p $(NIGHTLY)/node && cp tests/clients/nightly/node/package.json $(NIGHTLY)/node
	@if command -v npm >/dev/null; then cd $(NIGHTLY)/node && npm install --silent --no-package-lock --no-audit --no-fund; \
	else echo "There is no npm: the agents of Node are left out."; fi
	@touch $@

$(TRAINERS)/.installed: $(STAMP) requirements-trainers.txt
	@rm -rf $(TRAINERS) && $(PYTHON) -m venv $(TRAINERS)
	@$(call SEE_WORKSPACE,$(TRAINERS))
	@$(TRAINERS)/bin/pip install $(QUIETLY) -r requirements-trainers.txt
	@touch $@

$(BENCHMARKS)/.installed: requirements-benchmarks.txt
	@rm -rf $(BENCHMARKS) && $(PYTHON) -m venv $(BENCHMARKS)
	@$(BENCHMARKS)/bin/pip install $(QUIETLY) -r requirements-benchmarks.txt
	@touch $@

$(FLOOR)/.installed: requirements-floor.txt
	@rm -rf $(FLOOR) && $(PYTHON312) -m venv $(FLOOR)
	@$(FLOOR)/bin/pip install $(QUIETLY) -r requirements-floor.txt
	@touch $@

# PyPI's torch names its own triton.
$(NEWEST)/.installed: requirements-dev.txt docs/requirements.txt constraints.txt pyproject.toml $(wildcard core/pyproject.toml libs/*/pyproject.toml plugins/*/pyproject.toml contrib_*/*/pyproject.toml)
	@rm -rf $(NEWEST) && $(PYTHON313) -m venv $(NEWEST)
	@echo "Installing the workspace into $(NEWEST) ..."
	@grep -v '^triton==' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST)/bin/pip install $(QUIETLY) -c $(NEWEST)/constraints.txt hatchling editables
	@$(NEWEST)/bin/pip install $(QUIETLY) --no-build-isolation -c $(NEWEST)/constraints.txt \
		-r requirements-dev.txt pytest-cov
	@touch $@

$(RENTED)/.installed: benchmarks/gpu_kit/there.txt
	@rm -rf $(RENTED) && $(PYTHON312) -m venv $(RENTED)
	@$(RENTED)/bin/pip install $(QUIETLY) -r benchmarks/gpu_kit/there.txt
	@touch $@

clean:
	rm -rf $(VENV) $(RENDERERS) $(DOWNSTREAM) $(CLIENTS) $(NIGHTLY) $(BENCHMARKS) $(TRAINERS) $(FLOOR) $(NEWEST) $(RENTED) gpu-kit site dist build
