# Each target sets up .venv by itself; only Python 3.11 or newer, git and make are assumed.
#   make demo                        train a small GPT over two stages (ARGS="--stages 4" for four)
#   make test                        the tests, one row of each matrix (ARGS="tests/unit" for some)
#   make test-rest                   what `make test` leaves out: further rows of matrices, and slow tests
#   make test-whole                  both, with every case of what tests go through in a loop
#   make check                       format, lint, types
#   make docs                        the documentation, into docs/_build/html
#   make clean                       what the targets made

CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach name,$(CANDIDATES),$(shell $(name) -c '$(NEW_ENOUGH)' 2>/dev/null && echo $(name))))
# Where torch comes from, for example TORCH="--index-url https://download.pytorch.org/whl/cpu" without a GPU.
TORCH ?=
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := lightning_pipeline tests examples benchmarks docs

.PHONY: demo test test-rest test-whole check docs clean

demo: .venv/ready
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Two lanes (tests/lanes.py). Of the fault matrix a part; `python -m benchmarks.fault_rows` runs the whole.
test: .venv/tested
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m tests.lanes
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-rest: .venv/tested
	$(BIN)/python -m tests.lanes --rest

test-whole: .venv/tested
	$(BIN)/python -m tests.lanes --whole

check: .venv/tested
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

docs: .venv/documented
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf .venv demo_out docs/_build build .pytest_cache .ruff_cache .mypy_cache lightning_pipeline.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv found; name one: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH) -c constraints.txt torch
	$(PIP) -c constraints.txt -e .
	@touch $@

.venv/tested: .venv/ready
	$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

.venv/documented: .venv/ready
	$(PIP) -c constraints.txt -e ".[docs]"
	@touch $@
