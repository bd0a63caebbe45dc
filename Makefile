# SPDX-License-Identifier: Apache-2.0
# The commands for users.  `make` builds the libraries and tools into build/; `make examples` builds
# the example programs; `make test` builds and runs every test that needs no GPU; `make demo` trains a
# language model.  Each command first installs missing packages if it may.  CMake does the build.

MAKEFLAGS += --no-print-directory
JOBS ?= $(shell nproc)
CMAKE = tools/configure.sh $(2) -DCMAKE_BUILD_TYPE=$(1) $(3)
# Parts of `make test` run at the same time.  The lock allows one build at a time in a build folder.
BUILD = flock $(1) cmake --build $(1) -j $(JOBS)
CTEST = tests/ctest.sh $(1)
LEFT_OUT = sed -n 's/^-- \(left out: \)/\1/p' $(1)/configure.log
# The share of the random cases and injected faults of ctest that `make test` runs. With sanitizers, which
# make programs several times slower, the share is smaller. `make test-night` runs ten times all cases.
CASES = env EPIC_TEST_SCALE=$${EPIC_TEST_SCALE:-0.15}
CASES_SANITIZED = env EPIC_TEST_SCALE=$${EPIC_TEST_SCALE:-0.1}
# An option of CMake: the compiler clang, if it can build programs with AddressSanitizer.
CLANG = $$(echo 'int main(void) { return 0; }' | clang -fsanitize=address,undefined -x c - -o /dev/null \
    2>/dev/null && echo -DCMAKE_C_COMPILER=clang || echo "left out: no clang with AddressSanitizer" >&2)
HOST_ONLY = -DEPIC_MPI=OFF -DEPIC_CUDA=OFF -DEPIC_EMULATOR=OFF
# ThreadSanitizer of gcc 12 and 13 fails under the address randomization of newer Linux kernels.
STILL = $$(setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)
VALGRIND = valgrind -q --error-exitcode=1 --leak-check=full --trace-children=yes
VALGRIND_TESTS = info bootstrap_env bootstrap_threads recorder sized

.PHONY: all examples test demo format clean install uninstall setup-build setup-test setup-demo \
    test-format test-build test-gcc-tests test-gcc test-compile asan-build tsan-build test-asan test-tsan \
    test-valgrind test-chroot
.NOTPARALLEL:

all: setup-build
	@$(call CMAKE,Release,build,$(if $(STATIC),-DEPIC_STATIC=$(STATIC)))
	@$(call BUILD,build)
	@$(call LEFT_OUT,build)

examples: setup-build
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target examples

# The parts of later stages test what earlier stages have built.  The longest parts start first.  The
# emulated GPUs of gcc-tests poll, so only compilers run at the same time, with the lowest priority.
PARTS = "format build" "gcc-tests compile" "torch-quick jax-quick tsan asan fuzz valgrind"
test: setup-test
	@tests/parts.sh "$(MAKE)" $(PARTS)

setup-build setup-test setup-demo: setup-%:
	@tools/setup.sh $*

test-format:
	@echo "== format"
	@tools/format.sh --check

test-build:
	@echo "== release build"
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target tested
	@$(call LEFT_OUT,build)

test-gcc-tests:
	@echo "== tests of the release build"
	@$(CASES) $(call CTEST,build) -LE night

test-gcc: test-build test-gcc-tests

# Compiles the kernels with nvcc, and what the parts after gcc-tests test.
test-compile:
	@nice -n 19 $(MAKE) test-nvcc asan-build tsan-build fuzz-build-found

# Builds with clang, if clang and its sanitizers are installed, so that two compilers check the code.
asan-build:
	@{ $(call CMAKE,Debug,build/asan,-DEPIC_SANITIZE=address$(,)undefined $(HOST_ONLY) $(CLANG)); }
	@$(call BUILD,build/asan) --target tested

tsan-build:
	@$(call CMAKE,Debug,build/tsan,-DEPIC_SANITIZE=thread $(HOST_ONLY))
	@$(call BUILD,build/tsan) --target threaded

test-asan: asan-build
	@echo "== AddressSanitizer and UndefinedBehaviorSanitizer"
	@$(CASES_SANITIZED) $(STILL) $(call CTEST,build/asan) -LE "slow|night"

test-tsan: tsan-build
	@echo "== ThreadSanitizer"
	@$(CASES_SANITIZED) $(STILL) $(call CTEST,build/tsan) -L threads -LE "slow|night"

test-valgrind:
	@echo "== valgrind"
	@if command -v valgrind >/dev/null; then \
	    for test in $(VALGRIND_TESTS); do \
	        echo "$$test"; \
	        $(VALGRIND) build/tests/unit/$$test || [ $$? = 77 ] || exit 1; \
	    done; \
	else echo "left out: there is no valgrind"; fi

# Not a part of `make test`: installs a bare system (release SUITE, from MIRROR) and runs this
# Makefile in it.
SUITE ?= bookworm
test-chroot:
	@tests/chroot.sh $(SUITE)

TRAIN = build/examples/train_text
demo: setup-demo
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target example_train_text
	@echo "== training with 4 processes (Ctrl-C ends it)"
	@$(TRAIN) --picture build/train_text.svg
	@echo "== the same 20 steps with 4 ranks and with 1"
	@$(TRAIN) --check
	@$(call LEFT_OUT,build) | grep OpenBLAS || true

format:
	@tools/format.sh

# Options: prefix=FOLDER; DESTDIR=FOLDER, put before the prefix, for packages; STATIC=1 also installs
# libepic.a.
install: all
	@DESTDIR="$(DESTDIR)" tools/install.sh build "$(prefix)"

uninstall:
	@DESTDIR="$(DESTDIR)" tools/install.sh --remove build

clean:
	rm -rf build

, := ,

-include gpu.mk jax.mk torch.mk fuzz.mk mutants.mk bench.mk release.mk docs.mk
