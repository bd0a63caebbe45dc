/* SPDX-License-Identifier: Apache-2.0 */
/* Draws the picture as SVG: bits per byte above, each layer's load by expert below. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "history.h"

enum { LEFT = 80, WIDTH = 640, CURVES = 220, ROW = 18, TOP = 40, GAP = 50, MOST_CELLS = 160 };

typedef struct sheet {
    FILE *file;
    const history *h;
} sheet;

static double x_of(const sheet *s, int64_t step)
{
    return LEFT + (double)WIDTH * ((double)step + 0.5) / (double)s->h->num;
}

static double y_of(float bits)
{
    const double share = bits < 0 ? 0 : bits > 8 ? 1 : bits / 8;
    return TOP + CURVES * (1 - share);
}

static void label(const sheet *s, double x, double y, const char *anchor, const char *words)
{
    fprintf(s->file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor,
            words);
}

static void curve(const sheet *s, const float *bits, const char *style)
{
    fprintf(s->file, "<polyline fill=\"none\" %s points=\"", style);
    for (int64_t i = 0; i < s->h->num; i++)
        if (isfinite(bits[i])) fprintf(s->file, "%.1f,%.1f ", x_of(s, i), y_of(bits[i]));
    fprintf(s->file, "\"/>\n");
}

static void curves(const sheet *s)
{
    label(s, LEFT, TOP - 14, "start",
          "bits per byte: <tspan fill=\"#9ab\">training</tspan>, "
          "<tspan fill=\"#c33\">held-out</tspan>");
    for (int bits = 0; bits <= 8; bits += 2) {
        char words[8];
        snprintf(words, sizeof words, "%d", bits);
        label(s, LEFT - 8, y_of((float)bits) + 4, "end", words);
        fprintf(s->file,
                "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT,
                LEFT + WIDTH, y_of((float)bits), y_of((float)bits));
    }
    curve(s, s->h->training, "stroke=\"#9ab\"");
    curve(s, s->h->held_out, "stroke=\"#c33\" stroke-width=\"2\"");
}

/* Draws a cell: white for no load, dark blue for twice an even share or more. */
static void cell(const sheet *s, double x, double y, double width, double share)
{
    const double f = share > 2 ? 1 : share / 2;
    fprintf(s->file,
            "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\" "
            "fill=\"rgb(%d,%d,%d)\"/>\n",
            x, y, width + 0.3, ROW - 2, (int)(250 - 242 * f), (int)(252 - 200 * f),
            (int)(255 - 135 * f));
}

static void loads(const sheet *s, int layer, double top)
{
    const int64_t cells = s->h->num < MOST_CELLS ? s->h->num : MOST_CELLS;
    const double width = (double)WIDTH / (double)cells;
    char words[96];
    snprintf(words, sizeof words,
             "layer %d: load of the experts, from white: none, to dark: twice an even share",
             layer);
    label(s, LEFT, top - 8, "start", words);
    for (int e = 0; e < EXPERTS; e++) {
        snprintf(words, sizeof words, "expert %d", e);
        label(s, LEFT - 8, top + e * ROW + ROW - 5, "end", words);
        for (int64_t c = 0; c < cells; c++)
            cell(s, LEFT + width * (double)c, top + e * ROW, width,
                 history_share(s->h, c * s->h->num / cells, (c + 1) * s->h->num / cells, layer,
                               e));
    }
}

bool history_draw(const history *h, const char *path)
{
    const int layer_height = EXPERTS * ROW + GAP;
    const int height = TOP + CURVES + GAP + LAYERS * layer_height;
    const sheet s = {fopen(path, "w"), h};
    char words[96];
    if (!s.file) return complain("%s: %s: no picture was written", path, strerror(errno));
    fprintf(s.file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            LEFT + WIDTH + 20, height);
    curves(&s);
    for (int layer = 0; layer < LAYERS; layer++)
        loads(&s, layer, TOP + CURVES + GAP + layer * layer_height);
    snprintf(words, sizeof words, "steps %lld to %lld", (long long)h->first + 1,
             (long long)(h->first + h->num));
    label(&s, LEFT + WIDTH, height - GAP + 20, "end", words);
    fprintf(s.file, "</svg>\n");
    const bool good = !ferror(s.file);
    return !fclose(s.file) && good ? true : complain("%s: cannot be written", path);
}
