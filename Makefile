# Every target builds the environment it needs; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
export OMP_NUM_THREADS ?= $(shell nproc)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help demo browser test test-gpu lint format bench torture docs clean

help:
	@echo "make demo      train a small GPT on the Python standard library's source, then sample"
	@echo "make test      all tests that need no GPU"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make lint      format, lint, types, import rules"
	@echo "make bench     benchmarks; results in benchmarks/results"
	@echo "make torture   long fault trials; results in benchmarks/results"
	@echo "make docs      check that every snippet in README and docs runs"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bench]"
	@touch $@

demo: $(STAMP)
	$(BIN)/instar train examples/gpt/demo.yaml
	$(BIN)/instar sample latest --prompt "def "

# What the tests of pages click through.
browser:
	@command -v chromium >/dev/null \
	  || { $(SUDO) apt-get update -qq \
	    && $(SUDO) apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; } \
	  || { echo "the tests of pages need Chromium: apt-get install chromium" >&2; exit 1; }

test: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n 2 tests --ignore tests/torture
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" tests/torture

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH_STAMP)
	@for name in order loading graphs startup logs dashboard pauses operations throughput scaling time_to_loss; do \
	  $(BIN)/python benchmarks/$$name.py || exit 1; done

torture: $(STAMP)
	OMP_NUM_THREADS=1 INSTAR_TORTURE=full $(BIN)/python -m pytest tests/torture -s --timeout 7200

docs: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
