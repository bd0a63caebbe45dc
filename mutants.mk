# SPDX-License-Identifier: Apache-2.0
# `make mutants` applies each patch of tests/mutants to a copy of the tree and expects a test to fail.
# MUTANTS="NAME ..." selects some patches.
.PHONY: mutants

mutants:
	@JOBS=$(JOBS) MUTANTS="$(MUTANTS)" tests/mutants/run.sh
