# Every target does its own set-up in .venv; python3, pip and make are enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests start processes: what one has compiled, the next one finds.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-long check wheel-test transformers-test soak fuzz-files mutations results zoo clean

demo: $(VENV)/demo.stamp          ## prune a small network on handwritten digits and print a table
	$(BIN)/ispasp demo

test: $(VENV)/test.stamp          ## tests, doctests and README examples, in minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long"

test-long: $(VENV)/test.stamp     ## the other tests: large networks, long searches
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long tests

check: $(VENV)/test.stamp         ## lint, format, types of library and tests, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports

wheel-test:                       ## build the wheel, and use it in an environment of its own, without extras
	PYTHON=$(PYTHON) tests/wheel/run

transformers-test: $(VENV)/test.stamp  ## save pruned transformers, and use them in an environment without ispasp
	PYTHON=$(BIN)/python tests/wheel/transformers_run

SECONDS ?= 7200
soak: $(VENV)/test.stamp          ## random networks, faults, files, processes and threads for SECONDS; appends to soak.jsonl
	PYTHONPATH=tests $(BIN)/python -m soak --seconds $(SECONDS) --out soak.jsonl

results: $(VENV)/test.stamp       ## remake what docs/results/ shows; cifar and mobilenet need ISPASP_DATA
	$(BIN)/ispasp reproduce synthetic --out docs/results
	$(call bench,selection,Selection time)
	$(call bench,methods,Selection by every method)
	$(call bench,surgery,Survey and surgery, (torch-pruning where installed))
	$(call bench,prune,Sequential pruning)
	$(call bench,paper,The paper's procedure)
	$(call bench,memory,Memory of one-shot pruning)
	$(call bench,cifar,CIFAR-10 ResNet56)
	$(call bench,mobilenet,MobileNetV2 on ImageNet)

# bench,command,title,remark: a benchmark that fails leaves its page as it was.
define bench
table=$$($(BIN)/ispasp bench $(1)) && printf '# %s\n\nMade by `ispasp bench %s` on 2 CPU cores%s.\n\n```\n%s\n```\n' \
	  "$(2)" "$(1)" "$(3)" "$$table" > docs/results/$(1).md
endef

zoo: $(VENV)/test.stamp           ## prune every network of the zoo and write docs/coverage.md
	$(BIN)/ispasp bench coverage --out docs/coverage.md

CASES ?= 200000
SEED ?= 1000000
fuzz-files: $(VENV)/test.stamp    ## damage every kind of file that is read: CASES cases from SEED on
	PYTHONPATH=tests $(BIN)/python -m support.files_fuzz $(SEED) $(CASES)

mutations: $(VENV)/test.stamp     ## break the library in about a hundred places, and see that the tests notice
	PYTHONPATH=tests $(BIN)/python -m support.mutations --out docs/results/mutations.md

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
	$(PIP) --editable '.[dev,vision,transformers,onnx,gguf]'
	touch $@

clean:                            ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
