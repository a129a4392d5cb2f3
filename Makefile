SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup services demo test test-harnesses chaos lint bench clean

PYTHON ?= python3
EXTRAS := gateway,processor,sink,trainer,registry,embedded,dev
BIN := .venv/bin
READY := .venv/.ready
MINUTES ?= 30
SEED ?= 1
WORKERS ?= 3

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 16

setup: $(READY)  ## make .venv with everything in it (once; again when the pins change)

demo: $(READY)  ## run the flight desk: agents, gateway, Kafka, ClickHouse and a training loop on this machine
	$(BIN)/python -m examples.flight_desk.run

services: $(READY)  ## put what tests run against into build/: Apache Kafka, a registry, an S3 server and vLLM's CPU build
	$(BIN)/python -m tests.services

test: services  ## run every test, in WORKERS processes at once (3: most tests wait most of the time)
	$(BIN)/python -m pytest -n $(WORKERS)

test-harnesses: $(READY)  ## let Codex and Claude Code, from npm, play scripted tasks through the gateway, and audit what is recorded
	$(BIN)/python -m pytest -o timeout=900 tests/harnesses

chaos: $(READY)  ## kill, freeze and cut off everything under load, then look for what is lost, doubled or wrong (MINUTES=30 SEED=1)
	$(BIN)/python -m chaos.run --minutes $(MINUTES) --seed $(SEED)

lint: $(READY)  ## check style, types, schemas and the Helm chart
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/rollstream schemas check
	$(BIN)/python -m pytest -q -p no:randomly tests/contract/test_helm.py

bench: $(READY)  ## measure and print tables; writes JSON into out/benchmarks
	for file in benchmarks/bench_*.py; do $(BIN)/python -m "benchmarks.$$(basename "$$file" .py)"; done

clean:  ## remove what the other targets made, the services in build/ too; .venv stays
	rm -rf out build dist *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rollstream needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); try: make setup PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt uv
	VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@
