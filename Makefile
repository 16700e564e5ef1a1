# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do their own set-up; a second run starts at once.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
TESTS_STAMP := $(VENV)/.tests-stamp
SETUP_INPUTS := pyproject.toml requirements/cpu.lock requirements/overrides.txt \
	tools/setup.sh tools/need_packages.sh tools/vllm_cpu_shim.py CMakeLists.txt \
	$(wildcard vllm_nvmeof_offload/native/*/*.cpp vllm_nvmeof_offload/native/*/*.h \
	vllm_nvmeof_offload/native/*/*.def)
PYTEST_ARGS ?= --durations=15
# So many test files of servers run side by side, and one more where tests wait now and then; 0: one
# after the other, in one process.
JOBS ?= 2
SIDE_BY_SIDE = -n $(JOBS) --dist loadscope
ONE_MORE = -n $(if $(filter 0,$(JOBS)),0,$$(($(JOBS) + 1))) --dist loadscope
OF_PART = $(if $(PART),--part $(PART))
SOAK_SECONDS ?= 14400
# STEPS=10000000: so many simulator steps instead of half of the time. SANITIZE=1: over a build of
# index and machine with sanitizers, which takes about three times as long.
STEPS ?=
SANITIZE ?=
SIM_LENGTH = $(if $(STEPS),--steps $(STEPS),--seconds $$(($(SOAK_SECONDS) / 2)))

# What `make check` gives to clang-tidy: the core's C++, and where its headers are.
NATIVE := vllm_nvmeof_offload/native
SYSTEM_HEADERS := import nanobind, sysconfig; \
	print("-isystem", nanobind.include_dir(), "-isystem", sysconfig.get_path("include"))

# The virtual environment holds the CPU build of vLLM. Nothing here talks to a model hub, and
# nothing sends usage reports.
export VLLM_TARGET_DEVICE := cpu
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Each process of a suite would compile every test again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-dual test test-all test-rest test-fast test-fabric test-e2e \
	suite-fast suite-alone suite-fabric suite-clocks suite-e2e soak vllm-next bench results gpu wheel check format lock clean distclean
.DEFAULT_GOAL := help
# Set-up comes before everything, and suites run one after the other, under `make -j` too.
.NOTPARALLEL:

help:
	@echo "make demo       the main job on this machine: model, server, cache, restart, preemption"
	@echo "make demo-dual  two servers behind slow links: a crowd returns over one of them, and over both"
	@echo "make test       the gate: what is quick of the unit, contract, simulator and fault tests, three"
	@echo "                scenarios on the emulated fabric, wrong tokens end to end on real vLLM;"
	@echo "                goes on after a suite that fails, and names those that did at the end"
	@echo "make test-all   every test; make test-rest: those that make test leaves out"
	@echo "make test-fast  every test but end to end and the emulated fabric"
	@echo "make test-fabric the pool on a real NVMe/TCP fabric in an emulated guest, whose paths fail"
	@echo "make soak       the longest tests, then both simulators with fresh seeds for SOAK_SECONDS (4 hours)"
	@echo "                or STEPS of the first; SANITIZE=1: over a build with sanitizers"
	@echo "make vllm-next  the newest vLLM of the package index: its own tests with our connector, and"
	@echo "                what differs in the interfaces that we use (VLLM_NEXT=0.34.1: that one)"
	@echo "make bench      the pool beside fio, a bare ring and vLLM's own file tier"
	@echo "make results    whole servers beside vLLM's tiering, into bench/results/ (35 min)"
	@echo "make gpu        on a machine with an NVIDIA GPU: its tests and benchmarks, in stages (GPU_STAGES)"
	@echo "make wheel      dist/: manylinux wheels with the native core and the kernels, and the sdist"
	@echo "make check      ruff, clang-format, clang-tidy and mypy"
	@echo "make setup      only the virtual environment in $(VENV)/"
	@echo "make format     ruff's fixes and formatting"
	@echo "make lock       resolve requirements/cpu.lock anew"
	@echo "make clean      build products and caches; distclean also removes $(VENV)/"

setup: $(TESTS_STAMP)

$(STAMP): $(SETUP_INPUTS)
	@PYTHON="$(PYTHON)" bash tools/setup.sh "$(VENV)"
	@touch $@

# A second build of the index and the machine, which only tests load.
$(TESTS_STAMP): $(STAMP)
	@VIRTUAL_ENV="$(VENV)" flock build/setup.lock $(BIN)/uv --quiet pip install --no-deps \
		--no-build-isolation --config-settings cmake.define.NVMEOF_MUTANTS=ON --editable .
	@touch $@

demo: $(STAMP)
	@$(BIN)/vllm-nvmeof demo

# All suites run, also behind one that fails; the last lines name those that failed.
# `exec`: a signal that make passes on reaches the suite, not a shell around it.
SUITES = $(BIN)/python tools/suites.py "$(MAKE)"

# Takes some four minutes: two servers on one pool, the second of which is killed again and again.
demo-dual: $(STAMP)
	@$(BIN)/python -m vllm_nvmeof_bench.demo.dual --json build/demo-dual.json

# tests/gate.py says what the gate has.
test: export PART := gate
test-rest: export PART := rest
test test-rest test-all: setup
	+@exec $(SUITES) fast clocks e2e

test-fast: setup
	+@exec $(SUITES) fast alone

# build/fabric-report.md has the time line of every scenario.
test-fabric: setup suite-fabric

test-e2e: setup suite-e2e

# The longest files come first, so that all processes end together.
suite-fast:
	exec $(BIN)/python -m pytest tests/native tests/sim tests/faults tests/contract tests/gpu tests/unit \
		-m "not soak and not alone" $(ONE_MORE) --no-loadscope-reorder $(OF_PART) $(PYTEST_ARGS)

suite-alone:
	exec $(BIN)/python -m pytest tests/faults -m "alone and not soak" $(ONE_MORE) $(PYTEST_ARGS)

# In one process: the guest emulates a machine whose clock its scenarios watch.
suite-fabric:
	exec $(BIN)/python -m pytest tests/fabric $(PYTEST_ARGS)

# Both at once: the guest keeps one core busy, and the others mostly wait.
suite-clocks:
	exec $(BIN)/python -m pytest tests/fabric tests/faults -m "(alone or fabric) and not soak" \
		$(ONE_MORE) --no-loadscope-reorder $(OF_PART) $(PYTEST_ARGS)

suite-e2e:
	exec $(BIN)/python -m pytest tests/e2e $(SIDE_BY_SIDE) $(OF_PART) $(PYTEST_ARGS)

# Replay a failing seed with: .venv/bin/python -m tests.sim --seed N, or -m tests.faults.store
soak: setup
	$(BIN)/python -m pytest tests -m soak $(PYTEST_ARGS)
	$(BIN)/python -m tests.sim $(SIM_LENGTH) --keep-going $(if $(SANITIZE),--sanitize)
	$(BIN)/python -m tests.faults.store --seconds $$(($(SOAK_SECONDS) / 2)) --keep-going

# Status 1: the release is refused, or a test fails. docs/extending.md has a scheduled run.
VLLM_NEXT ?=
vllm-next: setup
	exec $(BIN)/python -m tests.upstream.next $(VLLM_NEXT)

# Figures: the pool beside fio, a bare ring and vLLM's own file tier; a table and JSON.
bench: setup
	@bash tools/bench_setup.sh
	$(BIN)/vllm-nvmeof bench pool --json build/bench/pool.json

# bench/results/README.md says what each file is.
results: setup
	@bash tools/results.sh

# No set-up of vLLM's CPU build: GPU_PYTHON is a Python with torch and the extra [cuda], and, for
# the stages with an engine, with a vLLM for GPUs. GPU_STAGES: names, each with its limit if wanted
# (smoke:60 copies+tokens: two side by side); all stages by default. GPU_SERVER_ARGS: more
# arguments of the servers of ttft and stall.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_STAGES ?=
gpu:
	@"$(GPU_PYTHON)" tools/gpu.py $(GPU_STAGES)

# For each Python in PATH that vLLM supports; PYTHONS="3.12 /path/to/python": for these.
wheel: setup
	@bash tools/wheel.sh $(VENV)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.c' '*.cu')
	git ls-files '$(NATIVE)/*.cpp' | xargs -P 2 -I {} $(BIN)/clang-tidy --quiet {} -- \
		-std=c++20 -I $(NATIVE) $$($(BIN)/python -c '$(SYSTEM_HEADERS)')
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.c' '*.cu')

lock:
	$(BIN)/uv pip compile requirements/cpu.in pyproject.toml --extra dev --extra bench \
		--override requirements/overrides.txt --python-version 3.11 --upgrade \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links \
		--output-file requirements/cpu.lock --quiet

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
