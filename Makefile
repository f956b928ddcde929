# `make help` lists the commands. Each prepares .venv when needed, which takes a few minutes the first time.
PYTHON ?= python3
RANKS ?= 4
ARGS ?=

VENV := .venv
PACKAGES := $(VENV)/.packages
EXTENSION := $(VENV)/.extension
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
FORMATTED := $(CXX_FILES) $(shell find tests -name '*.cpp' -o -name '*.h')

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install bench test lint format clean
.DELETE_ON_ERROR:

help: ## This list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 15
	@echo 'Variables: PYTHON=$(PYTHON) RANKS=$(RANKS) ARGS="..." (for the benchmark or pytest)'

install: $(EXTENSION) ## Make .venv and build fp4comm into it

bench: $(EXTENSION) ## Measure dispatch and combine between ranks on this machine
	mpirun -n $(RANKS) python -m benchmarks.bandwidth $(ARGS)

test: $(EXTENSION) ## All tests that this machine can run
	python -m pytest $(ARGS)

lint: $(EXTENSION) ## Style and types
	python -m ruff check
	python -m ruff format --check
	python -m mypy
	python -m benchmarks.tables --check
	clang-format --dry-run -Werror $(FORMATTED)

format: $(PACKAGES) ## Rewrite the sources in the project's style
	python -m ruff check --fix
	python -m ruff format
	clang-format -i $(FORMATTED)

clean: ## Remove all that make made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Python sources are used where they lie; this builds the extension and is repeated when C++ or packaging changes.
$(EXTENSION): $(PACKAGES) pyproject.toml CMakeLists.txt $(CXX_FILES)
	@echo 'Building the C++ extension (about a minute the first time)'
	@python -m pip install --quiet --no-build-isolation --no-deps --config-settings=build-dir=build --editable .
	@touch $@

# An environment whose installation was interrupted has no stamp, and is made anew: pip can't tell what it lacks.
$(PACKAGES): requirements-dev.txt requirements-hosts.txt
	@test -e $@ || sh tools/check_machine.sh '$(PYTHON)'
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $@
	@echo 'Installing the packages of requirements-dev.txt into $(VENV) (a few minutes)'
	@python -m pip install -qq --requirement requirements-dev.txt
	@python -m pip install -qq --no-deps --requirement requirements-hosts.txt
	@touch $@
