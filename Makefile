# The environment lives in .venv; a change of pyproject.toml or constraints.txt brings it up to date at the next call.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# The first interpreter that this runs on: Megatron-Core has no wheel for 3.14.
PYTHONS := python3 python3.11 python3.12 python3.13
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in $(PYTHONS); do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
NEEDED := myxo needs Python 3.11, 3.12 or 3.13
NO_PYTHON := $(NEEDED), and none of $(PYTHONS) is one: install one, or name it with PYTHON=/path/to/python
NO_VENV = $(PYTHON) has neither ensurepip (`apt install python3-venv`) nor pip 22.3: install one, or name another Python with PYTHON=/path/to/python
VERSION = $(shell $(PYTHON) -c 'import sys; print(sys.version.split()[0])' 2>/dev/null)
IS_SUPPORTED = $(shell $(PYTHON) -c '$(SUPPORTED)' 2>/dev/null && echo yes)
HAS_VENV = $(shell $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null && echo yes)
HAS_PIP = $(shell $(PYTHON) -m pip --help 2>/dev/null | grep -o -m 1 -e --python)

# An index of torch's CPU wheels, in place of PyPI's torch, which is for CUDA; the environment remembers it, and is made anew with another.
MADE_WITH := $(shell cat $(READY) 2>/dev/null)
TORCH_INDEX ?= $(MADE_WITH)
PYPI_SIZE := 3.1 GB to download, 6 GB on disk, 9 GB while it installs: 2 minutes on a fast line, 6 at 100 Mbit/s
CPU_SIZE := 0.6 GB to download, 2 GB on disk: 1 to 2 minutes

# A terminal shows pip's progress bars, a log one line for each file of a megabyte or more. pip keeps its downloads in TMPDIR until all are
# there; /tmp is memory on many machines.
PIP := TMPDIR="$${TMPDIR:-$(CURDIR)/$(VENV)}" $(BIN)/python -m pip --disable-pip-version-check
SHOWN := $(if $(MAKE_TERMOUT),,| sed -un -e '/\(Downloading\|Using cached\).* MB.$$/p' -e 's/^Installing collected packages.*/  Unpacking/p')

# Packages are installed without bytecode, since most of torch and SGLang is never imported. What is gets its own when it is first imported;
# with this variable set every start of every process would compile it again, which doubles its time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart agents install test test-extra test-docker lint size wheel docs clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   train a tiny model on this machine's CPU, every service real"
	@echo "make agents       train it over OpenAI's client, three turns a rollout, and draw how it learns"
	@echo "make test         all tests that need neither a GPU nor docker"
	@echo "make test-extra   more of the same kind, of which CI runs a tenth each time"
	@echo "make test-docker  those that need a Docker engine with Compose v2"
	@echo "make lint         ruff, its format, mypy, import contracts"
	@echo "make size         lines, functions, complexity, names and imports, against their bounds"
	@echo "make docs         write the generated pages of docs/ anew, and the website to build/site"
	@echo "make wheel        the package for PyPI, in dist/"
	@echo "make install      the environment in $(VENV), nothing else"
	@echo "make clean        remove the environment, runs and caches"

install: $(READY)

ifneq ($(TORCH_INDEX),$(MADE_WITH))
$(READY): another-torch
endif
.PHONY: another-torch

$(READY): pyproject.toml constraints.txt Makefile
	$(if $(PYTHON),,$(error $(NO_PYTHON)))
	$(if $(IS_SUPPORTED),,$(error $(NEEDED): $(PYTHON) $(if $(VERSION),is $(VERSION),does not start)))
	$(if $(or $(HAS_VENV),$(HAS_PIP)),,$(error $(NO_VENV)))
	@echo "myxo: making $(VENV) with $(PYTHON) ($(VERSION))"
	@$(PYTHON) -m venv $(if $(filter another-torch,$?),--clear) $(if $(HAS_VENV),,--without-pip) $(VENV)
	@$(if $(HAS_VENV),,$(PYTHON) -m pip --python $(BIN)/python install --quiet pip)
ifneq ($(TORCH_INDEX),)
	@echo "myxo: installing torch for CPUs from $(TORCH_INDEX), the rest from PyPI ($(CPU_SIZE))"
	@$(PIP) install --no-compile --no-deps -c constraints.txt --index-url $(TORCH_INDEX) torch $(SHOWN)
else
	@echo "myxo: installing from PyPI, where torch is the build for CUDA, which runs without a GPU too ($(PYPI_SIZE))"
	@echo "myxo: TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the build for CPUs ($(CPU_SIZE))"
endif
	@$(PIP) install --no-compile -c constraints.txt -e '.[all]' $(SHOWN)
	@$(PIP) install --no-compile --no-deps -c constraints.txt sglang xgrammar reasoning_gym $(SHOWN)
	@rm -rf $(VENV)/engine-site
	@$(PIP) install --no-compile --no-deps -c constraints.txt --target $(VENV)/engine-site torchvision $(SHOWN)
	@echo "$(TORCH_INDEX)" > $@
	@echo "myxo: $(VENV) is ready"

quickstart: $(READY)
	@$(BIN)/python examples/arithmetic/prepare.py runs/quickstart/data
	@$(BIN)/myxo up examples/arithmetic/quickstart.toml --fresh $(if $(TRAINER),--trainer-backend $(TRAINER))

# the same model again, and an agent that plays three turns with it
agents: $(READY)
	@$(BIN)/python examples/arithmetic/prepare.py runs/quickstart/data --if-missing
	@$(BIN)/myxo up examples/arithmetic/quickstart.toml --fresh --name agents --agent examples.agents.openai_calculator:run \
		--num-rollout 24 --rollout-batch-size 16 --rollout-concurrency 128 --eval-interval 6 \
		--eval-prompt-data 'runs/quickstart/data/heldout.jsonl@[0:64]'

# Four at a time: two begin with whole runs and two with light tests, by tests/support/work_order.py, since whole runs wait for each other.
# SHARE=3/10 adds a tenth of the tests marked extra, as CI does.
test: $(READY)
	@$(BIN)/python -m pytest $(or $(AGAIN),-n 4 --dist loadfile --no-loadscope-reorder) --durations 10 $(if $(SHARE),--extra-share $(SHARE)) \
		-m "not gpu and not docker$(if $(SHARE),, and not extra)"

test-extra: $(READY)
	@$(BIN)/python -m pytest -m extra
	@$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

test-docker: $(READY)
	@$(BIN)/python -m pytest -m docker -o cache_dir=.pytest_cache/docker $(AGAIN) tests/integration/bus_store tests/compose

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

size: $(READY)
	@$(BIN)/python -m docs.size

# and the source distribution, from which it is built: both in dist/
wheel: $(READY)
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation .

docs: $(READY)
	@$(BIN)/python -m docs.catalogue
	@$(BIN)/python -m docs.accounts
	@$(BIN)/python -m services.rollout.engine.sglang_catalogue --write
	@$(BIN)/python -m docs.flags
	@$(BIN)/python -m docs.config_page
	@$(BIN)/python -m docs.errors_page
	@$(BIN)/python -m docs.metrics_page
	@$(BIN)/python -m docs.models_page
	@$(BIN)/python -m docs.frameworks_page
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "myxo: the website is in build/site: $(BIN)/python -m http.server --directory build/site"

clean:
	rm -rf $(VENV) runs build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
