# SPDX-License-Identifier: Apache-2.0
# Targets for JAX. `make test-jax` builds the handlers and tests them with each Python of tests/jax/run.sh that this
# machine has, each in its own virtual environment under build/.  The first Python also tests the
# wheel and runs ruff and mypy.  `make test` contains test-jax-quick, which uses only the first Python.

.PHONY: test-jax test-jax-quick test-jax-maxtext

test-jax test-jax-quick:
	@echo "== JAX"
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target epic
	@EPIC_JAX_QUICK=$(if $(findstring quick,$@),1) tests/jax/run.sh build

# Trains a tiny model with MaxText.  It is not a part of `make test`, because MaxText needs many
# packages.
test-jax-maxtext:
	@echo "== JAX: MaxText"
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target epic
	@tests/jax/maxtext.sh build

# Targets for a machine with GPUs. They use the JAX of GPU_PYTHON, and build the libraries for Hopper
# only.
.PHONY: gpu-build-jax gpu-test-jax gpu-bench-jax
GPU_PYTHON ?= python3
GPU_JAX_OUT = build/gpu-jax
GPU_JAX = EPIC_LIBRARY_PATH=$(abspath $(GPU_JAX_OUT)/lib) PYTHONPATH=bindings/python \
	JAX_PLATFORMS=cuda,cpu

gpu-build-jax:
	@$(GPU_PYTHON) -c 'import jax' 2>/dev/null || \
	    { echo "$(GPU_PYTHON) cannot import jax: set GPU_PYTHON to a Python that can" >&2; exit 1; }
	@$(call CMAKE,Release,$(GPU_JAX_OUT),-DEPIC_MPI=OFF -DEPIC_TESTS=OFF \
	    -DEPIC_CUDA_ARCHITECTURES=90a-real)
	@$(call GPU_NEEDED,$(GPU_JAX_OUT))
	@$(call BUILD,$(GPU_JAX_OUT)) --target epic epic_cuda epic_cuda_regroup
	@$(call CMAKE,Release,$(GPU_JAX_OUT)/jax,-S bindings/jax \
	    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(abspath $(GPU_JAX_OUT)/lib) \
	    -DEPIC_LIBRARY=$(abspath $(GPU_JAX_OUT)/lib/libepic.so) \
	    -DEPIC_JAX_INCLUDE="$$($(GPU_PYTHON) -c 'import jax; print(jax.ffi.include_dir())')")
	@$(call BUILD,$(GPU_JAX_OUT)/jax)

gpu-test-jax: gpu-here gpu-build-jax
	@EPIC_LIBRARY_PATH=$(abspath $(GPU_JAX_OUT)/lib) GPU_PYTHON=$(GPU_PYTHON) tests/jax/gpu/run.sh

gpu-bench-jax: gpu-idle gpu-build-jax $(GPU_OUT)/gpu_moe
	@for what in "layer --c $(GPU_OUT)/gpu_moe" steps overlap host soak gemm; do \
	    $(GPU_JAX) timeout -k 5 600 $(GPU_PYTHON) bench/gpu_jax.py $$what || exit 1; done
	@$(GPU_JAX) timeout -k 5 600 $(GPU_PYTHON) bench/jax_bench.py --platform cuda --dtype bfloat16 \
	    --devices $$(nvidia-smi -L | grep -c "^GPU") --tokens 2048 --hidden 2048 --inner 768 --experts 64 --top-k 8
