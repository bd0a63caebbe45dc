/* SPDX-License-Identifier: Apache-2.0 */
/* Emulates the fabric: NVLink between hosts. A test assigns its ranks to hosts with EPIC_HOST,
 * and the fabric connects all processes of this machine.
 *
 * EMULATED_FABRIC has one character for each device. The last character is valid also for all
 * later devices. A digit from 1 to 9 is the cluster of the device. A letter from 'a' on means
 * cluster 1, with a clique for each letter. 0: the GPU is in no cluster. -, or if the variable
 * is not set: NVML reports that the GPU does not support a fabric.
 * EMULATED_IMEX has the same form. 1 (default): the process may create fabric handles. 0: the
 * process has no IMEX channel. -: the driver does not support fabric handles. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inner.h"

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, COMPLETED = 3 };

typedef struct fabric_info { /* nvmlGpuFabricInfo_t */
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
} fabric_info;

/* Returns the character of a device in an environment variable. */
static char read_letter(const char *name, int device, char otherwise)
{
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    const size_t last = strlen(text) - 1;
    return text[(size_t)device < last ? (size_t)device : last];
}

CUresult check_fabric(int device)
{
    const char letter = read_letter("EMULATED_IMEX", device, '1');
    return letter == '1'   ? CUDA_SUCCESS
           : letter == '0' ? CUDA_ERROR_NOT_PERMITTED
                           : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    if (device < 0 || device >= num_devices()) return CUDA_ERROR_INVALID_DEVICE;
    if (attribute != CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
        return CUDA_ERROR_INVALID_VALUE;
    *value = check_fabric(device) != CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

int nvmlInit_v2(void)
{
    return NVML_SUCCESS;
}

int nvmlShutdown(void)
{
    return NVML_SUCCESS;
}

/* A handle is the number of the device plus 1. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle)
{
    unsigned device;
    if (sscanf(address, "FFFF:%x:00.0", &device) != 1) return NVML_INVALID_ARGUMENT;
    *handle = (void *)(uintptr_t)(device + 1);
    return NVML_SUCCESS;
}

int nvmlDeviceGetGpuFabricInfo(void *handle, fabric_info *out)
{
    const char letter = read_letter("EMULATED_FABRIC", (int)(uintptr_t)handle - 1, '-');
    if (letter == '-') return NVML_NOT_SUPPORTED;
    *out = (fabric_info){.status = NVML_SUCCESS, .state = COMPLETED};
    out->cluster[15] = (unsigned char)(letter >= 'a' ? 1 : letter - '0');
    out->clique = letter >= 'a' ? (unsigned)(letter - 'a') + 1 : 0;
    return NVML_SUCCESS;
}
