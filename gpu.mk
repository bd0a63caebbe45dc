# SPDX-License-Identifier: Apache-2.0
# GPU tests and benchmarks, on a machine with nvcc and GPUs:  make gpu-test, make gpu-bench.
# They are built straight from the sources, for the GPU in the machine alone (GPU_ARCH).
NVCC ?= nvcc
GPU_CC ?= gcc
GPU_ARCH ?= -gencode arch=compute_90a,code=sm_90a
GPU_OUT ?= build/gpu
GPU_INCLUDES = -Iinclude -Isrc -Ikernels -Itests/gpu -Itests
GPU_CUDA ?= $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v $(NVCC))))
GPU_CFLAGS = -std=c11 -O2 -Wall -Wextra -Wpedantic -Werror -ffp-contract=off -D_GNU_SOURCE \
	-mfma -fopenmp $(GPU_INCLUDES) -isystem $(GPU_CUDA)/include
GPU_NVFLAGS = -std=c++17 -O3 $(GPU_INCLUDES) -Werror all-warnings -Xcompiler -Wall,-Wextra \
	$(GPU_ARCH)

GPU_HELPERS = team oracle case case_check case_draw product router_draw
GPU_KERNELS = $(patsubst kernels/cuda/%.cu,$(GPU_OUT)/%.o,$(wildcard kernels/cuda/*.cu))
GPU_HOST = $(patsubst src/backend/p2p/%.c,$(GPU_OUT)/%.o,$(wildcard src/backend/p2p/*.c)) \
	$(GPU_OUT)/error.o $(GPU_OUT)/process.o $(GPU_HELPERS:%=$(GPU_OUT)/%.o)
GPU_PROGRAMS = $(patsubst tests/gpu/%.c,$(GPU_OUT)/gpu_%, \
	$(filter-out $(GPU_HELPERS:%=tests/gpu/%.c),$(wildcard tests/gpu/*.c))) \
	$(patsubst bench/gpu/%.cu,$(GPU_OUT)/gpu_%,$(filter-out %/wire.cu,$(wildcard bench/gpu/*.cu)))
GPU_HEADERS = $(wildcard kernels/cuda/*.h kernels/cuda/*.cuh src/backend/*.h src/backend/p2p/*.h \
	src/base/*.h src/rules/*.h kernels/host/*.h src/plan/*.h src/router/*.h tests/gpu/*.h include/epic/epic.h include/epic/epic_abi.h)

gpu-build: $(GPU_PROGRAMS)

# A part of `make test`: what nvcc says of the kernels.  Optimizing and machine code take minutes, and
# are for who has a GPU.
NVCC_OUT = build/nvcc
NVCC_FLAGS = $(filter-out $(GPU_ARCH),$(GPU_NVFLAGS)) -gencode arch=compute_90a,code=compute_90a -Xcicc -O0
nvcc-build: $(patsubst kernels/cuda/%.cu,$(NVCC_OUT)/%.o,$(wildcard kernels/cuda/*.cu))
$(NVCC_OUT)/%.o: kernels/cuda/%.cu $(GPU_HEADERS)
	@mkdir -p $(@D)
	@$(NVCC) $(NVCC_FLAGS) -c $< -o $@
$(NVCC_OUT)/router_%.o: NVCC_FLAGS += -fmad=false -DEPIC_NO_FMAD
test-nvcc:
	@echo "== nvcc"
	@if command -v $(NVCC) >/dev/null; then $(MAKE) -s -f gpu.mk -j $(JOBS) nvcc-build && \
	    echo "left out: machine code of the CUDA kernels (make, make gpu-build)"; fi

$(GPU_OUT)/%.o: kernels/cuda/%.cu $(GPU_HEADERS)
	@mkdir -p $(GPU_OUT)
	$(NVCC) $(GPU_NVFLAGS) -c $< -o $@
$(GPU_OUT)/router_%.o: GPU_NVFLAGS += -fmad=false -DEPIC_NO_FMAD # the host's bits
$(GPU_OUT)/%.o: src/backend/p2p/%.c $(GPU_HEADERS)
	@mkdir -p $(GPU_OUT)
	$(GPU_CC) $(GPU_CFLAGS) -c $< -o $@
$(GPU_OUT)/error.o $(GPU_OUT)/process.o: $(GPU_OUT)/%.o: src/base/%.c $(GPU_HEADERS)
	@mkdir -p $(GPU_OUT)
	$(GPU_CC) $(GPU_CFLAGS) -c $< -o $@
$(GPU_OUT)/%.o: tests/gpu/%.c $(GPU_HEADERS)
	@mkdir -p $(GPU_OUT)
	$(GPU_CC) $(GPU_CFLAGS) -c $< -o $@
$(GPU_OUT)/gpu_%: $(GPU_OUT)/%.o $(GPU_KERNELS) $(GPU_HOST)
	$(NVCC) $(GPU_ARCH) $^ -o $@ -lcublas -lgomp
$(GPU_OUT)/gpu_bench: bench/gpu/bench.cu bench/gpu/floors.cuh bench/gpu/models.h $(GPU_KERNELS) \
		$(GPU_HOST) $(GPU_HEADERS)
	$(NVCC) $(GPU_NVFLAGS) $< $(GPU_KERNELS) $(GPU_HOST) -o $@ -lcublas -lgomp
$(GPU_OUT)/gpu_router: bench/gpu/router.cu $(GPU_KERNELS) $(GPU_HEADERS)
	$(NVCC) $(GPU_NVFLAGS) $< $(filter $(GPU_OUT)/router_%,$(GPU_KERNELS)) -o $@

$(GPU_OUT)/gpu_layer: bench/gpu/layer.cu bench/gpu/burst.cuh $(GPU_KERNELS) $(GPU_HOST) $(GPU_HEADERS)
	$(NVCC) $(GPU_NVFLAGS) $< $(GPU_KERNELS) $(GPU_HOST) -o $@ -lcublas -lgomp
# ptxas may run wgmma one after the other, and only says so: C75xx.
$(GPU_OUT)/grouped_hopper.o: kernels/cuda/grouped_hopper.cu $(GPU_HEADERS)
	@mkdir -p $(GPU_OUT)
	$(NVCC) $(GPU_NVFLAGS) -c $< -o $@ >$@.log 2>&1 || { cat $@.log; exit 1; }
	@cat $@.log; ! grep -q C75 $@.log || { rm $@; exit 1; }

# With more tokens than the kernels for few take.
GPU_MANY = $(GPU_OUT)/gpu_graph_many $(GPU_OUT)/gpu_faults_many $(GPU_OUT)/api_data_errors_many \
	$(GPU_OUT)/api_mismatch_many
$(GPU_OUT)/gpu_%_many: tests/gpu/%.c $(GPU_KERNELS) $(GPU_HOST)
	$(GPU_CC) $(GPU_CFLAGS) -DTOKENS=160 -c $< -o $@.o
	$(NVCC) $(GPU_ARCH) $@.o $(GPU_KERNELS) $(GPU_HOST) -o $@ -lcublas -lgomp

# The public calls, through the libraries that `make` builds.
GPU_API = $(patsubst tests/gpu/api/%.c,$(GPU_OUT)/api_%,$(wildcard tests/gpu/api/*.c))
GPU_API_HELPERS = $(GPU_OUT)/product.o $(GPU_OUT)/router_draw.o
$(GPU_OUT)/api_%_many: GPU_CFLAGS += -DTOKENS=560
$(GPU_OUT)/api_%_many: tests/gpu/api/%.c $(GPU_API_HELPERS) all
	@mkdir -p $(GPU_OUT)
	$(GPU_CC) $(GPU_CFLAGS) $< $(GPU_API_HELPERS) -o $@ -Lbuild/lib -lepic \
		-Wl,-rpath,$(abspath build/lib) -L$(GPU_CUDA)/lib64 -lcudart -lcublas \
		-Wl,-rpath,$(GPU_CUDA)/lib64 -lpthread -lm
$(GPU_OUT)/api_%: tests/gpu/api/%.c $(GPU_API_HELPERS) all
	@mkdir -p $(GPU_OUT)
	$(GPU_CC) $(GPU_CFLAGS) $< $(GPU_API_HELPERS) -o $@ -Lbuild/lib -lepic \
		-Wl,-rpath,$(abspath build/lib) -L$(GPU_CUDA)/lib64 -lcudart -lcublas \
		-Wl,-rpath,$(GPU_CUDA)/lib64 -lpthread -lm

# These look inside: the core is linked in, and loads the same libepic_cuda.so.
GPU_INNER = build/lib/libepic_inner.a -Wl,-rpath,$(abspath build/lib) -L$(GPU_CUDA)/lib64 -lcudart \
	-Wl,-rpath,$(GPU_CUDA)/lib64 -ldl -lpthread -lm
$(GPU_OUT)/api_layer $(GPU_OUT)/api_layer_rules: $(GPU_OUT)/api_%: tests/gpu/api/%.c \
		tests/gpu/layer_part.h $(wildcard tests/unit/moe_*.h) all
	@mkdir -p $(GPU_OUT)
	$(GPU_CC) $(GPU_CFLAGS) $< -o $@ $(GPU_INNER)
$(GPU_OUT)/gpu_moe: bench/gpu/moe.c all
	@mkdir -p $(GPU_OUT)
	$(GPU_CC) $(GPU_CFLAGS) $< -o $@ $(GPU_INNER)

# The conformance suite on the backend p2p.
GPU_SUITE = tests/conformance/p2p.c $(wildcard tests/conformance/suite*.c) \
	tests/run.c tests/world.c tests/oracle.c tests/oracle_plan.c
$(GPU_OUT)/conformance_p2p: $(GPU_SUITE) $(wildcard tests/*.h tests/conformance/*.h) all
	@mkdir -p $(GPU_OUT)
	$(GPU_CC) $(GPU_CFLAGS) $(GPU_SUITE) -o $@ -Lbuild/lib -lepic \
		-Wl,-rpath,$(abspath build/lib) -L$(GPU_CUDA)/lib64 -lcudart \
		-Wl,-rpath,$(GPU_CUDA)/lib64 -lpthread -lm

gpu-test: gpu-build $(GPU_API) $(GPU_MANY) $(GPU_OUT)/conformance_p2p
	GPU_OUT=$(GPU_OUT) tests/gpu/run.sh

gpu-bench: $(GPU_OUT)/gpu_bench $(GPU_OUT)/gpu_router
	GPU_OUT=$(GPU_OUT) bench/gpu/run.sh

# Beside another tree of the project, that of a version before: git worktree add build/before COMMIT,
# then BEFORE=build/before.  ROUNDS, LIMIT (percent) and CASE are bench/gpu/turns.py's.
BEFORE ?= build/before
gpu-bench-turns: $(GPU_OUT)/gpu_bench
	@$(MAKE) -C $(BEFORE) -f gpu.mk $(GPU_OUT)/gpu_bench
	$(GPU_PYTHON) bench/gpu/turns.py $(BEFORE)/$(GPU_OUT)/gpu_bench $(GPU_OUT)/gpu_bench \
		--rounds $(or $(ROUNDS),3) --limit $(or $(LIMIT),1) $(CASE)

# Backend hosts, with the ranks of this machine as hosts.  Its kernels are those of the library that
# `make` builds where UCX is; programs that reach inside are linked with them.
HOSTS_OUT = $(GPU_OUT)/hosts
HOSTS_LIBRARY = build/lib/libepic_hosts.so
HOSTS_PARTS = $$(find build/kernels/cuda/CMakeFiles/epic_hosts.dir \
	build/kernels/cuda/CMakeFiles/epic_cuda_alone.dir -name '*.o')
HOSTS_INSIDE = $(patsubst %,$(HOSTS_OUT)/hosts_%,check storm graph faults)
HOSTS_WIRES = $(HOSTS_OUT)/libepic_chaos.so $(HOSTS_OUT)/libepic_local.so
HOSTS_PROGRAMS = $(HOSTS_INSIDE) $(HOSTS_WIRES) $(HOSTS_OUT)/conformance_hosts \
	$(HOSTS_OUT)/api_deaths_hosts $(HOSTS_OUT)/gpu_hosts $(HOSTS_OUT)/gpu_wire
HOSTS_WIRE_FLAGS = -fPIC -shared -fvisibility=hidden -Wl,--version-script=src/plugin.map
HOSTS_CALLS = -Lbuild/lib -lepic -Wl,-rpath,$(abspath build/lib) -L$(GPU_CUDA)/lib64 -lcudart \
	-Wl,-rpath,$(GPU_CUDA)/lib64 -lpthread -lm

$(HOSTS_OUT)/%.o: tests/gpu/%.c $(GPU_HEADERS)
	@mkdir -p $(HOSTS_OUT)
	$(GPU_CC) $(GPU_CFLAGS) -DEPIC_HOSTS -c $< -o $@
$(HOSTS_OUT)/hosts_%: $(HOSTS_OUT)/%.o $(GPU_HELPERS:%=$(HOSTS_OUT)/%.o) $(HOSTS_LIBRARY)
	$(NVCC) $(GPU_ARCH) $(filter %.o,$^) $(HOSTS_PARTS) -o $@ -lcublas -lgomp -ldl -lpthread
$(HOSTS_OUT)/libepic_chaos.so: tests/wire/chaos.c tests/wire/chaos_library.c tests/run.c
	@mkdir -p $(HOSTS_OUT)
	$(GPU_CC) $(GPU_CFLAGS) $(HOSTS_WIRE_FLAGS) -ffunction-sections -Wl,--gc-sections $^ -o $@
$(HOSTS_OUT)/libepic_local.so: tests/gpu/wire/local.c tests/gpu/wire/nic.cu tests/gpu/wire/nic.h \
		src/wire/wire.h
	@mkdir -p $(HOSTS_OUT)
	$(NVCC) $(GPU_NVFLAGS) -Xcompiler -fPIC -c tests/gpu/wire/nic.cu -o $(HOSTS_OUT)/nic.o
	$(GPU_CC) $(GPU_CFLAGS) $(HOSTS_WIRE_FLAGS) $< $(HOSTS_OUT)/nic.o -o $@ -L$(GPU_CUDA)/lib64 \
		-lcudart -Wl,-rpath,$(GPU_CUDA)/lib64 -lpthread -lstdc++
$(HOSTS_OUT)/conformance_hosts: $(GPU_SUITE) $(wildcard tests/*.h tests/conformance/*.h) all
	@mkdir -p $(HOSTS_OUT)
	$(GPU_CC) $(GPU_CFLAGS) -DBACKEND='"hosts"' $(GPU_SUITE) -o $@ $(HOSTS_CALLS)
$(HOSTS_OUT)/api_deaths_hosts: tests/gpu/api/deaths.c $(GPU_OUT)/product.o all
	@mkdir -p $(HOSTS_OUT)
	$(GPU_CC) $(GPU_CFLAGS) -DBACKEND='"hosts"' $< $(GPU_OUT)/product.o -o $@ $(HOSTS_CALLS) \
		-lcublas
$(HOSTS_OUT)/gpu_hosts: bench/gpu/hosts.c all
	@mkdir -p $(HOSTS_OUT)
	$(GPU_CC) $(GPU_CFLAGS) $< -o $@ $(GPU_INNER)
$(HOSTS_OUT)/gpu_wire: bench/gpu/wire.cu src/wire/wire.h
	@mkdir -p $(HOSTS_OUT)
	$(NVCC) $(GPU_NVFLAGS) $< -o $@ -ldl -lpthread

HOSTS_LEFT_OUT = "left out: no $(HOSTS_LIBRARY); install UCX (Debian: libucx-dev), or" \
	"cmake -S . -B build -DEPIC_HOSTS=ALWAYS, then again"
gpu-test-hosts: all
	@if [ ! -e $(HOSTS_LIBRARY) ]; then echo $(HOSTS_LEFT_OUT); \
	else $(MAKE) $(HOSTS_PROGRAMS) && HOSTS_OUT=$(HOSTS_OUT) tests/gpu/hosts.sh; fi
gpu-bench-hosts: all
	@if [ ! -e $(HOSTS_LIBRARY) ]; then echo $(HOSTS_LEFT_OUT); \
	else $(MAKE) $(HOSTS_PROGRAMS) && HOSTS_OUT=$(HOSTS_OUT) bench/gpu/hosts.sh; fi
$(HOSTS_LIBRARY): all

# JAX and PyTorch have a part in it where GPU_PYTHON has them and gpu-build-jax, gpu-build-torch ran.
GPU_PYTHON ?= python3
gpu-bench-layer: $(GPU_OUT)/gpu_layer $(GPU_OUT)/gpu_moe
	$(GPU_PYTHON) bench/gpu/layer_bars.py $(GPU_OUT)

.PHONY: nvcc-build test-nvcc gpu-build gpu-test gpu-bench gpu-test-hosts gpu-bench-hosts \
	gpu-bench-layer gpu-bench-turns
.PRECIOUS: $(GPU_OUT)/%.o
