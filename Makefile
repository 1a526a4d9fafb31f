# make setup   an environment in .venv with everything that development needs
# make check   ruff and mypy
# make test    check, then the tests (fast ones); test-slow runs the rest
# make demo    the main job on a real model, in an environment of its own
# make docs    regenerate docs/cli.md and the README's recipe table

PYTHON ?= python3
TORCH ?= torch==2.13.0# any torch of your platform's choice; a CPU build is enough
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_VENV ?= .demo/venv

.PHONY: setup check test test-slow docs demo clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu and not hub' -n 2 --durations=10

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

docs: setup
	$(BIN)/python -m scripts.write_docs

$(DEMO_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install -q "$(TORCH)"
	$(DEMO_VENV)/bin/python -m pip install -q '.[train,gguf]'
	touch $@

demo: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/python -m pip install -q --no-deps --force-reinstall .
	$(DEMO_VENV)/bin/python scripts/demo.py .demo

clean:
	rm -rf $(VENV) .demo build *.egg-info
