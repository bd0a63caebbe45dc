/* SPDX-License-Identifier: Apache-2.0 */
/* Tests two copies of the library in one process, as two Python wheels would load them: the
 * copy in this program, and libepic.so. Each copy has its own table of ranks. So ranks of
 * different copies cannot use the backend threads, which must refuse with a reason, and another
 * backend connects them. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "epic/epic.h"
#include "run.h"

/* The functions of one copy. */
typedef struct copy {
    epic_result (*open)(epic_context **, const epic_bootstrap *, const epic_config *, size_t);
    epic_result (*sum)(epic_context *, const epic_allreduce_sum_args *, size_t);
    const char *(*backend_name)(const epic_context *);
    const char *(*error)(const epic_context *);
    void (*close)(epic_context *);
} copy;

static copy copies[2] = {
    {epic_open_v1, epic_allreduce_sum_v1, epic_backend_name, epic_error, epic_close}};

static void *find(void *library, const char *name)
{
    void *at = dlsym(library, name);
    CHECK_SAY(at != NULL, "%s is not in libepic.so", name);
    return at;
}

/* Loads build/lib/libepic.so, found from build/tests/unit/copies. */
static bool load_second_copy(void)
{
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 64);
    if (!CHECK(length > 0)) return false;
    path[length] = 0;
    for (int up = 0; up < 3; up++) *strrchr(path, '/') = 0;
    strcat(path, "/lib/libepic.so");
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!CHECK_SAY(library != NULL, "%s", dlerror())) return false;
    copy *c = &copies[1];
    *(void **)&c->open = find(library, "epic_open_v1");
    *(void **)&c->sum = find(library, "epic_allreduce_sum_v1");
    *(void **)&c->backend_name = find(library, "epic_backend_name");
    *(void **)&c->error = find(library, "epic_error");
    *(void **)&c->close = find(library, "epic_close");
    return CHECK(c->open != copies[0].open);
}

typedef struct trial {
    const char *backend; /* requested backend; NULL: the first that can connect the ranks */
    const char *found;   /* expected backend; NULL: open must fail */
    bool mixed;          /* true: odd ranks use the second copy */
} trial;

typedef struct seat {
    epic_bootstrap bootstrap;
    const trial *t;
} seat;

static void *be_thread(void *self)
{
    const seat *s = self;
    const trial *t = s->t;
    const epic_bootstrap *bootstrap = &s->bootstrap;
    const copy *c = &copies[t->mixed ? bootstrap->rank % 2 : 0];
    const epic_config config = {
        .max_tokens = 4, .max_row_bytes = 64, .timeout_ms = 20000, .backend = t->backend};
    epic_context *ctx;
    const epic_result result = c->open(&ctx, bootstrap, &config, sizeof config);
    if (t->found && CHECK_SAY(result == EPIC_OK, "open: %s", c->error(ctx))) {
        float one = 1;
        const epic_allreduce_sum_args args = {.data = &one, .count = 1};
        CHECK_SAY(!strcmp(c->backend_name(ctx), t->found), "%s", c->backend_name(ctx));
        CHECK_SAY(c->sum(ctx, &args, sizeof args) == EPIC_OK, "sum: %s", c->error(ctx));
        CHECK_EQ(one, bootstrap->num_ranks);
    } else if (!t->found) {
        CHECK_SAY(result == EPIC_ENOTSUP, "open: %d", (int)result);
        CHECK_SAY(strstr(c->error(ctx), "different copies") != NULL, "%s", c->error(ctx));
    }
    c->close(ctx);
    return NULL;
}

/* The bootstrap uses shared memory, because a hub of epic_bootstrap_threads would belong to one
 * copy. */
static void run_copies(int num_ranks, const trial *t)
{
    seat seats[8];
    pthread_t threads[8];
    run_rendezvous *rendezvous = run_rendezvous_new(num_ranks);
    for (int r = 0; r < num_ranks; r++) {
        seats[r] = (seat){run_rendezvous_seat(rendezvous, r), t};
        pthread_create(&threads[r], NULL, be_thread, &seats[r]);
    }
    for (int r = 0; r < num_ranks; r++) pthread_join(threads[r], NULL);
    run_rendezvous_free(rendezvous);
}

int main(void)
{
    check_begin();
    run_alarm(60);
    if (!load_second_copy()) return check_end();
    run_copies(3, &(trial){.found = "threads"});
    run_copies(2, &(trial){.mixed = true, .found = "shm"});
    run_copies(5, &(trial){.mixed = true, .found = "shm"});
    run_copies(3, &(trial){.mixed = true, .backend = "threads"});
    return check_end();
}
