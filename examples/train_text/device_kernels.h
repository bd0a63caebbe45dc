/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of the model's dense part on a GPU.  Arrays of rows have the shape
 * [tokens, hidden].  A name with "narrow" means bf16. */
#ifndef TRAIN_DEVICE_KERNELS_H
#define TRAIN_DEVICE_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct device_shape { /* passed to every launch */
    cudaStream_t stream;
    int sms;
    int64_t tokens, hidden;
} device_shape;

/* How many values a byte has. In the functions below, `bytes` has the shape [tokens, places +
 * 1]. Each row has the bytes of the context, and at its end the byte to predict. */
enum { DEVICE_BYTES = 256 };

typedef struct device_gemm { /* c [m, n] = a [m, k] b [k, n]; transposed: as in product.h */
    int64_t m, n, k;
    const float *a, *b;
    float *c;
    int transpose_a, transpose_b;
} device_gemm;

typedef struct device_norm {
    const float *x, *gain;
    float *inverse; /* [tokens]: 1 / the size of a row; input in backward */
    /* The rows after norm or, in backward, their gradient. One of the two is NULL. */
    float *h;
    void *narrow_h;
    float *d_x, *d_gain; /* backward: d_x is added to, d_gain is written */
} device_norm;

typedef struct device_adam {
    float *value, *first, *second;
    void *narrow; /* a copy of value */
    const float *gradient;
    int64_t count;
    float keep, rate, unbias2;
    float beta1, beta2, epsilon;
} device_adam;

cudaError_t device_embed(const device_shape *s, const unsigned char *bytes, int places,
                         const float *table, float *x);
cudaError_t device_embed_backward(const device_shape *s, const unsigned char *bytes, int places,
                                  const float *d_x, float *d_table);
cudaError_t device_norm_rows(const device_shape *s, const device_norm *n);
cudaError_t device_norm_backward(const device_shape *s, const device_norm *n);
/* to = x + narrow */
cudaError_t device_add(const device_shape *s, float *to, const float *x, const void *narrow);
cudaError_t device_narrow(const device_shape *s, void *narrow, const float *x, int64_t count);
cudaError_t device_multiply(const device_shape *s, const device_gemm *g);
/* Computes loss = scale * (sum over the tokens of -log softmax(logits)[byte to predict]).
 * Replaces the logits by their gradient.  token_loss [tokens] is temporary memory. */
cudaError_t device_judge(const device_shape *s, float *logits, const unsigned char *bytes,
                         int places, float scale, float *token_loss, float *loss);
cudaError_t device_move(const device_shape *s, const device_adam *a);

#ifdef __cplusplus
}
#endif
#endif
