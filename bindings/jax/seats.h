/* SPDX-License-Identifier: Apache-2.0 */
/* Which context a device has in a group of a given name.  Programs know the name alone; it is
 * looked up at every call, so a group may be closed and opened again under a compiled program. */
#ifndef EPIC_JAX_SEATS_H
#define EPIC_JAX_SEATS_H

#include <stdbool.h>
#include <stdint.h>

#include "epic/epic.h"

enum { SEATS_NAME = 64 };

typedef struct seat seat;

typedef struct seat_device {
    bool is_gpu;
    int32_t ordinal; /* as XLA counts them */
} seat_device;

/* An operation on a seat, from seat_enter to seat_leave. */
typedef struct seat_use {
    seat *seat;
    epic_context *ctx;
    uint64_t tag;
    struct seat_use *next; /* the seats' */
} seat_use;

typedef enum seat_answer { SEAT_OK, SEAT_NONE, SEAT_TAG_BUSY } seat_answer;

/* Begins an operation of use->tag.  SEAT_NONE: no such group on this device of that platform.
 * SEAT_TAG_BUSY, on host devices only, as GPUs are in stream order: the tag has an operation in
 * flight here; the peers have been told that this one will not come. */
seat_answer seat_enter(seat_use *use, const char *name, seat_device device);
void seat_leave(seat_use *use);

/* The same for work that is no operation of the group: on any seat of the device. */
seat_answer seat_borrow(seat_use *use, seat_device device);

/* For Python.  0: done; 1: the name is taken on that device, or is too long; 2: no memory. */
int epic_jax_seat_add(const char *name, int is_gpu, int32_t ordinal, epic_context *ctx);

/* Takes the seat away, waits for its operations to end and returns its context; NULL: there was
 * none. */
epic_context *epic_jax_seat_remove(const char *name, int is_gpu, int32_t ordinal);

#endif
