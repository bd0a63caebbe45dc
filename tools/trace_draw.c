/* SPDX-License-Identifier: Apache-2.0 */
/* Draws the load of experts over the steps as a heat map, as SVG or PNG. */
#include "trace_draw.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEFT = 90, TOP = 40, WIDTH = 720, MAX_ROWS = 256, MAX_CELLS = 24000 };

/* The cells of the picture, each with its load. */
typedef struct grid {
    int rows, columns;
    /* [rows, columns] load of the cell's experts, divided by the load that they would have if
     * it were even */
    double *share;
} grid;

/* Computes the shares. If there are more steps or experts than the picture has columns or rows,
 * a cell shows several of them. */
static grid make_grid(const trace *t)
{
    grid g = {(int)t->num_experts, (int)t->num_steps, NULL};
    if (g.columns < 1) tool_fail("the trace has no step to draw");
    if (g.rows > MAX_ROWS) g.rows = MAX_ROWS;
    if (g.columns > MAX_CELLS / g.rows) g.columns = MAX_CELLS / g.rows;
    g.share = tool_alloc((size_t)g.rows * (size_t)g.columns * sizeof *g.share);
    double *total = tool_alloc((size_t)g.columns * sizeof *total);
    int64_t *load = tool_alloc((t->num_experts + 1) * sizeof *load);
    for (int64_t i = 0; i < t->num_steps; i++) {
        const trace_step *s = &t->steps[i];
        const int64_t column = i * g.columns / t->num_steps;
        trace_count_load(s, load);
        for (int64_t e = 0; e < s->num_experts; e++) {
            g.share[e * g.rows / t->num_experts * g.columns + column] += (double)load[e];
            total[column] += (double)load[e];
        }
    }
    for (int i = 0; i < g.rows * g.columns; i++)
        if (total[i % g.columns] > 0) g.share[i] *= g.rows / total[i % g.columns];
    free(total), free(load);
    return g;
}

/* Returns the color of a share: white for 0, dark blue for a share of 2 (twice the even load)
 * or more. */
static void color_of(double share, unsigned char rgb[3])
{
    const double f = share > 2 ? 1 : share / 2;
    rgb[0] = (unsigned char)(250 - 242 * f);
    rgb[1] = (unsigned char)(252 - 200 * f);
    rgb[2] = (unsigned char)(255 - 135 * f);
}

static FILE *create_file(const char *path)
{
    FILE *out = fopen(path, "wb");
    if (!out) tool_fail("%s: %s", path, strerror(errno));
    return out;
}

static void finish_file(FILE *out, const char *path)
{
    const bool bad = ferror(out) != 0;
    if (fclose(out) || bad) tool_fail("%s: cannot write the file", path);
}

/* ------------------------------------------------------------------------------- SVG ---- */

static void draw_svg(const trace *t, const grid *g, const char *path)
{
    FILE *out = create_file(path);
    const double height = g->rows <= 32 ? 18 : g->rows <= 64 ? 10 : 4;
    const double width = (double)WIDTH / g->columns;
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%.0f\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
            "<text x=\"%d\" y=\"%d\">load of %u experts over %lld %s; white: none, "
            "dark: twice an even share</text>\n",
            LEFT + WIDTH + 20, TOP + height * g->rows + 20, LEFT, TOP - 14, t->num_experts,
            (long long)t->num_steps, t->has_loads ? "rows" : "steps");
    for (int row = 0; row < g->rows; row++) {
        const double y = TOP + height * row;
        if (row % (height < 10 ? 16 : 1) == 0)
            fprintf(out, "<text x=\"%d\" y=\"%.0f\" text-anchor=\"end\">expert %lld</text>\n",
                    LEFT - 6, y + 10, (long long)row * t->num_experts / g->rows);
        for (int c = 0; c < g->columns; c++) {
            unsigned char rgb[3];
            color_of(g->share[row * g->columns + c], rgb);
            fprintf(out,
                    "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
                    "fill=\"#%02x%02x%02x\"/>\n",
                    LEFT + width * c, y, width + 0.3, height > 9 ? height - 2 : height, rgb[0],
                    rgb[1], rgb[2]);
        }
    }
    fprintf(out, "</svg>\n");
    finish_file(out, path);
}

