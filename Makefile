# Two commands do all: `make serve` and `make test`. Both set up .venv first.
# The first Python that is new enough; a Mac's own python3 is not.
PYTHON ?= $(or $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done),python3)
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?=
ARGS   ?=
# Processes that share the tests.
JOBS   ?= 2
BIN     = $(VENV)/bin
# mlx's backend: Metal comes with the plain package on a Mac; on Linux an extra brings the CPU's or CUDA's.
EXTRA  ?= $(if $(filter Darwin,$(shell uname -s)),,$(if $(shell command -v nvidia-smi),cuda,cpu))
comma  := ,

# Newer versions of pip show what setuptools says of every editable installation.
INSTALL = PYTHONWARNINGS=ignore::UserWarning $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: help setup serve test test-full check format bench clean

help:
	@echo "make serve      set up and serve the bundled model (PORT=8000 MODEL= ARGS=)"
	@echo "make test       set up and run the quick tests"
	@echo "make test-full  the long matrix, the real clients and the soak"
	@echo "make check      format, lint, types, direction of imports, every test can be imported"
	@echo "make format     let ruff rewrite the files"
	@echo "make bench      the speed table of docs/benchmarks.md on this machine (ARGS=)"

# To serve; pip shows what it downloads.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlx-mtp needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@echo "Installing into $(VENV): a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet --upgrade pip
	$(INSTALL) --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

# To test and change it too.
$(VENV)/.develop: $(VENV)/.installed
	$(INSTALL) --editable '.[$(if $(EXTRA),$(EXTRA)$(comma))dev]'
	@touch $@

# The clients that are written in Python; those from npm are installed by their tests.
$(VENV)/.full: $(VENV)/.develop
	$(INSTALL) --editable '.[$(if $(EXTRA),$(EXTRA)$(comma))dev$(comma)clients]'
	@touch $@

setup: $(VENV)/.develop

serve: $(VENV)/.installed
	$(BIN)/mlx-mtp serve $(MODEL) --port $(PORT) $(ARGS)

# A test that hangs in native code, which a Python signal can't end, shows its threads and fails.
# Processes that tests start find their modules compiled, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE =
test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not full" \
		-o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true --max-worker-restart 0

test-full: $(VENV)/.full
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --collect-only -qq >/dev/null

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m benchmarks concurrency $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
