/* SPDX-License-Identifier: Apache-2.0 */
/* Builds a call of a handler as XLA builds it. */
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

extern const XLA_FFI_Api api;    /* functions of XLA that handlers may call */
extern const int32_t unreadable; /* an address that only the GPU can read */
extern int failed;
extern int32_t ordinal;     /* number of the GPU of the call */
extern int stream_asked;    /* how often a handler got the stream */
extern const char *devices; /* devices that the program expects of group "g" */
extern char said[1100];     /* text of the last error of run() */

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            failed = 1;                                                               \
        }                                                                             \
    } while (0)

/* Adds an operand or a result. Its shape is [rows] if columns is 0, else [rows, columns]. */
void add(call *c, int side, XLA_FFI_DataType type, const void *data, int64_t rows,
         int64_t columns);
void add_none(call *c, int side);
void add_number(call *c); /* adds a site, a rank or a channel in device memory */
void add_site(call *c);   /* adds a site and a rank */

void add_int(call *c, const char *name, int64_t value);
void add_float(call *c, const char *name, double value);
void add_text(call *c, const char *name, const char *text);
void add_group(call *c, const char *name);

/* Calls the handler; returns the code of its error, 0 for none. */
int run(handler *function, call *c);

#endif
