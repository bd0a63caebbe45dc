/* SPDX-License-Identifier: Apache-2.0 */
/* Draws times over numbers of ranks, on logarithmic scales. */
#include <math.h>

#include "sim.h"

enum { LEFT = 70, TOP = 30, WIDTH = 600, HEIGHT = 300 };

/* The picture that is being drawn. */
typedef struct sheet {
    FILE *file;
    const shape *shapes;
    int num;
    double low, high; /* range of times, as logarithms to base 2 */
} sheet;

typedef double pick(const cost *c);

static double rows_of(const cost *c)
{
    return c->rows_us;
}

static double by_rank_of(const cost *c)
{
    return c->by_rank_us;
}

static double dense_of(const cost *c)
{
    return c->dense_us;
}

static double x_of(const sheet *s, int i)
{
    const double first = log2(s->shapes[0].ranks), last = log2(s->shapes[s->num - 1].ranks);
    const double span = last > first ? last - first : 1;
    return LEFT + WIDTH * (log2(s->shapes[i].ranks) - first) / span;
}

/* Returns the base-2 logarithm of a time in microseconds, but of at least one nanosecond. */
static double power_of(double time)
{
    return log2(time > 1e-3 ? time : 1e-3);
}

static double y_of(const sheet *s, double time)
{
    return TOP + HEIGHT * (1 - (power_of(time) - s->low) / (s->high - s->low));
}

static void draw_curve(const sheet *s, const cost *costs, pick *of, const char *style,
                       const char *name, int line)
{
    fprintf(s->file, "<polyline fill=\"none\" stroke-width=\"2\" %s points=\"", style);
    for (int i = 0; i < s->num; i++)
        fprintf(s->file, "%.1f,%.1f ", x_of(s, i), y_of(s, of(&costs[i])));
    fprintf(s->file,
            "\"/>\n<line x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\" stroke-width=\"2\" %s/>",
            LEFT + 10, LEFT + 40, TOP + 12 + 16 * line, TOP + 12 + 16 * line, style);
    fprintf(s->file, "<text x=\"%d\" y=\"%d\">%s</text>\n", LEFT + 46, TOP + 16 + 16 * line,
            name);
}

static void draw_axes(const sheet *s)
{
    for (double p = s->low; p <= s->high; p++)
        fprintf(s->file,
                "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.0f us</text>\n",
                LEFT, LEFT + WIDTH, y_of(s, exp2(p)), y_of(s, exp2(p)), LEFT - 6,
                y_of(s, exp2(p)) + 4, exp2(p));
    for (int i = 0; i < s->num; i++)
        fprintf(s->file, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n",
                x_of(s, i), TOP + HEIGHT + 18, s->shapes[i].ranks);
    fprintf(s->file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">ranks</text>\n",
            LEFT + WIDTH / 2, TOP + HEIGHT + 36);
}

static void find_range(sheet *s, const cost *costs)
{
    for (int i = 0; i < s->num; i++) {
        pick *const all[] = {rows_of, by_rank_of, dense_of};
        for (int j = 0; j < 3; j++) {
            const double p = power_of(all[j](&costs[i]));
            if (floor(p) < s->low) s->low = floor(p);
            if (ceil(p) > s->high) s->high = ceil(p);
        }
    }
    if (s->high <= s->low) s->high = s->low + 1;
}

bool draw_picture(const char *path, const shape *shapes, const cost *dispatch,
                  const cost *combine, int num)
{
    sheet s = {.file = fopen(path, "w"), .shapes = shapes, .num = num, .low = 60, .high = -60};
    if (!s.file) return false;
    find_range(&s, dispatch);
    find_range(&s, combine);
    fprintf(
        s.file,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
        "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" "
        "fill=\"white\"/>\n",
        LEFT + WIDTH + 40, TOP + HEIGHT + 50);
    draw_axes(&s);
    draw_curve(&s, dispatch, rows_of, "stroke=\"#26c\"", "dispatch, once for each host", 0);
    draw_curve(&s, combine, rows_of, "stroke=\"#c33\"", "combine", 1);
    draw_curve(&s, dispatch, by_rank_of, "stroke=\"#26c\" stroke-dasharray=\"6 3\"",
               "dispatch, once for each rank", 2);
    draw_curve(&s, dispatch, dense_of, "stroke=\"#999\" stroke-dasharray=\"2 3\"",
               "every row to every host", 3);
    fprintf(s.file, "</svg>\n");
    return fclose(s.file) == 0;
}
