/* SPDX-License-Identifier: Apache-2.0 */
/* One queue of messages per seat (rank number of the group), and one mutex for all queues. */
#include "backend/threads/mailbox.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct message_node {
    struct message_node *next;
    int from;
    unsigned char bytes[];
} message_node;

typedef struct queue {
    message_node *first;
    message_node **end; /* address of the pointer that will point to the next message */
    bool is_gone;       /* true: the rank on the seat has closed its context */
} queue;

struct mailbox {
    int num_users; /* the callers hold a lock (mailbox.h) */
    int num_seats;
    pthread_mutex_t mutex; /* guards everything below */
    pthread_cond_t changed;
    queue queues[];
};

mailbox *mailbox_new(int num_seats)
{
    mailbox *m = calloc(1, sizeof *m + (size_t)num_seats * sizeof *m->queues);
    pthread_condattr_t monotonic;
    if (!m) return NULL;
    pthread_mutex_init(&m->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&m->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    m->num_users = 1;
    m->num_seats = num_seats;
    for (int s = 0; s < num_seats; s++) m->queues[s].end = &m->queues[s].first;
    return m;
}

void mailbox_retain(mailbox *m)
{
    m->num_users++;
}

void mailbox_release(mailbox *m)
{
    if (--m->num_users > 0) return;
    for (int s = 0; s < m->num_seats; s++)
        for (message_node *node = m->queues[s].first, *next; node; node = next) {
            next = node->next;
            free(node);
        }
    pthread_cond_destroy(&m->changed);
    pthread_mutex_destroy(&m->mutex);
    free(m);
}

void mailbox_send(mailbox *m, int from, int to, const void *message, size_t bytes)
{
    message_node *node = malloc(sizeof *node + bytes);
    /* Out of memory: the message is lost. The sender repeats its request, or its call fails at
     * the deadline. */
    if (!node) return;
    node->next = NULL;
    node->from = from;
    memcpy(node->bytes, message, bytes);
    pthread_mutex_lock(&m->mutex);
    *m->queues[to].end = node;
    m->queues[to].end = &node->next;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->mutex);
}

static struct timespec time_after(uint32_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += (long)(ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

bool mailbox_receive(mailbox *m, int seat, int *from, void *message, size_t bytes, uint32_t ms)
{
    const struct timespec limit = time_after(ms);
    queue *q = &m->queues[seat];
    pthread_mutex_lock(&m->mutex);
    if (!q->first) pthread_cond_timedwait(&m->changed, &m->mutex, &limit);
    message_node *node = q->first;
    if (node && !(q->first = node->next)) q->end = &q->first;
    pthread_mutex_unlock(&m->mutex);
    if (!node) return false;
    *from = node->from;
    memcpy(message, node->bytes, bytes);
    free(node);
    return true;
}

void mailbox_mark_gone(mailbox *m, int seat)
{
    pthread_mutex_lock(&m->mutex);
    __atomic_store_n(&m->queues[seat].is_gone, true, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->mutex);
}

bool mailbox_is_gone(mailbox *m, int seat)
{
    return __atomic_load_n(&m->queues[seat].is_gone, __ATOMIC_ACQUIRE);
}