/* ------------------------------------------------------------------------------- PNG ---- */

static uint32_t crc_of(uint32_t crc, const unsigned char *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return crc;
}

static void put_word(unsigned char *to, uint32_t word)
{
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(word >> (24 - 8 * i));
}

static void put_chunk(FILE *out, const char *kind, const unsigned char *bytes, size_t size)
{
    unsigned char word[4];
    put_word(word, (uint32_t)size);
    fwrite(word, 1, 4, out);
    fwrite(kind, 1, 4, out);
    fwrite(bytes, 1, size, out);
    put_word(word, ~crc_of(crc_of(~0u, (const unsigned char *)kind, 4), bytes, size));
    fwrite(word, 1, 4, out);
}

/* Returns a zlib stream of stored blocks, without compression. */
static unsigned char *store_zlib(const unsigned char *bytes, size_t size, size_t *out_size)
{
    enum { MOST = 65535 };
    unsigned char *out = tool_alloc(size + (size / MOST + 1) * 5 + 6), *at = out;
    uint32_t a = 1, b = 0;
    *at++ = 0x78, *at++ = 0x01;
    for (size_t done = 0; done < size;) {
        const size_t more = size - done < MOST ? size - done : MOST;
        *at++ = done + more == size;
        *at++ = (unsigned char)more, *at++ = (unsigned char)(more >> 8);
        *at++ = (unsigned char)~more, *at++ = (unsigned char)(~more >> 8);
        memcpy(at, bytes + done, more);
        at += more;
        done += more;
    }
    for (size_t i = 0; i < size; i++) {
        a = (a + bytes[i]) % 65521;
        b = (b + a) % 65521;
    }
    put_word(at, b << 16 | a);
    *out_size = (size_t)(at + 4 - out);
    return out;
}

static void draw_png(const grid *g, const char *path)
{
    const int wide = g->columns < WIDTH ? (WIDTH + g->columns - 1) / g->columns : 1;
    const int high = g->rows <= 64 ? 8 : 3;
    const int width = g->columns * wide, height = g->rows * high;
    /* the first byte of each line selects the filter; 0: none */
    const size_t line = (size_t)width * 3 + 1;
    unsigned char *pixels = tool_alloc(line * (size_t)height);
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++)
            color_of(g->share[y / high * g->columns + x / wide],
                     pixels + line * (size_t)y + 1 + 3 * (size_t)x);
    size_t size;
    unsigned char *stream = store_zlib(pixels, line * (size_t)height, &size);
    unsigned char head[13] = {0};
    put_word(head, (uint32_t)width);
    put_word(head + 4, (uint32_t)height);
    head[8] = 8, head[9] = 2; /* 8 bits per sample, RGB */
    FILE *out = create_file(path);
    fwrite("\x89PNG\r\n\x1a\n", 1, 8, out);
    put_chunk(out, "IHDR", head, sizeof head);
    put_chunk(out, "IDAT", stream, size);
    put_chunk(out, "IEND", head, 0);
    finish_file(out, path);
    free(pixels);
    free(stream);
}

void trace_draw(const trace *t, const char *path)
{
    const size_t length = strlen(path);
    const bool png = length > 4 && !strcmp(path + length - 4, ".png");
    if (!png && (length < 5 || strcmp(path + length - 4, ".svg")))
        tool_fail("%s: the name must end in .svg or .png", path);
    grid g = make_grid(t);
    if (png)
        draw_png(&g, path);
    else
        draw_svg(t, &g, path);
    free(g.share);
}
