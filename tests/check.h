/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of tests: counted over threads and forked processes, told with the case's seed. */
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stdint.h>

/* The case that this thread is at; told with every failed check. */
extern _Thread_local uint64_t check_seed;

/* Before the first fork or thread. */
void check_begin(void);

/* Counts a check.  The first failures are told. */
bool check_that(bool right, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Of two numbers, whose texts are told. */
bool check_equal(long long a, long long b, const char *file, int line, const char *a_text,
                 const char *b_text);

long check_num_passed(void);
long check_num_failed(void);

/* The last line of a test: "N passed, N failed".  Returns what main returns. */
int check_end(void);

/* Tells why nothing could be tested; returns what main returns. */
int check_skip(const char *why);

#define CHECK(condition) check_that((condition), __FILE__, __LINE__, "not true: %s", #condition)
#define CHECK_SAY(condition, ...) check_that((condition), __FILE__, __LINE__, __VA_ARGS__)
#define CHECK_EQ(a, b) check_equal((long long)(a), (long long)(b), __FILE__, __LINE__, #a, #b)

#endif
