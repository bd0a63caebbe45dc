# SPDX-License-Identifier: Apache-2.0
# What runs seldom: `make soak` before a merge of anything that waits, and at night; `make
# release-check` before a release.  docs/testing.md has the tiers.
.PHONY: soak release-check stranger
MINUTES ?= 10
soak: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build)
	@tests/soak.sh build $(MINUTES)

release-check: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build)
	@tools/release.sh build

# The README's ways to install, and a first step of one's own in C, JAX and PyTorch.
stranger: setup-build
	@tests/stranger.sh
