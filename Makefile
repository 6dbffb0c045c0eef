# Every target does its own set-up in .venv; python3, pip and make are enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check results zoo clean

demo: $(VENV)/demo.stamp          ## prune a small network on handwritten digits and print a table
	$(BIN)/ispasp demo

test: $(VENV)/test.stamp          ## all tests, doctests and README examples
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/test.stamp         ## lint, format, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

results: $(VENV)/test.stamp       ## remake what docs/results/ shows
	$(BIN)/ispasp reproduce synthetic --out docs/results
	( printf '# Selection time\n\nMade by `ispasp bench selection` on 2 CPU cores.\n\n```\n'; \
	  $(BIN)/ispasp bench selection; printf '```\n' ) > docs/results/selection.md
	( printf '# Survey and surgery\n\nMade by `ispasp bench surgery` on 2 CPU cores (torch-pruning where installed).\n\n```\n'; \
	  $(BIN)/ispasp bench surgery; printf '```\n' ) > docs/results/surgery.md

zoo: $(VENV)/test.stamp           ## prune every network of the zoo and write docs/coverage.md
	$(BIN)/ispasp bench coverage --out docs/coverage.md

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that no other package can choose its version.
$(VENV)/torch.stamp: constraints.txt | $(BIN)/python
	$(PIP) torch
	touch $@

$(VENV)/demo.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/test.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) --editable '.[dev,vision,transformers,onnx]'
	touch $@

clean:                            ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
