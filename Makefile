# make study   tune and compare on the simulated device (or on a GPU: DEVICE=cuda:0)
# make test    everything that needs no GPU: lint, types, import rules, tests
# make check   the first three of those
# make bench   what is in benchmarks/ and how to run it
# make format  let ruff rewrite what it can

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup study test check format bench clean

PYTHON ?= python3
BIN := .venv/bin
LOCK := requirements/cpu.lock

WORKLOAD ?= attention_pre
DEVICE ?= sim:b300
TRIALS ?= 200

# The environment is ready when a stamp named after the lock and the project's metadata is there.
READY := .venv/ready-$(shell cat $(LOCK) pyproject.toml | sha256sum | cut -c 1-16)

help:
	@sed -n '/^# make/s/^# //p' Makefile

setup: $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	@echo "Setting up .venv from $(LOCK)"
	@$(BIN)/python -c '' 2>/dev/null || { rm -rf .venv && $(PYTHON) -m venv .venv; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(LOCK)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@rm -f .venv/ready-* && touch $@

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest -m "not gpu and not multi_gpu"

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A study that fits five minutes on two cores. The commands name the files that they save. Exit code 3 of a study says
# that nothing beats the default: an answer, not a failure.
study: $(READY)
	$(BIN)/python -m spantune tune $(WORKLOAD) --device $(DEVICE) --trials $(TRIALS) || [ $$? -eq 3 ]
	$(BIN)/python -m spantune compare $(WORKLOAD) --device $(DEVICE)

bench: $(READY)
	@echo "Each needs a CUDA GPU to itself; run one as: $(BIN)/python -m benchmarks.NAME --help"
	@for file in benchmarks/[a-z]*.py; do [ -e "$$file" ] || continue; \
	  printf '  %-24s %s\n' "$$(basename "$$file" .py)" "$$(sed -n '1s/"""//gp' "$$file")"; done

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
