# Every target sets up .venv by itself when it is missing or older than pyproject.toml or constraints.txt.
PYTHON ?= python3.11
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test fuzz soak bench reproduce lint docs wheel versions release clean

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

# Odd arguments by the thousand, faults, hostile files and 100,000 steps: tests/reliability at length.
soak: .venv/dev.stamp
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -n 2 --dist worksteal tests/reliability

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks.compile_time
	$(BIN)/python -m benchmarks.curvature
	$(BIN)/python -m benchmarks.step_cost
	$(if $(SADDLEFREE_DATA),$(BIN)/python -m benchmarks.accuracy)

reproduce: .venv/dev.stamp
	$(BIN)/saddlefree reproduce

docs: .venv/docs.stamp
	$(BIN)/mkdocs build --strict

# A wheel and a source distribution; the wheel is tried in an environment of its own, without any extra.
wheel: .venv/release.stamp
	rm -rf dist .venv/wheel
	$(BIN)/python -m build
	$(PYTHON) -m venv .venv/wheel
	.venv/wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	.venv/wheel/bin/python -I release/smoke.py README.md

# Both ends of the range of jax and optax in pyproject.toml, on the lowest and on a recent Python.
NEWEST ?= python3.13
versions:
	$(PYTHON) release/versions.py --lowest $(PYTHON) --highest $(NEWEST)

# Builds, tries and publishes the version of a tagged, clean checkout. Twine asks for the registry's token, or takes
# TWINE_USERNAME and TWINE_PASSWORD.
release: wheel
	test -z "$$(git status --porcelain)"
	test "$$(git describe --tags --exact-match)" = "v$$($(BIN)/python -c 'import saddlefree; print(saddlefree.__version__)')"
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m twine upload dist/*

clean:
	rm -rf .venv dist site

.venv/dev.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) --editable '.[dev,lab,tune,peers]'
	touch $@

.venv/docs.stamp: .venv/dev.stamp
	$(INSTALL) --editable '.[docs]'
	touch $@

.venv/release.stamp: .venv/dev.stamp
	$(INSTALL) --editable '.[release]'
	touch $@
