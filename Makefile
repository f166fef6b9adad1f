# Everything from a fresh clone: no root, no GPU, no network beyond the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test test-slow check format bench docs clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	touch $@

demo: $(INSTALLED)
	$(BIN)/rookworld train --preset demo --out runs/demo --overwrite
	$(BIN)/rookworld match runs/demo/final apprentice --games 40 --max-plies 120 --strict --json > runs/demo/match.json
	$(BIN)/rookworld report runs/demo --out runs/demo/report.html

test: check
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow -n 2 --dist loadfile

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo build/site/index.html

clean:
	rm -rf $(VENV) build runs bench.json test-output
