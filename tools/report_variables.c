/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the environment variables that matter for EPIC, without secrets. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "info.h"
#include "report.h"

/* shorter secrets are not searched in texts, because any text may contain them by chance */
#define LEAST_SECRET 6
#define MAX_VARIABLES 1024

/* The variables of launchers that EPIC reads: first the ranks, in the order in which
 * epic_bootstrap_env() reads them (src/bootstrap/env.c). */
static const char *const rank_variables[] = {"RANK",
                                             "OMPI_COMM_WORLD_RANK",
                                             "PMI_RANK",
                                             "MV2_COMM_WORLD_RANK",
                                             "MVP_COMM_WORLD_RANK",
                                             "JSM_NAMESPACE_RANK",
                                             "FLUX_TASK_RANK",
                                             "SLURM_PROCID",
                                             "PMIX_RANK",
                                             "PALS_RANKID",
                                             "ALPS_APP_PE",
                                             "JOB_COMPLETION_INDEX"};
static const char *const other_variables[] = {"WORLD_SIZE",
                                              "MASTER_ADDR",
                                              "MASTER_PORT",
                                              "LOCAL_RANK",
                                              "TORCHELASTIC_USE_AGENT_STORE",
                                              "OMPI_COMM_WORLD_SIZE",
                                              "OMPI_COMM_WORLD_LOCAL_RANK",
                                              "PMI_SIZE",
                                              "MV2_COMM_WORLD_SIZE",
                                              "MVP_COMM_WORLD_SIZE",
                                              "JSM_NAMESPACE_SIZE",
                                              "FLUX_JOB_SIZE",
                                              "SLURM_STEP_NUM_TASKS",
                                              "SLURM_NTASKS",
                                              "SLURM_LOCALID",
                                              "SLURM_STEP_ID",
                                              "SLURM_STEPID",
                                              "SLURM_JOB_ID",
                                              "SLURM_JOBID",
                                              "SLURM_STEP_RESV_PORTS",
                                              "SLURM_STEP_NODELIST",
                                              "SLURM_STEP_NUM_NODES",
                                              "SLURM_JOB_NODELIST",
                                              "SLURM_NODELIST",
                                              "SLURM_NNODES",
                                              "SLURM_JOB_NUM_NODES"};
#define NUM_OF(list) (sizeof(list) / sizeof *(list))

/* --------------------------------------------------------------------------- secrets ---- */

/* Returns true if the text, up to `end`, contains a word that indicates a secret. */
static bool has_secret_word(const char *text, const char *end)
{
    static const char *const words[] = {"SECRET", "KEY",  "TOKEN", "PASS",
                                        "PWD",    "CRED", "AUTH",  "CERT",
                                        "COOKIE", "JWT",  "PRIV",  "SIGNATURE"};
    for (size_t i = 0; i < NUM_OF(words); i++) {
        const size_t length = strlen(words[i]);
        for (const char *at = text; end && at + length <= end; at++)
            if (strncasecmp(at, words[i], length) == 0) return true;
    }
    return false;
}

/* Returns true if the name of a variable contains a word that indicates a secret. */
static bool is_secret_name(const char *entry)
{
    return has_secret_word(entry, strchr(entry, '='));
}

/* Returns the value of the next variable whose value is a secret to search for, or NULL at the
 * end. *at is the position in the environment, 0 at the beginning. */
static const char *next_secret(int *at)
{
    for (; environ[*at]; ++*at) {
        const char *equal = strchr(environ[*at], '=');
        /* PWD and OLDPWD are folders, which may occur in any path */
        if (!equal || !is_secret_name(environ[*at]) || strlen(equal + 1) < LEAST_SECRET ||
            !strncmp(environ[*at], "PWD=", 4) || !strncmp(environ[*at], "OLDPWD=", 7))
            continue;
        ++*at;
        return equal + 1;
    }
    return NULL;
}

/* Returns true if a value contains a secret, or an '@', as in addresses with a password. Also
 * returns true if it contains a word that indicates a secret before a '=', as in "?token=". */
static bool has_secret(const char *value)
{
    int at = 0;
    for (const char *secret = next_secret(&at); secret; secret = next_secret(&at))
        if (strstr(value, secret)) return true;
    return strchr(value, '@') != NULL || has_secret_word(value, strrchr(value, '='));
}

/* Searches secrets in a copy of the text, because they may overlap: after one secret has been
 * replaced by asterisks, another one that overlaps it would not be found in the text. */
void report_hide_secrets(char *text)
{
    int at = 0;
    char *copy = strdup(text);
    for (const char *secret = next_secret(&at); copy && secret; secret = next_secret(&at))
        for (const char *found = strstr(copy, secret); found; found = strstr(found + 1, secret))
            memset(text + (found - copy), '*', strlen(secret));
    if (!copy) memset(text, '*', strlen(text)); /* no memory: hide everything */
    free(copy);
}

/* ------------------------------------------------------------------------- variables ---- */

static bool has_prefix(const char *entry, const char *prefix)
{
    return strncmp(entry, prefix, strlen(prefix)) == 0;
}

static bool is_listed(const char *entry, const char *const *names, size_t num)
{
    const char *end = strchr(entry, '=');
    for (size_t i = 0; end && i < num; i++)
        if (strlen(names[i]) == (size_t)(end - entry) && has_prefix(entry, names[i]))
            return true;
    return false;
}

/* Returns true for a variable of a launcher that EPIC reads. */
static bool is_launcher(const char *entry)
{
    return is_listed(entry, rank_variables, NUM_OF(rank_variables)) ||
           is_listed(entry, other_variables, NUM_OF(other_variables));
}

/* Returns true if the value of the variable may be shown. */
static bool is_shown(const char *entry)
{
    const bool is_known =
        has_prefix(entry, "EPIC_") || has_prefix(entry, "UCX_") || is_launcher(entry);
    return is_known && !is_secret_name(entry) && !has_secret(strchr(entry, '=') + 1);
}

static bool is_relevant(const char *entry)
{
    const bool is_prefixed =
        has_prefix(entry, "EPIC_") || has_prefix(entry, "UCX_") || has_prefix(entry, "NCCL_");
    return strchr(entry, '=') && (is_prefixed || is_launcher(entry));
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void print_entry(FILE *to, const char *entry)
{
    const char *equal = strchr(entry, '=');
    char name[256];
    snprintf(name, sizeof name, "%.*s", (int)(equal - entry), entry);
    info_text(to, name);
    if (is_shown(entry)) {
        fprintf(to, "=");
        info_text(to, equal + 1);
        fprintf(to, "\n");
    } else {
        fprintf(to, ": set, not shown\n");
    }
}

void report_variables(FILE *to)
{
    const char *list[MAX_VARIABLES];
    size_t num = 0;
    for (int i = 0; environ[i] && num < MAX_VARIABLES; i++)
        if (is_relevant(environ[i])) list[num++] = environ[i];
    qsort(list, num, sizeof *list, compare_entries);
    for (size_t i = 0; i < num; i++) print_entry(to, list[i]);
    if (num == 0) fprintf(to, "no variable of EPIC, UCX, NCCL or a launcher is set\n");
}

int report_rank_of_launcher(void)
{
    for (size_t i = 0; i < NUM_OF(rank_variables); i++) {
        const char *value = getenv(rank_variables[i]);
        if (value) return atoi(value);
    }
    return 0;
}
