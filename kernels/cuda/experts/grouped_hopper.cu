/* SPDX-License-Identifier: Apache-2.0 */
/* Host code of the matrix products on Hopper's tensor cores; the kernel is in
 * experts/grouped_hopper.cuh.
 *
 *   p2p_gemm_is_slow        reports whether the kernel supports a product
 *   p2p_launch_hopper_gemm  makes tensor maps, chooses an instance of the kernel, launches it
 *   p2p_launch_hopper_slices  launches the instance for sums that are cut into slices
 *   p2p_load_hopper_gemm    loads all instances when a context is opened
 *
 * A tensor map describes a matrix to the hardware that copies boxes of it (TMA). The driver's
 * function cuTensorMapEncodeTiled makes it. Builds for other GPUs have empty kernels. */
#pragma nv_diag_suppress 177

#include "cuda/experts/grouped.h"

/* Without nvcc, for example in the emulator, only the functions at the end of this file are
 * compiled. They report that the kernels are missing. */
#if defined(__NVCC__)

#include "cuda/experts/grouped_hopper.cuh"

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion,
                                    CUtensorMapFloatOOBfill);

/* the driver's cuTensorMapEncodeTiled; NULL if the kernels cannot be used on this GPU */
static encode_function encode;

/* `count` matrices of the same shape, one after the other in memory. A TMA copy moves a box,
 * which has `lines` rows of 128 bytes. */
struct Matrix {
    const void *data;
    /* count: number of matrices; 0: one matrix, with a tensor map of two dimensions */
    int64_t columns, rows, count;
    uint32_t type; /* epic_type of the elements */
    int lines;
};

