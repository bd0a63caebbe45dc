# SPDX-License-Identifier: Apache-2.0
# What runs seldom: `make soak` before a merge of anything that waits, and at night; `make
# release-check` before a release.  docs/internals/testing.md has the tiers.
.PHONY: soak test-deb release-check stranger coverage
MINUTES ?= 10
soak: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target tested
	@tests/soak.sh build $(MINUTES)

# The .deb, installed and tried in a bare system (root, debootstrap; BARE and SUITE as of test-chroot).
test-deb: all
	@rm -f build/packages/*.deb
	@cd build && cpack -G DEB >packages.log 2>&1 || { cat packages.log; exit 1; }
	@DEB=$$(ls build/packages/*.deb) tests/chroot.sh $(SUITE)

release-check: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build)
	@tools/release.sh build

# The README's ways to install, and a first step of one's own in C, JAX and PyTorch.
stranger: setup-build
	@tests/stranger.sh

# Lines that the tests on hosts run.  A process that is killed, or leaves by _exit, counts nothing.
COVERAGE = $(CURDIR)/build/coverage
coverage: setup-test
	@$(call CMAKE,Debug,$(COVERAGE),$(HOST_ONLY) -DCMAKE_C_FLAGS="--coverage -fprofile-update=atomic")
	@$(call BUILD,$(COVERAGE)) --target tested
	@find $(COVERAGE) -name '*.gcda' -delete
	@status=0; $(call CTEST,$(COVERAGE)) -L "unit|conformance|fault|net" -LE slow || status=$$?; \
	    python3 tools/coverage.py $(COVERAGE) && exit $$status

# The tiers that are more than one of these (docs/internals/testing.md).
.PHONY: test-push test-night
test-push: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target tested
	@$(call CTEST,build) -L unit -LE slow

test-night:
	@$(MAKE) soak MINUTES=60
	@$(MAKE) fuzz
	@$(MAKE) mutants
	@$(MAKE) coverage
	@EPIC_TEST_SCALE=10 $(call CTEST,build)
	@EPIC_TEST_EXAMPLES=1 $(MAKE) test-jax test-torch
