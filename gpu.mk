# SPDX-License-Identifier: Apache-2.0
# GPU tests and benchmarks, on a machine with nvcc and GPUs:  make gpu-test, make gpu-bench.  CMake
# builds them (tests/gpu, bench/gpu) with the kernels of libepic_cuda.so, for the GPUs in the machine.
GPU_OUT = build/gpu
HOSTS_OUT = $(GPU_OUT)/hosts
GPU_PYTHON ?= python3
# Ends with an error if the build of a folder has found no nvcc.
GPU_NEEDED = grep -qs '^CMAKE_CUDA_COMPILER:[A-Z]*=/' $(1)/CMakeCache.txt || \
    { echo "there is no nvcc (NVIDIA's CUDA toolkit; its bin in PATH)" >&2; exit 1; }
HOSTS_BUILT = grep -qs 'epic_hosts\.dir' build/CMakeFiles/TargetDirectories.txt
HOSTS_LEFT_OUT = "left out: no libepic_hosts.so; install UCX (Debian: libucx-dev), or" \
    "cmake -S . -B build -DEPIC_HOSTS=ALWAYS, then again"

# The first step of the targets below. Users do not need to call it.
gpu-configure: setup-build
	@$(call CMAKE,Release,build)
	@$(call GPU_NEEDED,build)

gpu-build: gpu-configure
	@$(call BUILD,build) --target gpu_tests gpu_benchmarks

gpu-test: gpu-here gpu-configure
	@$(call BUILD,build) --target gpu_tests
	@GPU_OUT=$(GPU_OUT) tests/gpu/run.sh

# Fails if there is no GPU. Building for GPUs takes minutes, so the tests look for one first.
gpu-here:
	@nvidia-smi -L >/dev/null 2>&1 || { echo "there is no GPU (nvidia-smi -L lists none)" >&2; exit 1; }

# Fails if there is no GPU, or if another process uses one.
gpu-idle:
	@bench/gpu/idle.sh

gpu-bench: gpu-idle gpu-configure
	@$(call BUILD,build) --target gpu_benchmarks
	@GPU_OUT=$(GPU_OUT) bench/gpu/run.sh

# Runs everything that shows whether EPIC works on this machine, and how fast: tests, bindings, hosts,
# benchmarks and one table, in parts of at most ten minutes. GPU_PARTS selects some parts.
gpu-all: gpu-here gpu-build gpu-build-hosts $(if $(filter-out tests hosts table,$(or $(GPU_PARTS),all)), \
    gpu-build-torch) $(if $(filter all bindings,$(or $(GPU_PARTS),all)),gpu-build-jax)
	@GPU_PYTHON=$(GPU_PYTHON) tests/gpu/all.sh $(GPU_PARTS)

# Includes JAX and PyTorch if GPU_PYTHON has them and gpu-build-jax and gpu-build-torch have run.
gpu-bench-layer: gpu-idle gpu-configure
	@$(call BUILD,build) --target gpu_benchmarks
	@$(GPU_PYTHON) bench/gpu/layer_bars.py $(GPU_OUT)

# Compares this tree with an earlier version. Both run in turn. First run `git worktree add build/before
# COMMIT`.  ROUNDS, LIMIT (percent) and CASE are arguments of bench/gpu/compare.py.
BEFORE ?= build/before
gpu-bench-compare: gpu-idle $(GPU_OUT)/gpu_bench
	@$(MAKE) -C $(BEFORE) $(GPU_OUT)/gpu_bench
	@$(GPU_PYTHON) bench/gpu/compare.py $(BEFORE)/$(GPU_OUT)/gpu_bench $(GPU_OUT)/gpu_bench \
	    --rounds $(or $(ROUNDS),3) --limit $(or $(LIMIT),1) $(CASE)

# Builds one program.
$(GPU_OUT)/%: gpu-configure
	@$(call BUILD,build) --target epic_cuda $(if $(findstring regroup,$@),epic_cuda_regroup) cuda_$(notdir $@)

# Targets of the backend hosts. The ranks of this machine act as hosts.
gpu-build-hosts: gpu-configure
	@if $(HOSTS_BUILT); then $(call BUILD,build) --target gpu_hosts; else echo $(HOSTS_LEFT_OUT); fi
gpu-test-hosts: gpu-here gpu-build-hosts
	@! $(HOSTS_BUILT) || HOSTS_OUT=$(HOSTS_OUT) tests/gpu/hosts.sh
gpu-bench-hosts: gpu-idle gpu-build-hosts
	@! $(HOSTS_BUILT) || HOSTS_OUT=$(HOSTS_OUT) bench/gpu/hosts.sh

# A part of `make test`: compiles the kernels and the benchmarks and fails on a warning.
test-nvcc:
	@echo "== nvcc"
	@if command -v nvcc >/dev/null; then \
	    { $(call CMAKE,Release,build); } && $(call BUILD,build) --target epic_cuda_checked \
	        epic_gpu_bench_checked gpu_callers && \
	    echo "left out: machine code of the CUDA kernels (make, make gpu-build)"; fi

.PHONY: gpu-configure gpu-here gpu-idle gpu-all gpu-build gpu-test gpu-bench gpu-bench-layer \
    gpu-bench-compare gpu-build-hosts gpu-test-hosts gpu-bench-hosts test-nvcc
