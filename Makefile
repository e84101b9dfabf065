# Every target makes and fills .venv by itself: a fresh clone needs only Python ≥ 3.11, pip, make and a package index.
PYTHON ?= python3
PIP_FLAGS ?=
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Several torch processes with default threads on few cores stall each other: one thread each.
export OMP_NUM_THREADS ?= 1

# As many tests at a time as there are cores. Who is idle takes from who is not: some tests are a hundred times longer.
JOBS   ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST := $(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist worksteal

.PHONY: help demo test quick check format bench mutants soak clean

help:  ## List the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; torch is the long part)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)  ## Train one model with a server and two workers, compare, plot
	$(BIN)/outerstep demo

test: $(READY)  ## Everything (JOBS=1: one test at a time)
	$(PYTEST)

quick: $(READY)  ## About two minutes: a fifth of the drawn cases, no long process tests, fewer schedules
	$(PYTEST) -m "not slow" --hypothesis-profile quick

check: $(READY)  ## Format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/architecture

format: $(READY)  ## Rewrite the files as ruff wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Short versions of the benchmarks behind the numbers in docs/
	$(BIN)/python bench/http_service.py --quick
	$(BIN)/python bench/codecs.py --quick
	$(BIN)/python bench/server_step.py --quick
	$(BIN)/python bench/async_speeds.py --quick
	$(BIN)/python bench/loss.py --quick
	$(BIN)/python bench/robustness.py --quick
	$(BIN)/python bench/overhead.py --quick
	$(BIN)/python bench/wan.py --quick
	$(BIN)/python bench/connections.py --quick
	$(BIN)/python bench/round.py --quick
	$(BIN)/python bench/floor.py --quick
	$(BIN)/python bench/memory.py --quick
	$(BIN)/python bench/journal.py --quick
	$(BIN)/python bench/allreduce.py --quick
	$(BIN)/python bench/watching.py --quick
	$(BIN)/python bench/torchft_sync.py --quick

mutants: $(READY)  ## Change decisions one by one and see whether a test notices (ONLY='outerstep.coordination.worker.*')
	$(BIN)/python tests/mutants.py $(if $(ONLY),'$(ONLY)')

soak: $(READY)  ## A storm of kills and cuts over a real run, then what its histories say (MINUTES=60 SEED=7)
	$(BIN)/python tests/faults/soak.py --minutes $(or $(MINUTES),1) --seed $(or $(SEED),0)

clean:
	rm -rf $(VENV) mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis
