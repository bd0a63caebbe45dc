/* SPDX-License-Identifier: Apache-2.0 */
/* Atomic operations whose names contain their memory order. "ordered" means sequentially
 * consistent: if two ranks each store one word and then load the other's word, at least one of
 * them loads the new value. Without this property, the protocol of wait.c could lose a
 * wake-up. */
#ifndef EPIC_SHARED_ATOMICS_H
#define EPIC_SHARED_ATOMICS_H

#include <stdatomic.h>

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2,
               "atomics with a lock inside do not work between processes");

#define load_relaxed(word) atomic_load_explicit((word), memory_order_relaxed)
#define store_relaxed(word, value) atomic_store_explicit((word), (value), memory_order_relaxed)
#define load_acquire(word) atomic_load_explicit((word), memory_order_acquire)
#define store_release(word, value) atomic_store_explicit((word), (value), memory_order_release)
#define load_ordered(word) atomic_load_explicit((word), memory_order_seq_cst)
#define store_ordered(word, value) atomic_store_explicit((word), (value), memory_order_seq_cst)
#define swap_ordered(word, value) \
    atomic_exchange_explicit((word), (value), memory_order_seq_cst)
#define add_relaxed(word, value) \
    atomic_fetch_add_explicit((word), (value), memory_order_relaxed)
#define add_ordered(word, value) \
    atomic_fetch_add_explicit((word), (value), memory_order_seq_cst)
#define compare_swap(word, expected, value)                                                    \
    atomic_compare_exchange_strong_explicit((word), (expected), (value), memory_order_seq_cst, \
                                            memory_order_seq_cst)

#endif
