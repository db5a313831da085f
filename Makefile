# Each target sets up what it needs by itself in .venv and is quick the second time. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROTO := proto/encoder/v1/encoder.proto
PROTO_OUT ?= .
# Files of tests that run side by side, each with one torch thread: several, which wait for each other by spinning, take
# three times the CPU time there.
TEST_JOBS ?= 2

.DEFAULT_GOAL := help
# A pipe fails when any part of it does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.PHONY: help demo serve test test-quick test-long test-fleet fuzz lint types bench bench-peers parity k8s proto lock clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vitfleet needs Python 3.11 or newer: set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV) (torch, Ray, transformers: about 2 GB, a minute or two the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
		-c constraints.txt -e '.[openvino,int8,bulk,bench,dev]' \
		| sed -unE 's/^(Collecting|  Downloading|Installing collected packages:) ([^ ,]+).*/  \1 \2/p'
	@touch $@

demo: $(READY) ## start the service, encode the sample pictures, print what came out, stop
	@$(BIN)/vitfleet demo

serve: $(READY) ## serve the demo model on this machine until Ctrl-C
	@$(BIN)/vitfleet serve

test: lint types ## every check and every test
	@echo "running the tests, $(TEST_JOBS) at a time"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile

test-quick: $(READY) ## the tests that start no Ray
	@$(BIN)/python -m pytest -m "not serve and not long and not fleet"

test-long: $(READY) ## models of real size on the simulated NPU (many minutes)
	@$(BIN)/python -m pytest -m long

test-fleet: $(READY) ## fleets on this machine that lose processes under load (minutes)
	@$(BIN)/python -m pytest -m fleet tests/fleet

fuzz: $(READY) ## hostile pictures and requests for MINUTES=5 (SEED=n repeats a run)
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

lint: $(READY) ## ruff: rules and format
	@echo "checking style"
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY) ## mypy
	@echo "checking types"
	@$(BIN)/mypy

bench: $(READY) ## measure this machine, about 17 minutes on 2 idle cores; writes docs/benchmarks
	@$(BIN)/python -m benchmarks

bench-peers: $(READY) ## the same pictures through vitfleet and its peers (installs them into .cache/peers)
	@$(BIN)/python -m benchmarks --peers

parity: $(READY) ## hold every family against transformers at real size; writes docs/parity.md (long)
	@$(BIN)/python -m tests.parity

k8s: $(READY) ## render every Kubernetes overlay and validate it
	@$(BIN)/python -m k8s.validate

proto: $(READY) ## write the generated code anew from the .proto
	@echo "generating encoder/v1 from $(PROTO)"
	@$(BIN)/python -m grpc_tools.protoc -I proto \
		-I "$$($(BIN)/python -c 'import google.rpc.status_pb2 as s, pathlib; print(pathlib.Path(s.__file__).parents[2])')" \
		--python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) encoder/v1/encoder.proto

lock: ## write constraints.txt anew from what .venv holds
	@$(BIN)/python -m pip freeze --exclude-editable | sed -E 's/^(torch==[0-9.]+)\+.*/\1/' > constraints.txt

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
