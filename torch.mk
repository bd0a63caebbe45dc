# SPDX-License-Identifier: Apache-2.0
# Targets for PyTorch. `make test-torch` builds the operators and tests them with the torch of each line of
# tests/torch/requirements.txt, each in its own virtual environment under build/.  `make test`
# contains test-torch-quick, which uses only the first line.

.PHONY: test-torch test-torch-quick test-torch-adapters
test-torch test-torch-quick:
	@echo "== PyTorch"
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target epic epic_torch example_step
	@EPIC_TORCH_QUICK=$(if $(findstring quick,$@),1) tests/torch/run.sh build

# This target is not a part of `make test`, because Megatron-Core and torchtitan need many packages.
test-torch-adapters:
	@echo "== PyTorch: Megatron-Core, torchtitan, trainers"
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target epic epic_torch
	@tests/torch/adapters.sh build

# This target is not a part of `make test`, because vLLM needs 12 GB of packages.
.PHONY: test-vllm
test-vllm:
	@echo "== vLLM"
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target epic epic_torch
	@$(call BUILD,build) --target epic_mpi >build/vllm-mpi.log 2>&1 || echo "left out: MPI (build/vllm-mpi.log)"
	@tests/vllm/run.sh build

# Targets for a machine with GPUs. They use the torch of GPU_PYTHON (python3).  If EPIC_LIBRARY_PATH is set, the
# libraries of that folder are tested and nothing is built.
.PHONY: gpu-build-torch gpu-test-torch gpu-test-torch-trainers gpu-bench-torch
GPU_TORCH_OUT = build/gpu-torch
GPU_TORCH_LIB = $(or $(EPIC_LIBRARY_PATH),$(abspath $(GPU_TORCH_OUT)/lib))
GPU_TORCH = EPIC_LIBRARY_PATH=$(GPU_TORCH_LIB) PYTHONPATH=bindings/python

gpu-build-torch:
ifeq ($(EPIC_LIBRARY_PATH),)
	@$(call CMAKE,Release,$(GPU_TORCH_OUT),-DEPIC_MPI=OFF -DEPIC_TESTS=OFF \
	    -DEPIC_CUDA_ARCHITECTURES=90a-real)
	@$(call GPU_NEEDED,$(GPU_TORCH_OUT))
	@$(call BUILD,$(GPU_TORCH_OUT)) --target epic epic_cuda epic_cuda_regroup epic_torch
endif

gpu-test-torch: gpu-here gpu-build-torch
	@$(GPU_TORCH) GPU_PYTHON=$(GPU_PYTHON) tests/torch/gpu/run.sh

# Trains with the examples for recipe, torchtitan, transformers, Megatron-Core and TRL.
gpu-test-torch-trainers: gpu-here gpu-build-torch
	@$(GPU_TORCH) timeout -k 5 570 $(GPU_PYTHON) -W ignore tests/torch/gpu/trainers.py

gpu-bench-torch: gpu-idle gpu-build-torch
	@$(GPU_TORCH) timeout -k 5 60 $(GPU_PYTHON) -W ignore bench/torch_host.py
	@$(GPU_TORCH) timeout -k 5 230 $(GPU_PYTHON) -W ignore bench/torch_bench.py --tokens 128 1024 4096 \
	    --cuda-graph --layers 7168,256,8,2048 7168,16,8,2048 2880,128,4,2880 2048,128,8,768
