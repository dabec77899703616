# Every verb sets up by itself; it needs Python 3.11 or 3.12, git and a network for the first call.
PYTHON ?= $(shell for p in python3.11 python3 python3.12; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1 && { echo $$p; break; }; done)
BIN := .venv/bin
ARGS ?=
# A file's tests stay in one process, so that a model or a wheel is made once.
# Shuffled, but each test draws from seed 0 (tests/conftest.py): a red gate is about the change, whatever the day.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --randomly-dont-reset-seed -n logical --maxprocesses 4 --dist loadfile

.PHONY: help demo test lint nightly setup-demo setup-test clean
.DEFAULT_GOAL := help

help:  ## list the verbs
	@sed -n 's/^\([a-z]*\):.*## /  make \1@/p' Makefile | column -t -s @ 2>/dev/null || sed -n 's/^\([a-z]*\):.*## /  make \1  /p' Makefile

demo: setup-demo  ## generate with most experts out of memory, check that tokens are identical, write a report (ARGS="--help")
	@$(BIN)/moe-prefetch demo $(ARGS)

test: lint  ## lint, then every test that needs neither a GPU nor a night (ARGS="-k planner")
	@$(PYTEST) $(ARGS)

lint: setup-test  ## ruff, mypy on the deciding code, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/lint_imports.py

nightly: lint  ## the long tests too, with coverage
	@$(PYTEST) --nightly --cov --cov-report=term $(ARGS)

setup-demo setup-test: setup-%:
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or 3.12 is needed and none was found (tried python3.11, python3, python3.12). \
	Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@$(PYTHON) scripts/setup_env.py $*

clean:  ## remove build results and caches, not .venv
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage demo-report
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
