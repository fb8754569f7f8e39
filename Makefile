PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# The pinned torch goes in by itself before everything else, so that no other package's range picks another build.
TORCH := $(shell grep '^torch==' constraints.txt)

DEV := $(VENV)/.installed
BENCH := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint docs pages notebooks pictures bench results clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEV) ## learn a few small tasks and show that none is forgotten
	$(BIN)/rkr demo

test: lint ## lint, then run the tests (all but the slow ones) on all cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto

test-slow: $(DEV) ## run the slow tests on all cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto -m slow

lint: $(DEV) ## check style, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

docs: $(DEV) ## build the documentation site: docs/_build/html/index.html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo 'site: open docs/_build/html/index.html in a browser'

pages: $(DEV) ## run the code on all pages of the documentation, and put its output into them
	$(BIN)/python tools/pages.py --write

notebooks: $(DEV) ## make the notebooks in examples/ from the tutorials
	$(BIN)/python tools/notebooks.py

pictures: $(DEV) ## make the pictures in docs/images; needs Chromium
	$(BIN)/python tools/pictures.py

bench: $(BENCH) ## measure speed and memory against other libraries
	$(BIN)/python benchmarks/run.py --into docs/results/speed.md

results: $(DEV) ## make docs/results/results.md, docs/results/reproduction.md, and the README's figure and table from results/
	$(BIN)/python tools/results_page.py results docs/results/results.md
	$(BIN)/python tools/reproduction_page.py results docs/results/reproduction.md

clean: ## remove the virtual environment, caches and builds
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEV): pyproject.toml constraints.txt tests/vision.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e '.[docs,test]'
	rm -rf $(VENV)/vision
	$(PIP) --no-deps --target $(VENV)/vision -r tests/vision.txt \
		|| { rm -rf $(VENV)/vision; echo 'torchvision and timm could not be installed: their tests are skipped'; }
	@touch $@

$(BENCH): $(DEV) benchmarks/avalanche.txt
	$(PIP) -e '.[bench]'
	rm -rf $(VENV)/avalanche
	$(PIP) --no-deps --target $(VENV)/avalanche -r benchmarks/avalanche.txt \
		|| { rm -rf $(VENV)/avalanche; echo 'avalanche could not be installed: the benchmarks go on without it'; }
	@touch $@
