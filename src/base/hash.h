/* SPDX-License-Identifier: Apache-2.0 */
/* Hashes for checksums of plans and for call signatures. These hashes are fast, but not
 * cryptographic. */
#ifndef EPIC_HASH_H
#define EPIC_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Mixes the bits of a word, so that every input bit changes about half of the output bits.
 * Different words have different results. This is the finalizer of MurmurHash3. */
static inline uint64_t hash_mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

/* Returns the hash of a sequence of words whose last word is x. `hash` is the hash of the words
 * before x. The order of the words matters. */
static inline uint64_t hash_join(uint64_t hash, uint64_t x)
{
    return hash_mix(hash ^ (x + 0x9e3779b97f4a7c15ull));
}

/* Returns a hash of n bytes. Hashes the words in four independent lanes (word n in lane n % 4),
 * so that only the memory bandwidth limits the speed, and joins the lanes at the end. */
static inline uint64_t hash_bytes(const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    uint64_t lane[4] = {n, 1, 2, 3}, word[4];
    for (; n >= sizeof word; n -= sizeof word, p += sizeof word) {
        memcpy(word, p, sizeof word);
        for (int i = 0; i < 4; i++) lane[i] = (lane[i] ^ word[i]) * 0x9fb21c651e98df25ull;
        for (int i = 0; i < 4; i++) lane[i] ^= lane[i] >> 29;
    }
    memset(word, 0, sizeof word);
    memcpy(word, p, n);
    uint64_t hash = 0;
    for (int i = 0; i < 4; i++) hash = hash_join(hash_join(hash, lane[i]), word[i]);
    return hash;
}

#endif
