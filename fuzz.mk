# SPDX-License-Identifier: Apache-2.0
# Fuzzing with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer.  `make fuzz` runs each
# target of tests/fuzz for FUZZ_SECONDS seconds and keeps new inputs in build/fuzz/corpus.  `make
# test` contains test-fuzz, which runs each target for a few seconds.  An input that fails is stored as
# build/fuzz/TARGET-*; build/fuzz/TARGET FILE runs it again.
FUZZ_SECONDS ?= 600
FUZZ_QUICK_SECONDS ?= 3
FUZZ_CC ?= clang
FUZZ_OUT = build/fuzz
FUZZ_TARGETS = bootstrap_accept bootstrap_connect members open plan
FUZZ_CFLAGS = -std=c11 -O1 -g1 -Wall -Wextra -Wpedantic -Werror -D_GNU_SOURCE -Iinclude -Isrc -I. \
	-Itests -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
FUZZ_SOURCES = $(wildcard src/base/*.c src/rules/*.c src/context/*.c src/api/*.c src/bootstrap/*.c src/plan/*.c src/exchange/*.c src/host_ops/*.c \
	src/backend/shared/*.c src/backend/self/*.c src/backend/threads/*.c \
	src/backend/shm/*.c kernels/host/select.c kernels/host/rows.c kernels/host/product.c)
FUZZ_OBJECTS = $(FUZZ_SOURCES:%.c=$(FUZZ_OUT)/%.o)
FUZZ_HELPERS = $(patsubst %.c,$(FUZZ_OUT)/%.o,tests/fuzz/world.c tests/run.c \
	tests/step.c)
FUZZ_HEADERS = $(wildcard include/epic/*.h src/*/*.h src/*/*/*.h kernels/*.h kernels/host/*.h \
	tests/*.h tests/fuzz/*.h tests/unit/members.h) fuzz.mk
# These files wait for file descriptors; world.h replaces their clock and their waits.
FUZZ_WORLD = $(patsubst %.c,$(FUZZ_OUT)/%.o,$(wildcard src/bootstrap/*.c src/backend/shm/*.c))

$(FUZZ_WORLD): FUZZ_MORE = -include tests/fuzz/world.h
$(FUZZ_OUT)/kernels/host/rows.o $(FUZZ_OUT)/kernels/host/product.o: FUZZ_MORE = -DVARIANT=generic
$(FUZZ_OUT)/src/%.o $(FUZZ_OUT)/kernels/%.o: FUZZ_COVER = -fsanitize=fuzzer-no-link
$(FUZZ_OUT)/%.o: %.c $(FUZZ_HEADERS)
	@mkdir -p $(@D)
	@$(FUZZ_CC) $(FUZZ_CFLAGS) $(FUZZ_COVER) $(FUZZ_MORE) -c $< -o $@
# An archive, so that script.o replaces src/bootstrap/address.o in the targets that link script.o.
$(FUZZ_OUT)/libfuzzed.a: $(FUZZ_OBJECTS) $(FUZZ_HELPERS)
	@rm -f $@
	@ar rcs $@ $^
$(FUZZ_OUT)/bootstrap_accept $(FUZZ_OUT)/bootstrap_connect: $(FUZZ_OUT)/tests/fuzz/script.o
$(FUZZ_TARGETS:%=$(FUZZ_OUT)/%): $(FUZZ_OUT)/%: $(FUZZ_OUT)/tests/fuzz/%.o $(FUZZ_OUT)/libfuzzed.a
	@$(FUZZ_CC) $(FUZZ_CFLAGS) -fsanitize=fuzzer $(filter-out %.a,$^) $(filter %.a,$^) -o $@ \
	    -lpthread -ldl -lm

.PHONY: fuzz fuzz-build fuzz-build-found test-fuzz
.PRECIOUS: $(FUZZ_OUT)/%.o
fuzz-build: $(FUZZ_TARGETS:%=$(FUZZ_OUT)/%)

# Tests whether clang can link a fuzzer.
FUZZ_FOUND = echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | $(FUZZ_CC) -x c \
	-fsanitize=fuzzer,address - -o /dev/null 2>/dev/null
# $(call FUZZ_RUN,folder of inputs,seconds,options) runs each target and stops at the first failure.
FUZZ_RUN = for target in $(FUZZ_TARGETS); do mkdir -p $(1)/$$target; \
	    timeout -k 5 $$(( $(2) + 120 )) $(FUZZ_OUT)/$$target -max_total_time=$(2) -timeout=120 \
	        -rss_limit_mb=2000 -max_len=1024 -print_final_stats=1 $(3) \
	        -artifact_prefix=$(FUZZ_OUT)/$$target- $(1)/$$target tests/fuzz/seeds/$$target >$(FUZZ_OUT)/$$target.log 2>&1 \
	        || { tail -n 60 $(FUZZ_OUT)/$$target.log; exit 1; }; \
	    echo "$$target: $$(sed -n 's/.*number_of_executed_units: //p' $(FUZZ_OUT)/$$target.log) inputs"; \
	done

# Builds the targets if clang can link a fuzzer.
fuzz-build-found:
	@if $(FUZZ_FOUND); then $(MAKE) -f fuzz.mk -j $(JOBS) fuzz-build; fi

test-fuzz: fuzz-build-found
	@echo "== fuzzing, $(FUZZ_QUICK_SECONDS) s each ($(FUZZ_TARGETS))"
	@if $(FUZZ_FOUND); then rm -rf $(FUZZ_OUT)/quick; \
	    $(call FUZZ_RUN,$(FUZZ_OUT)/quick,$(FUZZ_QUICK_SECONDS),-seed=1); \
	else echo "left out: there is no clang with libFuzzer (libclang-rt-dev)"; fi

fuzz:
	@$(MAKE) -f fuzz.mk -j $(JOBS) fuzz-build
	@$(call FUZZ_RUN,$(FUZZ_OUT)/corpus,$(FUZZ_SECONDS),)
