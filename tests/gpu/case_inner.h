/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that the files of a case share: case_draw.c draws the case, case.c has its data
 * and calls, and case_check.c checks the results. */
#ifndef EPIC_TEST_CASE_INNER_H
#define EPIC_TEST_CASE_INNER_H

#include "case.h"

#define CASE_GARBAGE 0xa5 /* value of every byte that a call may write, before the call */

uint64_t case_hash(uint64_t a, uint64_t b, uint64_t c, uint64_t d);

/* Returns a number with few bits, and sometimes a special value. */
float case_number(uint64_t h, bool hard, uint32_t type);

/* These functions return data of a rank, which every rank can compute. */
void token_row(const test_case *c, int rank, int64_t token, uint8_t *row);
void token_scales(const test_case *c, int rank, int64_t token, uint8_t *scales);
/* Returns the row and second row that must arrive. */
void received_row(const test_case *c, int rank, int64_t token, uint8_t *row, uint8_t *scales);
float choice_weight(const test_case *c, int rank, int64_t choice);
float slot_weight(const test_case *c, int rank, int64_t slot);
float slot_element(const test_case *c, int rank, int64_t slot, int64_t i);
float token_element(const test_case *c, int rank, int64_t token, int64_t i);

/* Returns the index of the data of the i-th choice of `rank` on the rank of its expert. */
int64_t place_of_choice(const test_case *c, int rank, int64_t i);

/* Stores a number. NaNs get all bits set, which is the value of staging memory that no peer has
 * written. */
void case_put(uint8_t *row, int64_t i, uint32_t type, float x);

/* Copies the bytes to new memory, through the arena. */
void *case_upload(bench *b, const void *from, size_t bytes, int offset);
void *case_download(bench *b, const void *from, size_t bytes);

bool case_must(bench *b, epic_result result, const char *what);
bool same_float(float a, float b);

#endif
