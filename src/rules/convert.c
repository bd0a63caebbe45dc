/* SPDX-License-Identifier: Apache-2.0 */
#include "rules/convert.h"

#include <string.h>

#include "epic/epic.h"
#include "kernels/host/convert.h"

void convert_to_float(float *out, const void *in, uint32_t type, int64_t n)
{
    const uint16_t *half = in;
    if (type == EPIC_BF16)
        for (int64_t i = 0; i < n; i++) out[i] = float_of_bf16(half[i]);
    else if (type == EPIC_F16)
        for (int64_t i = 0; i < n; i++) out[i] = float_of_f16(half[i]);
    else if (n > 0)
        memcpy(out, in, (size_t)n * sizeof *out);
}

void convert_from_float(void *out, uint32_t type, const float *in, int64_t n)
{
    uint16_t *half = out;
    if (type == EPIC_BF16)
        for (int64_t i = 0; i < n; i++) half[i] = bf16_of_float(in[i]);
    else if (type == EPIC_F16)
        for (int64_t i = 0; i < n; i++) half[i] = f16_of_float(in[i]);
    else if (n > 0)
        memcpy(out, in, (size_t)n * sizeof *in);
}

int64_t convert_bytes(uint32_t type)
{
    switch (type) {
    case EPIC_F32:
        return 4;
    case EPIC_BF16:
    case EPIC_F16:
        return 2;
    case EPIC_F64:
        return 8;
    default:
        return 0;
    }
}

const char *convert_name(uint32_t type)
{
    switch (type) {
    case EPIC_F32:
        return "F32";
    case EPIC_BF16:
        return "BF16";
    case EPIC_F16:
        return "F16";
    case EPIC_F64:
        return "F64";
    default:
        return "a type that is not F32, BF16, F16 or F64";
    }
}
