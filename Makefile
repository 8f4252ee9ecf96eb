# specserve: the commands of the README. CI calls the same ones.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
CONFIG ?= configs/demo.yaml
ARGS   ?=
# Processes that the tests are spread over.
JOBS   ?= 2
# How long `chaos` goes on.
CHAOS  ?= full

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

.PHONY: serve observe test chaos lint type fmt generate demo-models clean help

help:  ## Print the targets.
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'

serve: $(VENV)/.app  ## Start the app (PORT=8000 CONFIG=configs/demo.yaml); Ctrl-C stops it.
	$(BIN)/specserve serve --config $(CONFIG) --port $(PORT)

observe: $(VENV)/.app  ## Run a Prometheus with the rules against a running server (PORT=8000).
	$(BIN)/specserve observe --url http://127.0.0.1:$(PORT)

test: $(VENV)/.dev  ## Run the CPU test suite (ARGS="-k name").
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

chaos: $(VENV)/.dev  ## Kill, overload and drain a running server (CHAOS=short for a minute of it).
	CHAOS=$(CHAOS) OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m chaos tests/chaos $(ARGS)

lint: $(VENV)/.dev  ## Check style, imports between the planes, spelling.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell

type: $(VENV)/.dev  ## Check types.
	$(BIN)/mypy

fmt: $(VENV)/.dev  ## Format and fix what can be fixed.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/.dev  ## Write the dashboards and the README's table of metrics from the code.
	$(BIN)/python -m deploy.grafana
	$(BIN)/python -m deploy.metrics

# The allocator keeps freed memory: without that a step takes a fifth longer.
demo-models: $(VENV)/.app  ## Train the embedded demo models again (an hour and more on 2 cores).
	OMP_WAIT_POLICY=PASSIVE MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 \
	  MALLOC_TOP_PAD_=100000000 $(BIN)/python -m deploy.demo.train

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) out tests/e2e/clients/node_modules .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.app: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.app
