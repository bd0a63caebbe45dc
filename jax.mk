# SPDX-License-Identifier: Apache-2.0
# JAX: `make test-jax` builds the handlers and tests them with the JAX of each Python below that this
# machine has, each in a virtual environment of its own under build/; on the first one also the
# wheel, ruff and mypy.  `make test` has test-jax-quick: all on the first, a part on the others.

.PHONY: test-jax test-jax-quick

test-jax test-jax-quick:
	@echo "== JAX"
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target epic
	@EPIC_JAX_QUICK=$(if $(findstring quick,$@),1) tests/jax/run.sh build
