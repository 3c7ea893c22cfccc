# make demo and make test each work as the first command typed in a fresh clone.
PYTHON ?= python3
VENV   ?= .venv
# TORCH=torch==2.6.0 installs that build first; by default pip picks the newest.
TORCH  ?=
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed

.PHONY: install demo test check bench docs clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH),$(BIN)/python -m pip install "$(TORCH)")
	$(BIN)/python -m pip install --quiet --quiet --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python tools/run_demo.py --output demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docs.py

docs: $(STAMP)
	$(BIN)/python tools/write_reference.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) demo runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
