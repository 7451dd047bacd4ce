# Two commands do everything on a machine that has Python 3.11: make demo, make test.
# What has to pass before a change is merged is make test-all, which takes longer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_VENV := out/docs-venv
DOCS_INSTALLED := $(DOCS_VENV)/.installed

# The tests start many processes, each of which would compile the library anew without these files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint types quick whole recipes docs figures gallery notebooks package audit rates cleaning mixing clean

demo: $(INSTALLED)
	$(BIN)/bilevel demo

test: lint types quick

# The tests that look at the site in a browser are skipped where make docs has not built it.
test-all: lint types whole

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/mypy

# A few minutes: everything is touched, but nothing that is marked slow is run.
quick: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow"

whole: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist loadgroup

# The recipes for Accelerate, transformers and Lightning; these are large, and not part of the tests.
recipes: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-recipes.txt
	$(BIN)/pytest -n 2 tests/examples tests/mixing/test_huggingface.py

# The site, in out/docs/html; a warning is an error. Its tools have an environment of their own, which
# sees the packages of $(VENV) as well, so that PyTorch is not installed twice.
docs: $(DOCS_INSTALLED)
	rm -rf docs/api/generated docs/gallery/pages
	$(DOCS_VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going docs out/docs/html

$(DOCS_INSTALLED): $(INSTALLED) requirements-docs.txt
	$(BIN)/python -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(DOCS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/library.pth"
	touch $@

# Known vulnerabilities of what is pinned; docs/dependencies.md says what to do without a connection.
audit:
	$(PYTHON) -m venv out/audit
	out/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	out/audit/bin/pip-audit --no-deps --disable-pip --requirement requirements.txt
	out/audit/bin/pip-audit --no-deps --disable-pip --requirement requirements-recipes.txt
	out/audit/bin/pip-audit --no-deps --disable-pip --requirement requirements-docs.txt

# The tables of figures in the pages and the pictures in docs/figures, from benchmarks/results and
# docs/figures/figures.json, and the pictures in docs/gallery, from docs/gallery/results.json.
figures: $(INSTALLED)
	$(BIN)/python docs/measured.py
	$(BIN)/python -m docs.draw_figures
	$(BIN)/python docs/draw_gallery.py

# Every example of the gallery with five seeds, for docs/gallery/results.json; more than an hour.
gallery: $(INSTALLED)
	$(BIN)/python -m examples.gallery --jobs 2

# The four starts as notebooks, from docs/start.
notebooks: $(INSTALLED)
	$(BIN)/python docs/make_notebooks.py

# The sdist and the wheel, built and tried.
package: $(INSTALLED)
	rm -rf out/dist
	$(BIN)/hatchling build --directory out/dist
	$(BIN)/pytest tests/test_package.py

# The figure and the table of the rates in docs/theory.md.
rates: $(INSTALLED)
	$(BIN)/bilevel reproduce rates --plot docs/rates.png --json docs/rates.json

# The figure and the table of hyper-cleaning in docs/benchmarks-labels.md; half an hour.
cleaning: $(INSTALLED)
	$(BIN)/bilevel reproduce cleaning --plot docs/cleaning.png --json docs/cleaning.json

# The figure of data mixing in docs/mix-data.md.
mixing: $(INSTALLED)
	$(BIN)/bilevel mix --demo --out out/mixing --overwrite
	cp out/mixing/weights.png docs/mixing.png

# What is imported is compiled then; to compile everything takes as long as the rest of this.
$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q src
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
