# SPDX-License-Identifier: Apache-2.0
# `make bench`: the C backends beside pipelines on MPI, by turns in one run; bench/run.sh says how to
# make it shorter.  Text goes to the terminal, JSON and an SVG to build/bench.
.PHONY: bench
bench: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target benchmarks
	@bench/run.sh build/bench
