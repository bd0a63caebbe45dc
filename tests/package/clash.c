/* SPDX-License-Identifier: Apache-2.0 */
/* A program with functions that have the names of internal functions of libepic.a. */
#include <stdio.h>

#include "epic/epic.h"

int gemm_f32(void);
int backend_find(void);

int gemm_f32(void)
{
    return 40;
}

int backend_find(void)
{
    return 2;
}

int main(void)
{
    printf("%s %d\n", epic_blas_name(), gemm_f32() + backend_find());
    return 0;
}
