# SPDX-License-Identifier: Apache-2.0
# `make bench` compares the C backends with pipelines written with MPI. Both run in turn in one run. It
# prints text and writes JSON and an SVG to build/bench. bench/run.sh lists variables that shorten the run.
.PHONY: bench
bench: setup-test
	@$(call CMAKE,Release,build)
	@$(call BUILD,build) --target benchmarks
	@bench/run.sh build/bench