static cudaError_t make_map(CUtensorMap *map, const Matrix &m)
{
    const cuuint64_t element = m.type == EPIC_F32 ? 4 : m.type == EPIC_E4M3 ? 1 : 2;
    const CUtensorMapDataType type = m.type == EPIC_F32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : m.type == EPIC_E4M3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                     : m.type == EPIC_F16  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint64_t sizes[3] = {(cuuint64_t)m.columns, (cuuint64_t)m.rows,
                                 (cuuint64_t)(m.count ? m.count : 1)};
    const cuuint64_t strides[2] = {sizes[0] * element, sizes[0] * sizes[1] * element};
    const cuuint32_t box[3] = {(cuuint32_t)(128 / element), (cuuint32_t)m.lines, 1};
    const cuuint32_t each[3] = {1, 1, 1};
    const CUresult result =
        encode(map, type, m.count ? 3 : 2, (void *)m.data, sizes, strides, box, each,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

static bool has_slices(const p2p_gemm *g)
{
    return g->pass == EPIC_GEMM_FORWARD && g->slices > 1;
}

/* Sets *maps to the tensor maps of a, b and out. Their shapes and boxes depend on the pass. */
static cudaError_t make_maps(Maps *maps, const p2p_gemm *g)
{
    const bool weight = g->pass == EPIC_GEMM_WEIGHT, input = g->pass == EPIC_GEMM_INPUT;
    const int64_t slots = g->slabs.num_slots, experts = g->slabs.num_experts;
    const uint32_t type = g->row_type, y_type = g->y_type ? g->y_type : type;
    const Matrix a = {g->a, input ? g->n : g->k, slots, 0, type, weight ? 64 : BM};
    const Matrix b = {
        g->b, g->n, weight ? slots : g->k, weight ? 1 : experts, type, input ? 128 : 64};
    const Matrix out = {has_slices(g) ? g->slice_sums : g->out,
                        input ? g->k : g->n,
                        weight          ? g->k
                        : has_slices(g) ? slots * g->slices
                                        : slots,
                        weight ? experts : 1,
                        weight ? g->out_type : y_type,
                        64};
    Matrix a_few = a, out_few = out;
    a_few.lines = out_few.lines = FEW_LINES;
    cudaError_t error = make_map(&maps->a, a);
    if (error == cudaSuccess) error = make_map(&maps->b, b);
    if (error == cudaSuccess) error = make_map(&maps->out, out);
    if (error != cudaSuccess || weight) return error;
    error = make_map(&maps->a_few, a_few);
    return error == cudaSuccess ? make_map(&maps->out_few, out_few) : error;
}

static Job job_of(const p2p_gemm *g)
{
    Job job = {};
    job.slabs = g->slabs.slabs;
    job.tiles = g->slabs.tiles;
    job.num_tiles = g->slabs.num_tiles;
    job.bias = g->bias;
    job.bias_weights = g->bias_weights;
    job.a_scales = g->a_scales;
    job.b_scales = g->b_scales;
    job.out = g->out;
    job.addend = g->addend;
    job.columns = g->pass == EPIC_GEMM_INPUT ? g->k : g->n;
    job.lines = g->k;
    job.num_experts = g->slabs.num_experts;
    job.tiles_down = (int)((g->k + BM - 1) / BM);
    job.tiles_across = (int)((job.columns + BN - 1) / BN);
    const int block = g->row_type == EPIC_E4M3 ? 128 : BK;
    job.steps = (int)(((g->pass == EPIC_GEMM_INPUT ? g->n : g->k) + block - 1) / block);
    const bool many = g->pass != EPIC_GEMM_WEIGHT && job.num_experts >= 16;
    job.group = g->group ? g->group : many ? 2 : 8;
    job.accumulate = g->pass != EPIC_GEMM_FORWARD && g->accumulate;
    job.leave_padding = g->leave_padding;
    if (has_slices(g)) {
        job.out = g->slice_sums;
        job.num_experts = g->slices;
        job.lines = g->slabs.num_slots;
        job.steps = (int)(gate_slice_terms(g->k, g->slices) / BK);
    }
    return job;
}

/* Returns the number of CTAs to launch. The number is at most g->sms and at most the maximum
 * number of tiles. It is a multiple of `pair`, the number of CTAs of a cluster (1 or 2). */
static int ctas_of(const p2p_gemm *g, const Job &job, int pair)
{
    const int64_t down =
        g->pass == EPIC_GEMM_WEIGHT
            ? (int64_t)(job.tiles_down + pair - 1) / pair * job.num_experts
            : ((int64_t)g->slabs.most_tiles * (has_slices(g) ? g->slices : 1) + pair - 1) /
                  pair;
    const int64_t work = down * job.tiles_across, most = g->sms > pair ? g->sms / pair : 1;
    return (int)(work < most ? work : most) * pair;
}

template <class T, class Out, int PASS, int CTAS>
static cudaError_t launch_hopper(const p2p_gemm *g, cudaStream_t stream)
{
    const Job job = job_of(g);
    Maps maps;
    cudaError_t error = make_maps(&maps, g);
    if (error != cudaSuccess) return error;
    cudaLaunchConfig_t how = {};
    cudaLaunchAttribute attributes[2] = {{}, early_start()};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CTAS;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    how.gridDim = dim3((unsigned)ctas_of(g, job, CTAS));
    how.blockDim = dim3(THREADS);
    how.dynamicSmemBytes = SHARED_BYTES;
    how.stream = stream;
    how.attrs = attributes;
    how.numAttrs = can_start_early() ? 2 : 1;
    return launch_configured(how, hopper_kernel<T, Out, PASS, CTAS>, maps, job);
}

/* Converts an e4m3 product to an INPUT product (p2p_as_input()), and launches the INPUT
 * product. */
template <int CTAS> static cudaError_t launch_e4m3(const p2p_gemm *forward, cudaStream_t stream)
{
    const p2p_gemm g = p2p_as_input(*forward);
    return g.y_type == EPIC_F16
               ? launch_hopper<E4m3, __half, EPIC_GEMM_INPUT, CTAS>(&g, stream)
               : launch_hopper<E4m3, __nv_bfloat16, EPIC_GEMM_INPUT, CTAS>(&g, stream);
}

template <class T> static constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<__nv_bfloat16> = true;

/* Launches a product of matrices of the 16-bit type T. FORWARD products with float32 results
 * are compiled only for bf16. */
template <class T, int CTAS>
static cudaError_t launch_typed(const p2p_gemm *g, cudaStream_t stream)
{
    if constexpr (CTAS == 2 && IS_BF16<T>)
        if (g->pass == EPIC_GEMM_FORWARD && g->y_type == EPIC_F32)
            return launch_hopper<T, float, EPIC_GEMM_FORWARD, CTAS>(g, stream);
    if (g->pass == EPIC_GEMM_FORWARD)
        return launch_hopper<T, T, EPIC_GEMM_FORWARD, CTAS>(g, stream);
    if (g->pass == EPIC_GEMM_INPUT)
        return launch_hopper<T, T, EPIC_GEMM_INPUT, CTAS>(g, stream);
    if (g->out_type == EPIC_F32)
        return launch_hopper<T, float, EPIC_GEMM_WEIGHT, CTAS>(g, stream);
    return launch_hopper<T, T, EPIC_GEMM_WEIGHT, CTAS>(g, stream);
}

/* An INPUT product of bf16 may also add g->addend or the old values of out to its results. Such
 * a product runs without clusters, because only the instance without clusters contains this
 * addition. */
extern "C" cudaError_t p2p_launch_hopper_gemm(const p2p_gemm *g, cudaStream_t stream)
{
    if (g->row_type == EPIC_E4M3)
        return g->no_clusters ? launch_e4m3<1>(g, stream) : launch_e4m3<2>(g, stream);
    if (g->row_type == EPIC_F16) return launch_typed<__half, 2>(g, stream);
    const bool adds = g->pass == EPIC_GEMM_INPUT && (g->accumulate || g->addend);
    return g->no_clusters || adds ? launch_typed<__nv_bfloat16, 1>(g, stream)
                                  : launch_typed<__nv_bfloat16, 2>(g, stream);
}

extern "C" cudaError_t p2p_launch_hopper_slices(const p2p_gemm *g, cudaStream_t stream)
{
    return launch_hopper<__nv_bfloat16, float, PASS_SLICES, 2>(g, stream);
}

static bool is_16_byte_aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

/* Returns NULL if the kernel supports the e4m3 product `g`. Otherwise returns a text with the
 * reason why it does not. */
static const char *why_e4m3_is_slow(const p2p_gemm *g)
{
    const bool input = g->pass == EPIC_GEMM_INPUT;
    const int64_t columns = input ? g->k : g->n, depth = input ? g->n : g->k;
    if (g->y_type != EPIC_BF16 && g->y_type != EPIC_F16) return "results are not 16 bits";
    if (g->accumulate || g->addend) return "results are added to";
    if (depth % 16) return "16 does not divide a row";
    return columns % 8 ? "8 does not divide a result's row" : NULL;
}

extern "C" const char *p2p_gemm_is_slow(const p2p_gemm *g)
{
    const bool weight = g->pass == EPIC_GEMM_WEIGHT;
    if (!encode) return "no tensor cores of sm_90a";
    if (!is_16_byte_aligned(g->a) || !is_16_byte_aligned(g->b) || !is_16_byte_aligned(g->out) ||
        (uintptr_t)g->bias % 4 || (uintptr_t)g->addend % 4)
        return "an address that 16 does not divide";
    if (!g->slabs.num_slots) return "no slots";
    if (g->row_type == EPIC_E4M3) return why_e4m3_is_slow(g);
    if (g->row_type != EPIC_BF16 && g->row_type != EPIC_F16) return "rows are not 16 bits";
    const bool wide = g->pass == EPIC_GEMM_FORWARD && g->y_type == EPIC_F32 &&
                      g->row_type == EPIC_BF16 && !g->bias && !g->no_clusters;
    if (g->y_type && g->y_type != g->row_type && !wide) return "results are of another type";
    if (g->pass == EPIC_GEMM_INPUT && g->row_type == EPIC_F16 && (g->accumulate || g->addend))
        return "results are added to";
    if (!weight && g->weight_type != g->row_type) return "weights are not of the rows' type";
    if (weight && g->out_type != g->row_type && g->out_type != EPIC_F32)
        return "gradients are of another type";
    return g->k % 8 || g->n % 8 ? "8 does not divide k and n" : NULL;
}

/* Loads one instance of the kernel and raises its limit of dynamic shared memory. Sets *good to
 * false if the build has no code for this GPU. Without code for this GPU, the kernel's body is
 * empty, so the kernel has 0 bytes of static shared memory. */
template <class T, class Out, int PASS, int CTAS> static cudaError_t load_hopper(bool *good)
{
    cudaFuncAttributes attributes;
    auto kernel = hopper_kernel<T, Out, PASS, CTAS>;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    *good = *good && error == cudaSuccess && attributes.sharedSizeBytes > 0;
    if (*good)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     SHARED_BYTES);
    return error;
}

template <int CTAS> static cudaError_t load_e4m3(bool *good)
{
    cudaError_t error = load_hopper<E4m3, __nv_bfloat16, EPIC_GEMM_INPUT, CTAS>(good);
    return error == cudaSuccess ? load_hopper<E4m3, __half, EPIC_GEMM_INPUT, CTAS>(good)
                                : error;
}

template <class T, int CTAS> static cudaError_t load_typed(bool *good)
{
    cudaError_t error = load_hopper<T, T, EPIC_GEMM_FORWARD, CTAS>(good);
    if constexpr (CTAS == 2 && IS_BF16<T>)
        if (error == cudaSuccess) error = load_hopper<T, float, EPIC_GEMM_FORWARD, CTAS>(good);
    if (error == cudaSuccess) error = load_hopper<T, T, EPIC_GEMM_INPUT, CTAS>(good);
    if (error == cudaSuccess) error = load_hopper<T, T, EPIC_GEMM_WEIGHT, CTAS>(good);
    return error == cudaSuccess ? load_hopper<T, float, EPIC_GEMM_WEIGHT, CTAS>(good) : error;
}

/* Returns the driver's function cuTensorMapEncodeTiled, or NULL if the driver does not have it.
 * Asks the CUDA runtime for the function's address, because EPIC does not link with libcuda. */
static encode_function find_encode()
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    (void)cudaGetLastError();
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? (encode_function)function
               : NULL;
}

extern "C" cudaError_t p2p_load_hopper_gemm(void)
{
    bool good = true;
    cudaError_t error = load_typed<__nv_bfloat16, 2>(&good);
    if (error == cudaSuccess) error = load_typed<__nv_bfloat16, 1>(&good);
    if (error == cudaSuccess) error = load_typed<__half, 2>(&good);
    if (error == cudaSuccess) error = load_e4m3<2>(&good);
    if (error == cudaSuccess) error = load_e4m3<1>(&good);
    if (error == cudaSuccess) error = load_hopper<__nv_bfloat16, float, PASS_SLICES, 2>(&good);
    if (error == cudaSuccess && good) encode = find_encode();
    return error;
}

extern "C" int p2p_gemm_is_built(int major, int minor)
{
    for (const int architecture : {__CUDA_ARCH_LIST__})
        if (architecture == 900) return major == 9 && minor == 0;
    return 0;
}

#else

extern "C" int p2p_gemm_is_built(int, int)
{
    return 0;
}

extern "C" cudaError_t p2p_launch_hopper_gemm(const p2p_gemm *, cudaStream_t)
{
    return cudaErrorNotSupported;
}

extern "C" cudaError_t p2p_launch_hopper_slices(const p2p_gemm *, cudaStream_t)
{
    return cudaErrorNotSupported;
}

extern "C" const char *p2p_gemm_is_slow(const p2p_gemm *)
{
    return "no tensor cores of sm_90a";
}

extern "C" cudaError_t p2p_load_hopper_gemm(void)
{
    return cudaSuccess;
}

#endif
