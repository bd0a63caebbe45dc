/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays of integers in NumPy's .npy format, versions 1 to 3, in C order. */
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "npy.h"
#include "tool.h"

#define MAGIC "\x93NUMPY"
#define MAX_HEADER_BYTES 4096
#define MAX_VALUES (INT64_C(1) << 40)

/* Returns the text that follows the key and its colon in the header, which is a Python
 * dictionary. */
static const char *value_of(const char *path, const char *header, const char *key)
{
    const char *at = strstr(header, key);
    if (!at) tool_fail("%s: its header has no %s", path, key);
    at = strchr(at, ':');
    if (!at) tool_fail("%s: %s has no value", path, key);
    return at + 1 + strspn(at + 1, " ");
}

/* Reads the shape: at most 4 dimensions, each above 0. */
static void read_shape(npy *out, const char *path, const char *header)
{
    const char *at = value_of(path, header, "'shape'");
    if (*at++ != '(') tool_fail("%s: its shape is not a tuple", path);
    out->num = 1;
    for (char *end;; at = end) {
        at += strspn(at, " ,");
        if (*at == ')') break;
        if (out->dims == 4) tool_fail("%s: more than 4 dimensions", path);
        const long long size = strtoll(at, &end, 10);
        if (end == at || size < 0 || size > MAX_VALUES)
            tool_fail("%s: its shape cannot be read", path);
        if (size == 0) tool_fail("%s: its array is empty", path);
        if (out->num > MAX_VALUES / size)
            tool_fail("%s: more than %" PRId64 " values", path, MAX_VALUES);
        out->shape[out->dims++] = size;
        out->num *= size;
    }
}

/* Returns a little-endian integer of `size` bytes. */
static int64_t read_value(const unsigned char *bytes, size_t size, bool is_signed)
{
    uint64_t word = 0;
    memcpy(&word, bytes, size);
    if (is_signed && size < 8 && word >> (8 * size - 1)) word |= UINT64_MAX << (8 * size);
    /* INT64_MAX is too large for an id, so callers reject it like the original value */
    if (!is_signed && word > INT64_MAX) return INT64_MAX;
    return (int64_t)word;
}

/* Checks that the file contains as many values as its shape requires. Called before memory for
 * the values is allocated, because a damaged shape may be huge. */
static void check_length(const npy *a, const char *path, FILE *in, size_t size)
{
    struct stat file;
    const long at = ftell(in);
    const bool has_size = at >= 0 && fstat(fileno(in), &file) == 0;
    const int64_t there = has_size ? (int64_t)(file.st_size - at) / (int64_t)size : 0;
    if (there < a->num)
        tool_fail("%s: it ends after %" PRId64 " of %" PRId64 " values", path, there, a->num);
}

static void read_values(npy *out, const char *path, FILE *in, const char *type)
{
    static const char *const types[] = {"'|i1'", "'|u1'", "'<i1'", "'<u1'", "'<i2'",
                                        "'<u2'", "'<i4'", "'<u4'", "'<i8'", "'<u8'"};
    const size_t num_types = sizeof types / sizeof *types;
    size_t type_index = 0;
    while (type_index < num_types && strncmp(type, types[type_index], 5)) type_index++;
    if (type_index == num_types)
        tool_fail("%s: type %.*s: it must be little-endian integers", path,
                  (int)strcspn(type, ",}"), type);
    const bool is_signed = type[2] == 'i';
    const size_t size = (size_t)(type[3] - '0');
    check_length(out, path, in, size);
    out->values = tool_alloc((size_t)out->num * sizeof *out->values);
    unsigned char bytes[8];
    for (int64_t i = 0; i < out->num; i++) {
        if (fread(bytes, size, 1, in) != 1) tool_fail("%s: cannot read the file", path);
        out->values[i] = read_value(bytes, size, is_signed);
    }
}

void npy_read(npy *out, const char *path)
{
    unsigned char begin[12];
    char header[MAX_HEADER_BYTES + 1] = {0};
    memset(out, 0, sizeof *out);
    FILE *in = tool_open_file(path);
    if (fread(begin, 10, 1, in) != 1 || memcmp(begin, MAGIC, 6))
        tool_fail("%s: not .npy", path);
    size_t length = begin[8] + 256u * begin[9];
    if (begin[6] > 1) {
        if (fread(begin + 10, 2, 1, in) != 1) tool_fail("%s: it ends in its header", path);
        length += 65536u * begin[10] + 16777216u * begin[11];
    }
    if (begin[6] < 1 || begin[6] > 3 || length > MAX_HEADER_BYTES)
        tool_fail("%s: version %d of .npy with a header of %zu bytes is not supported", path,
                  begin[6], length);
    if (fread(header, 1, length, in) != length) tool_fail("%s: it ends in its header", path);
    if (strncmp(value_of(path, header, "'fortran_order'"), "False", 5))
        tool_fail("%s: in Fortran order; save numpy.ascontiguousarray of it", path);
    read_shape(out, path, header);
    read_values(out, path, in, value_of(path, header, "'descr'"));
    fclose(in);
}

void npy_write(const char *path, const int32_t *values, const int64_t *shape, int dims)
{
    char header[128], text[118];
    int at = snprintf(text, sizeof text, "{'descr': '<i4', 'fortran_order': False, 'shape': (");
    int64_t num = 1;
    for (int d = 0; d < dims; d++) {
        at += snprintf(text + at, sizeof text - (size_t)at, "%" PRId64 ", ", shape[d]);
        num *= shape[d];
    }
    snprintf(text + at, sizeof text - (size_t)at, "), }");
    memcpy(header, MAGIC "\x01\x00\x76\x00", 10);
    snprintf(header + 10, sizeof header - 10, "%-117s", text);
    header[127] = '\n';
    FILE *out = fopen(path, "wb");
    if (!out) tool_fail("%s: %s", path, strerror(errno));
    fwrite(header, 1, sizeof header, out);
    fwrite(values, sizeof *values, (size_t)num, out);
    const bool bad = ferror(out) != 0;
    if (fclose(out) || bad) tool_fail("%s: cannot write the file", path);
}
