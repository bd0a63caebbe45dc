/* SPDX-License-Identifier: Apache-2.0 */
/* Converts the options of a layer to words of an op header, and describes differing words. */
#include "exchange/layer_options.h"

#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "base/sized.h"

typedef enum option_kind {
    KIND_NUMBER,
    KIND_FLAG,
    KIND_REAL,   /* a double: two words */
    KIND_FLOAT,  /* a float: one word */
    KIND_CHOICE, /* an enum value, printed by name */
    KIND_LONG,   /* a 64-bit integer: two words */
    /* a weight: 0 if the pointer is NULL, otherwise 1 or a checksum
     * (layer_options_weight_word()) */
    KIND_WEIGHT
} option_kind;

typedef enum choice_list {
    NO_CHOICES,
    SCORES,
    GROUP_SCORES,
    GROUP_OTHERS,
    WEIGHT_RULES,
    NORMALIZES,
    ACTIVATIONS,
    WEIGHTINGS,
    TYPES
} choice_list;

/* The names of each choice_list, separated by spaces, in the order of the enum's values in
 * epic.h. An array of pointers would need relocations when the library is loaded. */
static const char choices[][72] = {
    [SCORES] = "softmax sigmoid sqrtsoftplus logits",
    [GROUP_SCORES] = "max sum",
    [GROUP_OTHERS] = "out zero",
    [WEIGHT_RULES] = "of_score softmax_chosen sigmoid_chosen sparsemixer",
    [NORMALIZES] = "none sum clamped",
    [ACTIVATIONS] = "silu gelu gelu_tanh relu2 clamped_swiglu clamped_silu",
    [WEIGHTINGS] = "late early input",
    [TYPES] = "bytes float32 bfloat16 float16 float64 e4m3"};

typedef struct option {
    char name[28];
    uint8_t kind;    /* an option_kind */
    uint8_t choices; /* a choice_list */
} option;

/* The options, in the order in which layer_options_fill() writes their words. Options and
 * values have the same names as in epic.torch and epic.jax. */
static const option options[] = {
    {"router.num_experts", KIND_NUMBER, NO_CHOICES},
    {"router.zero_experts", KIND_NUMBER, NO_CHOICES},
    {"router.top_k", KIND_NUMBER, NO_CHOICES},
    {"router.score", KIND_CHOICE, SCORES},
    {"router.num_groups", KIND_NUMBER, NO_CHOICES},
    {"router.topk_groups", KIND_NUMBER, NO_CHOICES},
    {"router.group_score", KIND_CHOICE, GROUP_SCORES},
    {"router.group_best", KIND_NUMBER, NO_CHOICES},
    {"router.group_others", KIND_CHOICE, GROUP_OTHERS},
    {"router.weight_rule", KIND_CHOICE, WEIGHT_RULES},
    {"router.normalize", KIND_CHOICE, NORMALIZES},
    {"router.eps", KIND_REAL, NO_CHOICES},
    {"router.norm_min", KIND_REAL, NO_CHOICES},
    {"router.jitter", KIND_REAL, NO_CHOICES},
    {"router.scale", KIND_REAL, NO_CHOICES},
    {"experts.hidden", KIND_NUMBER, NO_CHOICES},
    {"experts.inner", KIND_NUMBER, NO_CHOICES},
    {"experts.activation", KIND_CHOICE, ACTIVATIONS},
    {"experts.ungated", KIND_FLAG, NO_CHOICES},
    {"experts.interleaved", KIND_FLAG, NO_CHOICES},
    {"experts.weighting", KIND_CHOICE, WEIGHTINGS},
    {"experts.row_type", KIND_CHOICE, TYPES},
    {"experts.weight_type", KIND_CHOICE, TYPES},
    {"experts.limit", KIND_FLOAT, NO_CHOICES},
    {"experts.alpha", KIND_FLOAT, NO_CHOICES},
    {"shared", KIND_FLAG, NO_CHOICES},
    {"shared.inner", KIND_NUMBER, NO_CHOICES},
    {"shared.activation", KIND_CHOICE, ACTIVATIONS},
    {"shared.ungated", KIND_FLAG, NO_CHOICES},
    {"shared.interleaved", KIND_FLAG, NO_CHOICES},
    {"shared.weight_type", KIND_CHOICE, TYPES},
    {"shared.limit", KIND_FLOAT, NO_CHOICES},
    {"shared.alpha", KIND_FLOAT, NO_CHOICES},
    {"balance_coeff", KIND_REAL, NO_CHOICES},
    {"z_coeff", KIND_REAL, NO_CHOICES},
    {"sequence_tokens", KIND_LONG, NO_CHOICES},
    {"flag EPIC_SUM_DENSE", KIND_FLAG, NO_CHOICES},
    {"flag EPIC_DISPATCH_AGAIN", KIND_FLAG, NO_CHOICES},
    {"flag EPIC_LOSS_BY_CALLER", KIND_FLAG, NO_CHOICES},
    {"invariant", KIND_FLAG, NO_CHOICES},
};
enum { NUM_OPTIONS = sizeof options / sizeof *options };

/* The words about the weights: first a flag that is 1 if the words after it are checksums, then
 * one word for each value of the enum layer_weight. */
static const option weights[] = {
    {"EPIC_CHECK_WEIGHTS", KIND_FLAG, NO_CHOICES},
    {"w_gate", KIND_WEIGHT, NO_CHOICES},
    {"b_gate", KIND_WEIGHT, NO_CHOICES},
    {"bias", KIND_WEIGHT, NO_CHOICES},
    {"scale_of_expert", KIND_WEIGHT, NO_CHOICES},
    {"shared_gate_up", KIND_WEIGHT, NO_CHOICES},
    {"shared_down", KIND_WEIGHT, NO_CHOICES},
    {"shared_b_gate_up", KIND_WEIGHT, NO_CHOICES},
    {"shared_b_down", KIND_WEIGHT, NO_CHOICES},
    {"w_shared_gate", KIND_WEIGHT, NO_CHOICES},
    {"b_gate_up", KIND_WEIGHT, NO_CHOICES},
    {"b_down", KIND_WEIGHT, NO_CHOICES},
};
enum { NUM_WEIGHTS = sizeof weights / sizeof *weights };
_Static_assert(NUM_WEIGHTS == NUM_LAYER_WEIGHTS + 1, "a name for each layer_weight");

#define DOUBLE_WORDS 7 /* number of options that take two words */
_Static_assert(NUM_OPTIONS + DOUBLE_WORDS + NUM_WEIGHTS <= OPTION_WORDS,
               "epic_op_header.options");

/* index of the first word about the weights, which are the last words */
#define FIRST_WEIGHT (OPTION_WORDS - NUM_WEIGHTS)

static void put_word(uint32_t **at, uint32_t value)
{
    *(*at)++ = value;
}

static void put_long(uint32_t **at, uint64_t value)
{
    put_word(at, (uint32_t)value);
    put_word(at, (uint32_t)(value >> 32));
}

/* Writes a double as two words. Writes -0 as 0, because both values are equal. */
static void put_real(uint32_t **at, double value)
{
    uint64_t bits = 0;
    if (value != 0) memcpy(&bits, &value, sizeof bits);
    put_long(at, bits);
}

static void put_float(uint32_t **at, float value)
{
    uint32_t bits = 0;
    if (value != 0) memcpy(&bits, &value, sizeof bits);
    put_word(at, bits);
}

static void put_router(uint32_t **at, const epic_router *r)
{
    put_word(at, r->num_experts);
    put_word(at, r->zero_experts);
    put_word(at, r->top_k);
    put_word(at, r->score);
    put_word(at, r->num_groups);
    put_word(at, r->topk_groups);
    put_word(at, r->group_score);
    put_word(at, r->group_best);
    put_word(at, r->group_others);
    put_word(at, r->weight_rule);
    put_word(at, r->normalize);
    put_real(at, r->eps);
    put_real(at, r->norm_min);
    put_real(at, r->jitter);
    put_real(at, r->scale == 0 ? 1 : r->scale);
}

/* Writes limit and alpha of a clamped activation. Writes zeros for other activations, and if e
 * is NULL. */
static void put_limits(uint32_t **at, const epic_experts *e)
{
    const bool is_swiglu = e && e->activation == EPIC_CLAMPED_SWIGLU;
    const bool is_clamped = is_swiglu || (e && e->activation == EPIC_CLAMPED_SILU);
    const float usual = is_swiglu ? 7 : 10;
    put_float(at, !is_clamped ? 0 : e->limit != 0 ? e->limit : usual);
    put_float(at, !is_swiglu ? 0 : e->alpha != 0 ? e->alpha : 1.702f);
}

static void put_experts(uint32_t **at, const epic_experts *e)
{
    put_word(at, e->hidden);
    put_word(at, e->inner);
    put_word(at, e->activation);
    put_word(at, e->ungated);
    put_word(at, e->interleaved);
    put_word(at, e->weighting);
    put_word(at, e->row_type);
    put_word(at, e->weight_type ? e->weight_type : e->row_type);
    put_limits(at, e);
}

static void put_shared(uint32_t **at, const epic_experts *e)
{
    put_word(at, e != NULL);
    put_word(at, e ? e->inner : 0);
    put_word(at, e ? e->activation : 0);
    put_word(at, e ? e->ungated : 0);
    put_word(at, e ? e->interleaved : 0);
    put_word(at, !e ? 0 : e->weight_type ? e->weight_type : e->row_type);
    put_limits(at, e);
}

/* Writes the options to out->words (layer_options.h). Leaves out the options that may differ
 * between ranks: the number of slots, the number of local experts, the caller's GEMM function,
 * and EPIC_RECOMPUTE. */
void layer_options_fill(layer_options *out, const epic_moe *moe, const epic_router *router,
                        const epic_experts *experts, const epic_experts *shared)
{
    *out = (layer_options){0};
    uint32_t *at = out->words;
    put_router(&at, router);
    put_experts(&at, experts);
    put_shared(&at, shared);
    put_real(&at, moe->balance_coeff);
    put_real(&at, moe->z_coeff);
    put_long(&at, (uint64_t)moe->sequence_tokens);
    put_word(&at, (moe->flags & EPIC_SUM_DENSE) != 0);
    put_word(&at, (moe->flags & EPIC_DISPATCH_AGAIN) != 0);
    put_word(&at, (moe->flags & EPIC_LOSS_BY_CALLER) != 0);
    put_word(&at, (moe->flags & EPIC_INVARIANT) != 0);
    out->hash = hash_bytes(out->words, (size_t)(at - out->words) * sizeof *at) | 1;
}

epic_result layer_options_read(layer_options *out, const epic_moe *moe)
{
    epic_moe m;
    epic_router router;
    epic_experts experts, shared;
    *out = (layer_options){0};
    if (!moe) return EPIC_OK;
    TRY(READ_SIZED(&m, moe, sizeof m, "moe"));
    TRY(READ_SIZED(&router, m.router, sizeof router, "moe.router"));
    TRY(READ_SIZED(&experts, m.experts, sizeof experts, "moe.experts"));
    if (m.shared) TRY(READ_SIZED(&shared, m.shared, sizeof shared, "moe.shared"));
    layer_options_fill(out, &m, &router, &experts, m.shared ? &shared : NULL);
    return EPIC_OK;
}

uint32_t layer_options_weight_word(const void *data, int64_t bytes, bool is_checked)
{
    if (!data) return 0;
    if (!is_checked) return 1;
    const uint64_t sum = hash_bytes(data, (size_t)bytes);
    return (uint32_t)(sum ^ sum >> 32) | 2; /* "| 2": the word must be neither 0 nor 1 */
}

void layer_options_set_weights(layer_options *out, bool are_checked,
                               const uint32_t words[NUM_LAYER_WEIGHTS])
{
    uint32_t *at = out->words + FIRST_WEIGHT;
    at[0] = are_checked;
    memcpy(at + 1, words, NUM_LAYER_WEIGHTS * sizeof *words);
    out->weights_hash = hash_bytes(at, NUM_WEIGHTS * sizeof *at) | 1;
}

static int num_words_of(const option *o)
{
    return o->kind == KIND_REAL || o->kind == KIND_LONG ? 2 : 1;
}

/* Writes the name of an enum value, or its number if it has no name. */
static void describe_choice(char text[40], const option *o, uint32_t value)
{
    const char *word = choices[o->choices];
    for (uint32_t i = 0; i < value && *word; i++) {
        word += strcspn(word, " ");
        word += *word == ' ';
    }
    if (*word)
        snprintf(text, 40, "%.*s", (int)strcspn(word, " "), word);
    else
        snprintf(text, 40, "%u", value);
}

static void describe_value(char text[40], const option *o, const uint32_t *words)
{
    const uint64_t whole =
        num_words_of(o) == 2 ? (uint64_t)words[1] << 32 | words[0] : words[0];
    double real;
    float narrow;
    memcpy(&real, &whole, sizeof real);
    memcpy(&narrow, words, sizeof narrow);
    switch (o->kind) {
    case KIND_CHOICE:
        describe_choice(text, o, words[0]);
        break;
    case KIND_REAL:
        snprintf(text, 40, "%.17g", real);
        break;
    case KIND_FLOAT:
        snprintf(text, 40, "%.9g", (double)narrow);
        break;
    case KIND_WEIGHT:
        if (words[0] < 2)
            snprintf(text, 40, "%s", words[0] ? "given" : "not given");
        else
            snprintf(text, 40, "of checksum %08x", words[0]);
        break;
    default:
        snprintf(text, 40, "%lld", (long long)whole);
    }
}

/* Compares the words `a` of rank rank_a with the words `b` of rank rank_b, in the order of
 * `table`. Writes a text about the first option that differs. Returns false if no option
 * differs. */
static bool find_difference(const option *table, int count, const uint32_t *a, int rank_a,
                            const uint32_t *b, int rank_b, char *sentence, size_t size)
{
    for (int i = 0; i < count; i++) {
        const int n = num_words_of(&table[i]);
        if (memcmp(a, b, (size_t)n * sizeof *a) != 0) {
            char text_a[40], text_b[40];
            describe_value(text_a, &table[i], a);
            describe_value(text_b, &table[i], b);
            snprintf(sentence, size,
                     "%s is %s on rank %d and %s on rank %d: must be equal; pass the same on "
                     "every rank",
                     table[i].name, text_a, rank_a, text_b, rank_b);
            return true;
        }
        a += n;
        b += n;
    }
    return false;
}

void layer_options_describe_difference(const epic_op_header *a, int rank_a,
                                       const epic_op_header *b, int rank_b, char *sentence,
                                       size_t size)
{
    if (find_difference(options, NUM_OPTIONS, a->options, rank_a, b->options, rank_b, sentence,
                        size) ||
        find_difference(weights, NUM_WEIGHTS, a->options + FIRST_WEIGHT, rank_a,
                        b->options + FIRST_WEIGHT, rank_b, sentence, size))
        return;
    snprintf(sentence, size,
             "the layer's options of rank %d and rank %d differ: must be equal; pass the same "
             "on every rank",
             rank_a, rank_b);
}
