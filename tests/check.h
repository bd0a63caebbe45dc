/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of tests. They are counted over threads and forked processes, and a failure is
 * printed with the seed of its case. */
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stdint.h>

/* Seed of the case that this thread runs; printed with every failed check. */
extern _Thread_local uint64_t check_seed;

/* Call this before the first fork or thread. */
void check_begin(void);

/* Counts a check and returns `right`. Prints the first failures. */
bool check_that(bool right, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Checks that two numbers are equal; prints their expressions if not. */
bool check_equal(long long a, long long b, const char *file, int line, const char *a_text,
                 const char *b_text);

long check_num_passed(void);
long check_num_failed(void);

/* Prints the last line of a test, "N passed, N failed", and returns the exit status for
 * main. */
int check_end(void);

/* Prints why nothing can be tested and returns the exit status for main. */
int check_skip(const char *why);

#define CHECK(condition) check_that((condition), __FILE__, __LINE__, "not true: %s", #condition)
#define CHECK_SAY(condition, ...) check_that((condition), __FILE__, __LINE__, __VA_ARGS__)
#define CHECK_EQ(a, b) check_equal((long long)(a), (long long)(b), __FILE__, __LINE__, #a, #b)

#endif
