/* SPDX-License-Identifier: Apache-2.0 */
#include "base/tags.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/hash.h"
#include "rules/invariant.h"

epic_result tags_open(tag_table *table, uint32_t max_in_flight)
{
    *table = (tag_table){.size = TAGS_AT_FIRST, .max_in_flight = max_in_flight};
    table->entries = calloc(TAGS_AT_FIRST, sizeof *table->entries);
    if (!table->entries) return epic_fail(EPIC_ENOMEM, "no memory for the table of tags");
    pthread_mutex_init(&table->mutex, NULL);
    return EPIC_OK;
}

void tags_close(tag_table *table)
{
    if (!table->entries) return;
    free(table->entries);
    table->entries = NULL;
    pthread_mutex_destroy(&table->mutex);
}

/* Returns the entry of the tag. If the tag has no entry, returns the empty entry into which the
 * tag belongs. */
static tag_entry *find_entry(tag_entry *entries, size_t size, uint64_t tag)
{
    size_t i = (size_t)hash_mix(tag) & (size - 1);
    while (entries[i].next && entries[i].tag != tag) i = (i + 1) & (size - 1);
    return &entries[i];
}

/* Doubles the table and inserts all entries again. Returns false if out of memory. */
static bool grow_table(tag_table *table)
{
    const size_t size = table->size * 2;
    tag_entry *entries = calloc(size, sizeof *entries);
    if (!entries) return false;
    for (size_t i = 0; i < table->size; i++)
        if (table->entries[i].next)
            *find_entry(entries, size, table->entries[i].tag) = table->entries[i];
    free(table->entries);
    table->entries = entries;
    table->size = size;
    return true;
}

static epic_result check_locked(const tag_table *table, uint64_t tag)
{
    if (!table->max_in_flight)
        return epic_fail(EPIC_EINVAL,
                         "tag %llu: this rank has left the group, or its members are changing; "
                         "wait for the call that changes them",
                         (unsigned long long)tag);
    if (table->in_flight == table->max_in_flight)
        return epic_fail(EPIC_EINVAL,
                         "tag %llu: %u operations are in flight on this rank, which is "
                         "max_in_flight; wait for one of them, or open with a larger one",
                         (unsigned long long)tag, table->in_flight);
    const tag_entry *entry = find_entry(table->entries, table->size, tag);
    if (entry->next && entry->is_busy)
        return epic_fail(EPIC_EINVAL,
                         "tag %llu: an operation of this tag is in flight on this rank, so the "
                         "order of the two is undefined; use another tag, or wait for it",
                         (unsigned long long)tag);
    return EPIC_OK;
}

static epic_result begin_locked(tag_table *table, uint64_t tag, uint64_t *sequence)
{
    TRY(check_locked(table, tag));
    tag_entry *entry = find_entry(table->entries, table->size, tag);
    if (!entry->next) {
        if (table->used * 2 >= table->size && !grow_table(table))
            return epic_fail(EPIC_ENOMEM, "no memory for tag %llu after %zu others",
                             (unsigned long long)tag, table->used);
        entry = find_entry(table->entries, table->size, tag);
        *entry = (tag_entry){.tag = tag, .next = table->first + 1};
        table->used++;
    }
    entry->is_busy = true;
    *sequence = entry->next++ - 1;
    table->in_flight++;
    return EPIC_OK;
}

epic_result tags_begin(tag_table *table, uint64_t tag, uint64_t *sequence)
{
    pthread_mutex_lock(&table->mutex);
    const epic_result result = begin_locked(table, tag, sequence);
    pthread_mutex_unlock(&table->mutex);
    return result;
}

epic_result tags_check(tag_table *table, uint64_t tag)
{
    pthread_mutex_lock(&table->mutex);
    const epic_result result = check_locked(table, tag);
    pthread_mutex_unlock(&table->mutex);
    return result;
}

uint64_t tags_continue(tag_table *table, uint64_t tag)
{
    pthread_mutex_lock(&table->mutex);
    tag_entry *entry = find_entry(table->entries, table->size, tag);
    INVARIANT(entry->next && entry->is_busy);
    const uint64_t sequence = entry->next++ - 1;
    pthread_mutex_unlock(&table->mutex);
    return sequence;
}

void tags_end(tag_table *table, uint64_t tag)
{
    pthread_mutex_lock(&table->mutex);
    tag_entry *entry = find_entry(table->entries, table->size, tag);
    INVARIANT(entry->next && entry->is_busy && table->in_flight > 0);
    entry->is_busy = false;
    table->in_flight--;
    pthread_mutex_unlock(&table->mutex);
}

epic_result tags_pause(tag_table *table)
{
    pthread_mutex_lock(&table->mutex);
    const uint32_t in_flight = table->in_flight, before = table->max_in_flight;
    if (!in_flight) table->max_in_flight = 0;
    pthread_mutex_unlock(&table->mutex);
    if (!before) return epic_fail(EPIC_EINVAL, "epic_regroup is running: wait for its end");
    if (!in_flight) return EPIC_OK;
    return epic_fail(EPIC_EINVAL,
                     "%u operations are in flight on this rank: must be 0; wait for them",
                     in_flight);
}

void tags_forget(tag_table *table, uint64_t first)
{
    pthread_mutex_lock(&table->mutex);
    memset(table->entries, 0, table->size * sizeof *table->entries);
    table->used = 0;
    table->first = first;
    pthread_mutex_unlock(&table->mutex);
}

void tags_restart(tag_table *table, uint32_t max_in_flight)
{
    pthread_mutex_lock(&table->mutex);
    table->max_in_flight = max_in_flight;
    pthread_mutex_unlock(&table->mutex);
}
