# Every target sets up .venv by itself when it is missing or older than pyproject.toml or constraints.txt.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test fuzz bench reproduce lint docs clean

demo: .venv/dev.stamp
	rm -rf runs/demo
	$(BIN)/saddlefree demo --out runs/demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# All pairs of solver and rule; then every property on examples at random, ten times as many, compiled as users compile.
PAIRS := tests/test_acceptance.py tests/test_hosts.py
fuzz: .venv/dev.stamp
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -n 2 --dist worksteal $(PAIRS)
	HYPOTHESIS_PROFILE=fuzz SADDLEFREE_OPTIMISED=1 $(BIN)/python -m pytest -n 2 --dist worksteal \
		--hypothesis-show-statistics tests --ignore tests/lab $(addprefix --ignore ,$(PAIRS))

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks.compile_time
	$(BIN)/python -m benchmarks.curvature
	$(BIN)/python -m benchmarks.step_cost
	$(if $(SADDLEFREE_DATA),$(BIN)/python -m benchmarks.accuracy)

reproduce: .venv/dev.stamp
	$(BIN)/saddlefree reproduce

docs: .venv/docs.stamp
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site

.venv/dev.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) --editable '.[dev,lab,tune,peers]'
	touch $@

.venv/docs.stamp: .venv/dev.stamp
	$(INSTALL) --editable '.[docs]'
	touch $@
