# Two commands do everything on a machine that has Python 3.11: make demo, make test.
# What has to pass before a change is merged is make test-all, which takes longer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The tests start many processes, each of which would compile the library anew without these files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint types quick whole recipes audit rates cleaning mixing clean

demo: $(INSTALLED)
	$(BIN)/bilevel demo

test: lint types quick

test-all: lint types whole

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/mypy

# A few minutes: everything is touched, but nothing that is marked slow is run.
quick: $(INSTALLED)
	$(BIN)/pytest -n 2 -m "not slow"

whole: $(INSTALLED)
	$(BIN)/pytest -n 2

# The recipes for Accelerate, transformers and Lightning; these are large, and not part of the tests.
recipes: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-recipes.txt
	$(BIN)/pytest -n 2 tests/examples tests/mixing/test_huggingface.py

# Known vulnerabilities of what is pinned; docs/dependencies.md says what to do without a connection.
audit:
	$(PYTHON) -m venv out/audit
	out/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	out/audit/bin/pip-audit --no-deps --disable-pip --requirement requirements.txt
	out/audit/bin/pip-audit --no-deps --disable-pip --requirement requirements-recipes.txt

# The figure and the table of the rates in README.md.
rates: $(INSTALLED)
	$(BIN)/bilevel reproduce rates --plot docs/rates.png --json docs/rates.json

# The figure and the table of hyper-cleaning in README.md; half an hour.
cleaning: $(INSTALLED)
	$(BIN)/bilevel reproduce cleaning --plot docs/cleaning.png --json docs/cleaning.json

# The figure of data mixing in README.md.
mixing: $(INSTALLED)
	$(BIN)/bilevel mix --demo --out out/mixing --overwrite
	cp out/mixing/weights.png docs/mixing.png

$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q src
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
