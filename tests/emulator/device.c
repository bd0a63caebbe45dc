/* SPDX-License-Identifier: Apache-2.0 */
/* Emulated devices. Each has SMs, which are threads that run the CTAs of kernels in launch
 * order. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inner.h"

typedef struct running { /* a kernel whose last CTA has not begun yet */
    const launch *work;
    int begun, ended;
    bool backward; /* true: the last CTA begins first */
    pthread_cond_t done;
    struct running *next;
} running;

typedef struct gpu {
    int num_sms;
    running *first; /* guarded by mutex, like the fields below */
    pthread_cond_t work;
} gpu;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static gpu gpus[MAX_DEVICES];
/* guarded by mutex: how many CTAs of a kernel may begin; 0: all */
static int held[MAX_DEVICES];
static __thread int device_now;
static struct {
    const void *kernel;
    int bytes;
} asked[MAX_KERNELS]; /* guarded by mutex: shared memory that each kernel has requested */

static int number_of(const char *name, int otherwise, int most)
{
    const char *text = getenv(name);
    const int number = text ? atoi(text) : otherwise;
    return number >= 1 && number <= most ? number : otherwise;
}

int num_devices(void)
{
    return number_of("EMULATED_GPUS", 1, MAX_DEVICES);
}

int num_sms(void)
{
    return number_of("EMULATED_SMS", 132, 512);
}

int current_device(void)
{
    return device_now;
}

/* ----------------------------------------------------------------------------- kernels ---- */

static running *with_work(const gpu *g)
{
    const int most = held[g - gpus];
    running *r = g->first;
    while (r && (r->begun == r->work->ctas || (most && r->begun >= most))) r = r->next;
    return r;
}

void emulator_hold(int device, int ctas)
{
    pthread_mutex_lock(&mutex);
    held[device] = ctas;
    if (gpus[device].num_sms) pthread_cond_broadcast(&gpus[device].work);
    pthread_mutex_unlock(&mutex);
}

static void *be_sm(void *self)
{
    gpu *g = self;
    device_now = (int)(g - gpus);
    pthread_mutex_lock(&mutex);
    for (;;) {
        running *r = with_work(g);
        if (!r) {
            pthread_cond_wait(&g->work, &mutex);
            continue;
        }
        /* the last CTA sends the announcements, so it begins first if CTAs are held back */
        if (!r->begun) r->backward = held[g - gpus] != 0;
        const int cta = r->backward ? r->work->ctas - 1 - r->begun : r->begun;
        r->begun++;
        pthread_mutex_unlock(&mutex);
        run_cta(r->work, cta);
        pthread_mutex_lock(&mutex);
        if (++r->ended == r->work->ctas) pthread_cond_signal(&r->done);
    }
    return NULL;
}

static void start_sms(gpu *g)
{
    pthread_cond_init(&g->work, NULL);
    for (; g->num_sms < num_sms(); g->num_sms++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, be_sm, g)) emulator_die("no thread for an SM");
        pthread_detach(thread);
    }
}

void run_kernel(int device, const launch *work)
{
    gpu *g = &gpus[device];
    running r = {.work = work, .done = PTHREAD_COND_INITIALIZER};
    running **link = &g->first;
    pthread_mutex_lock(&mutex);
    if (!g->num_sms) start_sms(g);
    while (*link) link = &(*link)->next;
    *link = &r;
    for (int i = 0; i < work->ctas && i < g->num_sms; i++) pthread_cond_signal(&g->work);
    while (r.ended < work->ctas) pthread_cond_wait(&r.done, &mutex);
    for (link = &g->first; *link != &r;) link = &(*link)->next;
    *link = r.next;
    pthread_mutex_unlock(&mutex);
    pthread_cond_destroy(&r.done);
    see_stores(device);
}

cudaError_t emulator_set_shared(const void *kernel, int bytes)
{
    cudaError_t error = cudaErrorMemoryAllocation;
    if (bytes < 0 || bytes > SHARED_BYTES) return cudaErrorInvalidValue;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < MAX_KERNELS && error; i++) {
        if (asked[i].kernel && asked[i].kernel != kernel) continue;
        asked[i].kernel = kernel;
        asked[i].bytes = bytes;
        error = cudaSuccess;
    }
    pthread_mutex_unlock(&mutex);
    return error;
}

int most_shared(const void *kernel)
{
    int bytes = SHARED_UNASKED;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < MAX_KERNELS && asked[i].kernel; i++)
        if (asked[i].kernel == kernel && asked[i].bytes > bytes) bytes = asked[i].bytes;
    pthread_mutex_unlock(&mutex);
    return bytes;
}

/* ----------------------------------------------------------------------------- queries ---- */

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorAlreadyMapped:
        return "resource already mapped";
    case cudaErrorPeerAccessAlreadyEnabled:
        return "peer access is already enabled";
    default:
        return "operation not supported";
    }
}

/* Each call returns its own error, and launches are checked where they are made. */
cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = num_devices();
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = device_now;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
    device_now = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    const char *shared = getenv("EMULATED_SHARED");
    if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "a GPU of threads");
    properties->uuid.bytes[0] = (char)(device + 1);
    properties->major = 9;
    properties->multiProcessorCount = num_sms();
    properties->sharedMemPerBlockOptin = shared ? (size_t)atoi(shared) : 227 << 10;
    return cudaSuccess;
}

/* An emulated GPU has an address that no PCI device has. */
cudaError_t cudaDeviceGetPCIBusId(char *address, int bytes, int device)
{
    if (device < 0 || device >= num_devices() || bytes < 13) return cudaErrorInvalidValue;
    snprintf(address, (size_t)bytes, "FFFF:%02X:00.0", device & 0xff);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
    if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorNotSupported;
    *value = num_sms();
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (device < 0 || device >= num_devices() || peer < 0 || peer >= num_devices())
        return cudaErrorInvalidDevice;
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)flags;
    return peer < 0 || peer >= num_devices() ? cudaErrorInvalidDevice : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    finish_streams(device_now);
    return cudaSuccess;
}
