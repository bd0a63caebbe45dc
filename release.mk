# SPDX-License-Identifier: Apache-2.0
# Targets that run rarely: `make soak` at night and before a merge of code that waits, `make
# release-check` before a release.  docs/internals/testing.md lists what to run when.
.PHONY: soak test-deb release-check stranger coverage
MINUTES ?= 10
soak: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target tested
	@tests/soak.sh build $(MINUTES)

# Builds the .deb, installs it in a bare system and runs it there.  Needs root and debootstrap; BARE and
# SUITE have the meaning of test-chroot.
test-deb: all
	@rm -f build/packages/*.deb
	@cd build && cpack -G DEB >packages.log 2>&1 || { cat packages.log; exit 1; }
	@DEB=$$(ls build/packages/*.deb) tests/chroot.sh $(SUITE)

release-check: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build)
	@tools/release.sh build

# Installs EPIC in each way that README.md describes, and runs a first program in C, JAX and PyTorch.
stranger: setup-build
	@tests/stranger.sh

# Counts the lines that the CPU tests run.  A process that is killed or calls _exit is not counted.
COVERAGE = $(CURDIR)/build/coverage
coverage: setup-test
	@$(call CMAKE,Debug,$(COVERAGE),$(HOST_ONLY) -DCMAKE_C_FLAGS="--coverage -fprofile-update=atomic")
	@$(call BUILD,$(COVERAGE)) --target tested
	@find $(COVERAGE) -name '*.gcda' -delete
	@status=0; $(call CTEST,$(COVERAGE)) -L "unit|conformance|fault|net" -LE "slow|night" || status=$$?; \
	    python3 tools/coverage.py $(COVERAGE) && exit $$status

# Combinations of targets for a push and for the night (docs/internals/testing.md).
.PHONY: test-push test-night
test-push: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target tested
	@$(call CTEST,build) -L unit -LE "slow|night"

test-night:
	@$(MAKE) soak MINUTES=60
	@$(MAKE) fuzz
	@$(MAKE) mutants
	@$(MAKE) coverage
	@EPIC_TEST_SCALE=10 $(call CTEST,build)
	@EPIC_TEST_EXAMPLES=1 EPIC_TORCH_ALL=1 $(MAKE) test-jax test-torch
