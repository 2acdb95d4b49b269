# make demo | check | test | smoke | lint | docs | bench | gpu-check | gpu-tune | cuda-check | wheels: each sets up what it
# needs, once, in $(VENV) and next to the sources.
#
#   PYTHON=python3.13              the interpreter to make the environment from
#   TORCH=2.11.0 VENV=.venv-2.11   another torch, in an environment of its own
#   TP_EXT_CUDA=0|1|auto           CUDA kernels; default: only where there is a GPU
#   TORCHES='2.11.0 2.15.0' PYTHONS='python3.11 python3.13'  those of make wheels and make wheels-check
#   PYTEST_ARGS='-k linear'  WORKERS=2 (processes that run tests)  BENCH_ARGS=--full  BENCH_OUT=benchmarks/results  GPU_CHECK_ARGS='--stages graphs'  PART=2 (of gpu-check)  BASE=main (of test-changed)

PYTHON ?= python3
TORCH ?= 2.15.0
VENV ?= .venv
TORCHES ?= 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
PYTHONS ?= python3.11 python3.12 python3.13
PYTEST_ARGS ?=
WORKERS ?= 2# 3 are no faster on two cores. 0 runs the tests in pytest itself, for a debugger
BENCH_ARGS ?=
GPU_CHECK_ARGS ?=
GPU_TUNE_ARGS ?=
PART ?= 1
BASE ?= main
BENCH_OUT ?= runs/bench

GPU_ARCHS := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && \
	nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sort -u | paste -sd';')
TP_EXT_CUDA ?= $(if $(GPU_ARCHS),auto,0)
TORCH_CUDA_ARCH_LIST ?= $(GPU_ARCHS)
GLOO_SOCKET_IFNAME ?= lo# ranks on one machine need no resolvable host name
export TP_EXT_CUDA TORCH_CUDA_ARCH_LIST GLOO_SOCKET_IFNAME

BIN := $(abspath $(VENV))/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export PATH := $(BIN):$(PATH)

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
COMMAND_LINE := ^(\[[0-9]+/[0-9]+\]) .* -c \S*/((csrc|build/units)/\S+) .*# by ninja: a file of a successful step

