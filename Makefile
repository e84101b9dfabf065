# Every target creates and fills .venv by itself: a fresh clone needs only Python ≥ 3.11, pip, make and a package index.
PYTHON ?= python3
PIP_FLAGS ?=
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS   := .venv-docs

# Several torch processes with default threads on few cores stall each other: one thread each.
export OMP_NUM_THREADS ?= 1

# One test process more than there are cores: a third of the time a test waits for other processes, or for a clock. Idle
# ones steal work from busy ones: some tests take a hundred times longer than others.
JOBS   ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )))
PYTEST := $(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist worksteal

.PHONY: help demo demo-hierarchy browser test schedules quick check format bench mutants soak docs release clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt hatch_build.py src/outerstep/dashboard/library.json
	@echo "setting up $(VENV) (once; torch is the long part)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m outerstep.dashboard.library || true  # pip hides what the build says: is the page's chart library here?
	@touch $@

demo: $(READY)  ## Train one model with a server and two workers, compare, plot
	$(BIN)/outerstep demo

demo-hierarchy: $(READY)  ## Watch two clusters of two train over a slow link (WORD=leave, return, join, bandwidth: other demos)
	$(BIN)/outerstep demo $(or $(WORD),hierarchy)

test: $(READY) browser  ## Run the tests, with the first of the fault schedules (JOBS=1: one at a time)
	$(PYTEST) -m "not schedules"

docs: $(DOCS)/.ready  ## Build the documentation as a site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	$(DOCS)/bin/python docs/site/check.py build/site
	@echo "build/site/index.html; to search in it: $(PYTHON) -m http.server -d build/site"

# Of its own, and small: neither torch nor this package is needed to turn pages into a site.
$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet $(PIP_FLAGS) -c constraints.txt $$($(DOCS)/bin/python .ci/extra.py docs)
	@touch $@

schedules: $(READY)  ## Run the other thousands of fault schedules, about eight minutes
	$(PYTEST) -m schedules

browser:  ## Install Chromium and its driver, for the tests of the page, if they are missing and this is root
	@command -v chromedriver >/dev/null && command -v chromium >/dev/null || .ci/install-browser

quick: $(READY)  ## Run the quick tests, about two minutes: a fifth of the generated cases, no long process tests, fewer schedules
	$(PYTEST) -m "not slow" --hypothesis-profile quick

check: $(READY)  ## Check format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/architecture

format: $(READY)  ## Reformat all files with ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Run short versions of the benchmarks behind the numbers in docs/
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
	$(BIN)/python bench/page.py --quick

mutants: $(READY)  ## Mutate decisions one by one and check that a test fails (ONLY='outerstep.coordination.worker.*')
	$(BIN)/python tests/mutants.py $(if $(ONLY),'$(ONLY)')

soak: $(READY)  ## Kill, cut and lie to real runs at random, then check their histories (MINUTES=60 SEED=7 MESSAGES=100000)
	$(BIN)/python tests/faults/soak.py --minutes $(or $(MINUTES),1) --seed $(or $(SEED),0) --hostile
	$(BIN)/python tests/fuzz/hostile.py server --messages $(or $(MESSAGES),10000) --seed $(or $(SEED),0)
	$(BIN)/python tests/fuzz/hostile.py peers --messages $(or $(MESSAGES),10000) --seed $(or $(SEED),0)
	$(BIN)/python tests/fuzz/hostile.py peers --messages $(or $(MESSAGES),10000) --seed $(or $(SEED),0) --kills 20

release: $(READY)  ## Build wheel, source distribution and bill of materials into dist/, and check them; uploads nothing
	$(BIN)/python .ci/release.py

clean:
	rm -rf $(VENV) $(DOCS) dist build/site mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis
