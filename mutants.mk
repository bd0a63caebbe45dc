# SPDX-License-Identifier: Apache-2.0
# Do the tests notice damage?  `make mutants` damages a copy of the tree in one place after the
# other and wants a test to fail each time; MUTANTS="NAME ..." does some of tests/mutants.
.PHONY: mutants

mutants:
	@JOBS=$(JOBS) MUTANTS="$(MUTANTS)" tests/mutants/run.sh
