# Two commands do everything, set-up included: `make demo` and `make test`.
# PYTHON: an interpreter >= 3.11.  PIP_ARGS: e.g. another index for another build of torch.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
RUN := demo-$(shell date +%m%d-%H%M%S)

.PHONY: help setup demo test test-all test-gpu accept-gpu clean

help:
	@echo "make demo      train the demo on this machine: plan, run, lose a rank, recover, report"
	@echo "make test      every test but the slow ones, with a real multi-node Slurm on this machine"
	@echo "make test-all  every test"
	@echo "make test-gpu  parity, kernels and training over NCCL, where GPUs are present"
	@echo "make accept-gpu  a 1B model on one GPU beside a hand-written loop, killed and resumed (< 8 minutes)"
	@echo "make setup     only the environment in $(VENV)"
	@echo "make clean     remove the environment; runs/ stays"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("orc needs Python >= 3.11; this is %d.%d. Try make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "installing python3-venv"; \
	  apt-get install -qqy python3-venv >/dev/null 2>&1 || { apt-get update -qq && apt-get install -qqy python3-venv >/dev/null; } || \
	  { echo "orc needs python3-venv: as root, apt-get install python3-venv"; exit 1; }; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[test]'
	@touch $@

demo: setup
	$(BIN)/orc plan configs/runs/demo.yaml
	$(BIN)/orc run configs/runs/demo.yaml run=$(RUN)
	$(BIN)/orc status $(RUN)
	$(BIN)/orc report $(RUN)

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-all: setup
	$(BIN)/python -m pytest

test-gpu: setup
	$(BIN)/python -m pytest tests/gpu -rs

accept-gpu: setup
	tests/gpu/acceptance.sh

clean:
	rm -rf $(VENV) *.egg-info
