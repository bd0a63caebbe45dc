/* SPDX-License-Identifier: Apache-2.0 */
/* A call of a handler, as XLA makes it, put together by hand. */
#ifndef FRAMES_CALL_H
#define FRAMES_CALL_H

#include <stdint.h>
#include <stdio.h>

#include "xla/ffi/api/c_api.h"

enum { MOST = 64 };
enum { ARG, RESULT };

typedef XLA_FFI_Error *handler(XLA_FFI_CallFrame *frame);

typedef struct call {
    XLA_FFI_Buffer buffers[2][MOST];
    void *at[2][MOST];
    int64_t dims[2][MOST][2];
    XLA_FFI_Scalar scalars[MOST];
    int64_t ints[MOST];
    double floats[MOST];
    XLA_FFI_ByteSpan names[MOST], texts[MOST], *name_at[MOST];
    void *attr_at[MOST];
    XLA_FFI_AttrType types[MOST];
    int64_t sizes[2], num_attrs;
} call;

extern const XLA_FFI_Api api;    /* what a handler may ask XLA for */
extern const int32_t unreadable; /* an address of what only the GPU can read */
extern int failed;
extern int32_t ordinal;     /* of the GPU that the call is for */
extern int stream_asked;    /* how often */
extern const char *devices; /* that the program takes group "g" to have */
extern char said[1100];     /* the text of run()'s last error */

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            failed = 1;                                                               \
        }                                                                             \
    } while (0)

/* An operand or a result: columns 0: [rows], else [rows, columns]. */
void add(call *c, int side, XLA_FFI_DataType type, const void *data, int64_t rows,
         int64_t columns);
void add_none(call *c, int side);
void add_number(call *c); /* a site, a rank or a channel, in device memory */
void add_site(call *c);   /* and the rank */

void add_int(call *c, const char *name, int64_t value);
void add_float(call *c, const char *name, double value);
void add_text(call *c, const char *name, const char *text);
void add_group(call *c, const char *name);

/* Calls; the code of its error, 0 for none. */
int run(handler *function, call *c);

#endif
