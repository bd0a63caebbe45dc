/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of kernels/cuda/common/ptx.cuh without assembly, for the emulator. */
#ifndef EPIC_PTX_CUH
#define EPIC_PTX_CUH

#include <cuda_device.h>

#include "host/convert.h"

#define POISON 0xffffffffu

inline uint64_t timer_ns()
{
    return emulator_now();
}

/* Reads or writes each word of a vector separately. */
template <class T> inline T emulated_load(const T *p)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

inline uint4 emulated_load(const uint4 *p)
{
    const uint32_t *word = (const uint32_t *)p;
    return {emulated_load(word), emulated_load(word + 1), emulated_load(word + 2),
            emulated_load(word + 3)};
}

template <class T> inline void emulated_store(T *p, T v)
{
    __atomic_store_n(p, v, __ATOMIC_RELAXED);
}

inline void emulated_store(uint4 *p, uint4 v)
{
    uint32_t *word = (uint32_t *)p;
    emulated_store(word, v.x);
    emulated_store(word + 1, v.y);
    emulated_store(word + 2, v.z);
    emulated_store(word + 3, v.w);
}

inline void begin_poll()
{
    emulator_here->polls->count = 0;
    emulator_here->polls->num_polls++;
}

/* Records a load of a word that other threads may write, so that a thread that naps knows for
 * which words it waits. */
template <class T> inline T record_load(const T *p, T value)
{
    emulator_polls *polls = emulator_here->polls;
    const uint32_t i = polls->count++;
    if (i < EMULATOR_MAX_POLLS) {
        polls->num_bytes[i] = sizeof value;
        polls->at[i] = p;
        polls->values[i] = value;
    }
    return value;
}

template <class T> inline T load_relaxed(const T *p)
{
    return record_load(p, emulated_load(p));
}

inline uint4 load_relaxed(const uint4 *p)
{
    const uint32_t *word = (const uint32_t *)p;
    return {load_relaxed(word), load_relaxed(word + 1), load_relaxed(word + 2),
            load_relaxed(word + 3)};
}

inline uint32_t load_unawaited(const uint32_t *p)
{
    return emulated_load(p);
}

template <class T> inline void store_relaxed(T *p, std::common_type_t<T> v)
{
    if (sizeof v == sizeof(uint4)) {
        emulator_check_store(p);
        if (emulator_delay_store(p, (const uint32_t *)&v)) return;
    }
    emulated_store(p, v);
}

inline void load_two_words(const uint64_t *p, uint64_t &a, uint64_t &b)
{
    a = load_relaxed(p);
    b = load_relaxed(p + 1);
}

inline void fence_system()
{
    emulator_fence(1);
}

inline uint32_t load_acquire(const uint32_t *p)
{
    return record_load(p, __atomic_load_n(p, __ATOMIC_ACQUIRE));
}

inline void store_release(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

inline void store_in_place(uint4 *p, uint4 v)
{
    emulated_store(p, v);
    emulator_note_store(p);
}

inline uint64_t policy_once()
{
    return 1;
}

inline uint4 load_once(const void *p, uint64_t)
{
    return emulated_load((const uint4 *)p);
}

inline uint4 load_again(const void *p)
{
    return emulated_load((const uint4 *)p);
}

inline void store_once(void *p, uint4 v, uint64_t)
{
    emulated_store((uint4 *)p, v);
}

template <class T> inline void store_once(void *p, T v, uint64_t)
{
    emulated_store((T *)p, v);
}

inline void copy_once(uint32_t to, const void *from, uint64_t)
{
    emulator_copy(to, from, 16);
}

inline void copy_again(uint32_t to, const void *from)
{
    emulator_copy(to, from, 16);
}

inline void copy_word(uint32_t to, const void *from)
{
    emulator_copy(to, from, 4);
}

inline void end_copies()
{
    emulator_end_copies();
}

template <int PENDING> inline void wait_copies()
{
    emulator_wait_copies(PENDING);
}

inline uint32_t shared_address(const void *p)
{
    return (uint32_t)((const uint8_t *)p - emulator_here->shared);
}

inline uint4 load_shared(uint32_t p)
{
    return *(const uint4 *)emulator_shared(p, 16);
}

inline void store_shared(uint32_t p, uint4 v)
{
    *(uint4 *)emulator_shared(p, 16) = v;
    emulator_hide_bulk();
}

inline void store_shared(uint32_t p, uint32_t v)
{
    *(uint32_t *)emulator_shared(p, 4) = v;
    emulator_hide_bulk();
}

inline void bulk_once(void *to, uint32_t from, uint32_t bytes, uint64_t)
{
    emulator_bulk(to, from, bytes, NULL);
}

inline void bulk_send(void *to, uint32_t from, uint32_t bytes)
{
    emulator_bulk(to, from, bytes, emulator_check_store);
}

inline void bulk_store_local(void *to, uint32_t from, uint32_t bytes)
{
    emulator_bulk(to, from, bytes, emulator_note_store);
}

inline void bulk_prefetch(const void *, uint32_t)
{
}

inline void end_bulk()
{
    emulator_end_bulk();
}

template <int PENDING> inline void wait_bulk_read()
{
    emulator_wait_bulk(PENDING);
}

inline void wait_bulk()
{
    emulator_wait_bulk(0);
}

inline void fence_bulk()
{
    emulator_show_bulk();
}

inline float max_size(float x, float y)
{
    const float size = std::fabs(x) > std::fabs(y) ? std::fabs(x) : std::fabs(y);
    return x != x || y != y ? emulated_nan(NAN) : size;
}

inline uint32_t max_halves(uint32_t a, uint32_t b)
{
    const uint32_t low = std::max(a & 0xffffu, b & 0xffffu);
    return std::max(a & 0xffff0000u, b & 0xffff0000u) | low;
}

inline uint32_t pack_e4m3(float a, float b, float c, float d)
{
    const uint32_t low = (uint32_t)e4m3_of_float(b) << 8 | e4m3_of_float(a);
    return (uint32_t)e4m3_of_float(d) << 24 | (uint32_t)e4m3_of_float(c) << 16 | low;
}

inline void keep_in_registers(uint32_t &)
{
}

template <int N> inline void keep_in_registers(float (&)[N])
{
}

/* Returns y or a neighbour of it, chosen by x, so that the result has the same bits each time.
 */
inline float approximate(float y, float x)
{
    const float towards[] = {y, 0, 2 * y};
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return std::isnormal(y) ? std::nextafter(y, towards[(bits * 0x9e3779b1u >> 16) % 3]) : y;
}

inline float reciprocal_approx(float x)
{
    const float y = 1 / x;
    return std::fpclassify(y) == FP_SUBNORMAL ? std::copysign(0.0f, y) : approximate(y, x);
}

inline float exp2_approx(float x)
{
    const float y = exp2f(x);
    return std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : approximate(y, x);
}

#endif