BUILT := tp_ext/_built_for.py
BUILD_CONFIG := $(BIN) TORCH=$(TORCH) TP_EXT_CUDA=$(TP_EXT_CUDA) ARCHS=$(TORCH_CUDA_ARCH_LIST)
SOURCES := setup.py $(shell find csrc tp_ext/include)# with the folders: they change when a file comes or goes
CXX_FILES := $(shell find csrc tp_ext/include examples/cpp tests/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo demo-3d check test test-changed test-all smoke lint docs bench gpu-check gpu-tune cuda-check wheels wheels-check build clean FORCE

help:
	@echo 'make demo    trains a small GPT with tensor parallelism on this machine'
	@echo 'make demo-3d  trains it on three meshes of 8 ranks, all axes, and on one rank'
	@echo 'make check   lint, and the core tests of simulated ranks: three minutes'
	@echo 'make test    runs the tests (PYTEST_ARGS="-k linear" for some of them)'
	@echo 'make test-changed  runs, for a minute, those that the changes since $(BASE) reach, nearest first'
	@echo 'make test-all  runs them in all cases, where make test thins large grids'
	@echo 'make smoke   shows in two minutes that the installation works'
	@echo 'make lint    checks format, style and types'
	@echo 'make docs    builds the documentation as a site, build/docs/index.html, and checks its links'
	@echo 'make bench   runs every benchmark, tables and plots to $(BENCH_OUT) (BENCH_ARGS=--full takes longer)'
	@echo 'make gpu-check  builds, tests what is new and times everything on a GPU in 7 minutes, results to runs/gpu_check;'
	@echo '             PART=2: all other tests, 7 minutes, runs/gpu_check_2'
	@echo 'make gpu-tune  times every launch of the kernels on a GPU in 6 minutes, writes csrc/kernels/launch_table.inc; then: make build'
	@echo 'make cuda-check  compiles every CUDA kernel for several GPUs, prints its registers, fails on a spill'
	@echo 'make wheels  builds a wheel for each of PYTHONS with a library for each of TORCHES, to dist/; make wheels-check tries them'
	@echo 'make build   only compiles; the other targets do it when a source has changed'
	@echo 'make clean   removes what was built; the environment $(VENV) stays'
	@echo 'Options: PYTHON=$(PYTHON) TORCH=$(TORCH) VENV=$(VENV) TP_EXT_CUDA=$(TP_EXT_CUDA)'

demo: $(BUILT) $(STAMPS)/demo
	$(BIN)/python examples/demo.py

demo-3d: $(BUILT) $(STAMPS)/demo
	$(BIN)/python examples/demo.py --all-axes --out runs/demo_3d

# A worker takes a file at a time: its tests share what they compile and the ranks that they start. More threads and
# processes than cores: those that wait must not spin. Many processes import the same modules: let them share bytecode.
PYTEST := OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(strip $(WORKERS)) --dist loadfile --no-loadscope-reorder

check: $(BUILT) $(STAMPS)/test lint
	$(PYTEST) -m 'core and simulated' $(PYTEST_ARGS)

test: $(BUILT) $(STAMPS)/test
	$(PYTEST) $(PYTEST_ARGS)

test-changed: $(BUILT) $(STAMPS)/test
	@files=$$($(BIN)/python -m tests.changed --base $(BASE) --workers $(WORKERS)) || exit 1; \
		[ -z "$$files" ] || $(PYTEST) $$files $(PYTEST_ARGS)

test-all: $(BUILT) $(STAMPS)/test
	$(PYTEST) --exhaustive $(PYTEST_ARGS)

smoke: $(BUILT) $(STAMPS)/test
	@$(BIN)/python -m pytest -q -m smoke || { echo 'smoke: FAILED, tp_ext does not work here'; exit 1; }
	@echo 'smoke: tp_ext works here: build, linears at p = 1, 2, 4, loss, checkpoint, shared memory'

lint: $(STAMPS)/torch-$(TORCH) $(STAMPS)/lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/python -m mypy

# Reads the sources and needs no build. The notice that it hides: docs/develop/design.md, "Documentation"
docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'The site is build/docs/index.html; python3 -m http.server -d build/docs serves it, the search included'

bench: $(BUILT) $(STAMPS)/bench
	@for script in benchmarks/*/bench_*.py; do echo "== $$script"; module=$${script%.py}; \
		$(BIN)/python -m $${module//\//.} --csv $(BENCH_OUT) $(BENCH_ARGS) || exit 1; done
	$(BIN)/python -m benchmarks.cpu_results $(BENCH_OUT)

# It builds by itself, for the GPU that is there
gpu-check: $(STAMPS)/torch-$(TORCH) $(STAMPS)/test
	$(BIN)/python -m benchmarks.gpu.check --part $(PART) $(GPU_CHECK_ARGS)

gpu-tune: $(BUILT) $(STAMPS)/test
	$(BIN)/python -m benchmarks.gpu.tune $(GPU_TUNE_ARGS)

cuda-check:
	@$(PYTHON) -m tests.machine_code.check

# Resumable: torches, objects and environments that are there are not made again
wheels: $(STAMPS)/torch-$(TORCH) $(STAMPS)/wheels
	@echo 'Each of torch $(TORCHES) is downloaded once, 0.5 GB each, without the libraries of CUDA'
	$(BIN)/python release/build_wheels.py --torches $(TORCHES) --pythons $(PYTHONS)

wheels-check: $(BUILT)
	@echo 'Each of torch $(TORCHES) is downloaded for each of $(PYTHONS), 0.5 GB each'
	$(BIN)/python release/check_wheels.py --torches $(TORCHES) --pythons $(PYTHONS) $(WHEELS_CHECK_ARGS)

build: $(BUILT)

clean:
	rm -rf build dist tp_ext.egg-info $(BUILT) tp_ext/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# The note gets the time at which the build began, so that an edit made meanwhile counts as newer.
$(BUILT): build/config $(SOURCES) $(STAMPS)/torch-$(TORCH)
	@touch build/began
	@echo "Compiling tp_ext for torch $(TORCH), TP_EXT_CUDA=$(TP_EXT_CUDA) ..."
	@$(BIN)/python setup.py --quiet build_ext --inplace 2>&1 | sed -uE 's~$(COMMAND_LINE)~\1 \2~'
	@touch -r build/began $@

build/config: FORCE
	@mkdir -p build
	@echo '$(BUILD_CONFIG)' | cmp -s - $@ || echo '$(BUILD_CONFIG)' > $@

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo 'tp_ext needs Python 3.11 to 3.13: choose one with make PYTHON=python3.13'; exit 1; }
	$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || \
		{ echo 'python3 has neither venv nor virtualenv: install python3-venv'; exit 1; }
	@mkdir -p $(STAMPS)
	@$(BIN)/python -c 'import sysconfig; \
		open(sysconfig.get_path("purelib") + "/tp_ext-source.pth", "w").write("$(CURDIR)\n")'
	@touch $@

$(STAMPS)/torch-$(TORCH): requirements/build.txt | $(STAMPS)/venv
	@echo 'Installing torch $(TORCH) into $(VENV); with its CUDA libraries, which the package index adds on every machine,'
	@echo 'it is a download of 3 GB and takes 5.4 GB of disk. A build of torch for the CPU alone that is in $(VENV) is kept'
	$(PIP) torch==$(TORCH) -r requirements/build.txt
	@rm -f $(STAMPS)/torch-*
	@touch $@

$(STAMPS)/test: requirements/bench.txt # included
$(STAMPS)/test $(STAMPS)/bench: requirements/demo.txt # likewise

$(STAMPS)/%: requirements/%.txt | $(STAMPS)/venv
	$(PIP) -r requirements/$*.txt
	@touch $@

FORCE:
