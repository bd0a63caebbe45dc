/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the command line. */
#include "options.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "model.h"

static const char help[] =
    "usage: train_text [OPTION]... [PATH]...\n"
    "\n"
    "Trains a byte-level language model with two Mixture-of-Experts layers on text, with "
    "several\n"
    "processes of this machine that share the experts.  PATH: files, or folders whose text "
    "files\n"
    "are read; none: this repository's own documentation and sources.  A tenth of the text is\n"
    "held out.  Under mpirun or torchrun (RANK and WORLD_SIZE) each process is one rank.\n"
    "\n"
    "  --ranks N        processes: 1, 2, 4 or 8 (default 4)\n"
    "  --steps N        optimizer steps (default 500)\n"
    "  --stop N         stop after step N, the rates still those of --steps\n"
    "  --tokens N       bytes to predict in a step, over all ranks (default 2048)\n"
    "  --hidden N       width of the model (default 128)\n"
    "  --inner N        width inside an expert (default 256)\n"
    "  --rate X         highest rate of AdamW (default 0.003)\n"
    "  --seed N         of values, text positions and samples (default 1)\n"
    "  --data PATH      the same as PATH\n"
    "  --backend NAME   how ranks reach one another: shm, threads, mpi (default: the first "
    "that\n"
    "                   can; threads: the ranks are threads of one process)\n"
    "  --device NAME    cpu, or cuda: the whole model on GPUs, one for each rank (default 1 "
    "rank),\n"
    "                   rows in bf16: near the same losses, and not the same bits\n"
    "  --check          train with all ranks, then again with one, and compare the losses: "
    "exit\n"
    "                   status 1 if any bit differs (default 20 steps)\n"
    "  --save FILE      write a checkpoint at the end, and on Ctrl-C\n"
    "  --save-every N   and every N steps\n"
    "  --resume FILE    go on from a checkpoint, with any number of ranks; sizes, seed and "
    "rate\n"
    "                   are the checkpoint's\n"
    "  --every N        steps between two progress lines (default: 20 lines)\n"
    "  --sample N       bytes of each sample at the end (default 200; 0: none)\n"
    "  --picture FILE   where to write the SVG (none: do not; default:\n"
    "                   " TRAIN_TEXT_PICTURE ")\n"
    "  --log FILE       write the loss of each step, exactly\n"
    "  --help           this\n"
    "\n"
    "Ctrl-C ends all ranks after the same step; a second one kills them.\n"
    "Exit status: 0; 1: failure or difference; 2: usage; 130: ended by Ctrl-C.\n";

typedef struct whole {
    const char *name;
    size_t at;
    int64_t least, most;
} whole;

#define AT(field) offsetof(options, field)

static const whole wholes[] = {{"--ranks", AT(ranks), 1, LEAVES},
                               {"--steps", AT(steps), 1, MOST_STEPS},
                               {"--stop", AT(stop), 1, MOST_STEPS},
                               {"--tokens", AT(tokens), LEAVES, MOST_TOKENS},
                               {"--hidden", AT(hidden), LEAST_WIDTH, MOST_HIDDEN},
                               {"--inner", AT(inner), LEAST_WIDTH, MOST_INNER},
                               {"--seed", AT(seed), 0, INT64_MAX},
                               {"--every", AT(every), 1, MOST_STEPS},
                               {"--sample", AT(sample), 0, 100000},
                               {"--save-every", AT(save_every), 1, MOST_STEPS}};

typedef struct word {
    const char *name;
    size_t at;
} word;

static const word words[] = {{"--backend", AT(backend)}, {"--device", AT(device)},
                             {"--save", AT(save)},       {"--resume", AT(resume)},
                             {"--log", AT(log)},         {"--picture", AT(picture)}};

static bool read_whole(options *o, const whole *w, const char *text)
{
    char *end;
    errno = 0;
    const int64_t number = strtoll(text, &end, 10);
    if (errno || *end || end == text || number < w->least || number > w->most)
        return complain("%s is \"%s\": a number from %lld to %lld is needed", w->name, text,
                        (long long)w->least, (long long)w->most);
    memcpy((char *)o + w->at, &number, sizeof number);
    return true;
}

static bool read_rate(options *o, const char *text)
{
    char *end;
    o->rate = strtod(text, &end);
    if (*end == 0 && end != text && o->rate > 0 && o->rate <= 1) return true;
    return complain("--rate is \"%s\": a number above 0, at most 1, is needed", text);
}

static bool read_value(options *o, const char **data, const char *name, const char *text)
{
    for (size_t i = 0; i < sizeof wholes / sizeof *wholes; i++)
        if (!strcmp(name, wholes[i].name)) return read_whole(o, &wholes[i], text);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(name, words[i].name)) {
            if (!*text) return complain("%s is empty", name);
            memcpy((char *)o + words[i].at, &text, sizeof text);
            return true;
        }
    if (!strcmp(name, "--rate")) return read_rate(o, text);
    data[o->num_data++] = text;
    return true;
}

static bool takes_value(const char *name)
{
    for (size_t i = 0; i < sizeof wholes / sizeof *wholes; i++)
        if (!strcmp(name, wholes[i].name)) return true;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(name, words[i].name)) return true;
    return !strcmp(name, "--rate") || !strcmp(name, "--data");
}

static options_result read_all(options *o, const char **data, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help")) {
            fputs(help, stdout);
            return OPTIONS_HELP;
        } else if (!strcmp(argv[i], "--check")) {
            o->check = true;
        } else if (takes_value(argv[i])) {
            if (i + 1 == argc) {
                complain("%s needs a value; --help lists the options", argv[i]);
                return OPTIONS_BAD;
            }
            if (!read_value(o, data, argv[i], argv[i + 1])) return OPTIONS_BAD;
            i++;
        } else if (argv[i][0] == '-') {
            complain("unknown option: %s; --help lists them all", argv[i]);
            return OPTIONS_BAD;
        } else {
            data[o->num_data++] = argv[i];
        }
    }
    return OPTIONS_GOOD;
}

/* ------------------------------------------------------------------------------- rules ---- */

/* If the command line has not set the option (*said is negative), sets it to the value of the
 * checkpoint. Otherwise checks that both are equal. */
static bool agree(const char *name, int64_t *said, int64_t theirs, const char *path)
{
    if (*said >= 0 && *said != theirs)
        return complain("%s is %lld, and %s was made with %lld: leave it away", name,
                        (long long)*said, path, (long long)theirs);
    *said = theirs;
    return true;
}

static bool take_checkpoint(options *o)
{
    checkpoint_header h;
    if (!o->resume) return true;
    if (o->check) return complain("--check begins anew: it does not go with --resume");
    if (!checkpoint_look(o->resume, &h)) return false;
    if (!o->steps) o->steps = h.steps;
    if (!o->rate) o->rate = h.rate;
    if (o->rate != h.rate)
        return complain("--rate is %g, and %s was made with %g: leave it away", o->rate,
                        o->resume, h.rate);
    if (h.step >= (o->stop ? o->stop : o->steps))
        return complain("%s has done %lld steps already: more --steps%s are needed", o->resume,
                        (long long)h.step, o->stop ? " or a later --stop" : "");
    return agree("--hidden", &o->hidden, h.hidden, o->resume) &&
           agree("--inner", &o->inner, h.inner, o->resume) &&
           agree("--tokens", &o->tokens, h.tokens, o->resume) &&
           agree("--seed", &o->seed, h.seed, o->resume);
}

static void fill_in(options *o)
{
    if (!o->steps) o->steps = o->check ? 20 : 500;
    if (!o->stop || o->stop > o->steps) o->stop = o->steps;
    if (o->tokens < 0) o->tokens = 2048;
    if (o->hidden < 0) o->hidden = 128;
    if (o->inner < 0) o->inner = 256;
    if (o->seed < 0) o->seed = 1;
    if (!o->rate) o->rate = 0.003;
    if (!o->every) o->every = o->steps < 20 ? 1 : o->steps / 20;
    if (!o->picture) o->picture = TRAIN_TEXT_PICTURE;
    if (!strcmp(o->picture, "none")) o->picture = NULL;
}

static bool check_rules(const options *o)
{
    if (o->ranks & (o->ranks - 1))
        return complain("--ranks is %lld: 1, 2, 4 or 8 are possible", (long long)o->ranks);
    if (o->tokens % LEAVES)
        return complain("--tokens is %lld: a multiple of %d is needed", (long long)o->tokens,
                        LEAVES);
    if (o->hidden % LEAST_WIDTH)
        return complain("--hidden is %lld: a multiple of %d is needed", (long long)o->hidden,
                        LEAST_WIDTH);
    if (o->inner % LEAST_WIDTH)
        return complain("--inner is %lld: a multiple of %d is needed", (long long)o->inner,
                        LEAST_WIDTH);
    if (o->save_every && !o->save) return complain("--save-every needs --save");
    if (o->check && o->save) return complain("--check does not go with --save");
    if (!o->device || !strcmp(o->device, "cpu")) return true;
    if (strcmp(o->device, "cuda"))
        return complain("--device is \"%s\": cpu and cuda are possible", o->device);
    if (o->check || o->backend)
        return complain("--device cuda does not go with %s",
                        o->check ? "--check: its bits are others" : "--backend: it is gpu");
    return true;
}

options_result options_read(options *out, int argc, char **argv)
{
    const char **data = memory(argc * (int64_t)sizeof *data);
    *out = (options){
        .tokens = -1, .hidden = -1, .inner = -1, .seed = -1, .sample = 200, .data = data};
    options_result result = read_all(out, data, argc, argv);
    if (result != OPTIONS_GOOD) return result;
    if (!take_checkpoint(out)) return OPTIONS_BAD;
    fill_in(out);
    return check_rules(out) ? OPTIONS_GOOD : OPTIONS_BAD;
}
