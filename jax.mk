# SPDX-License-Identifier: Apache-2.0
# JAX: `make test-jax` builds the handlers and tests them with every pair of JAX and Python below
# that this machine has, each in a virtual environment of its own under build/.

.PHONY: test-jax

test-jax:
	@echo "== JAX"
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target epic
	@tests/jax/run.sh build
