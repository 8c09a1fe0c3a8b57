/* A CUDA driver without a device: records the calls that Shorthaul makes and fails where a test asks.

   Device memory is the host's. A call is recorded as one line. mock_fail(call, code, after) lets the
   call fail with a code once it was made `after` times more. With OLD_DRIVER it is one for CUDA 11.8. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char log_text[1 << 20];
static size_t log_bytes;
static char fail_call[64];
static int fail_code, fail_after;
static int device_count = 2, major = 9, minor = 0, pointer_device;
static int capturing, n_params = 2;
static void *current;
static char contexts[8];

struct function { char name[64]; };
static struct function functions[4096];
static int n_functions;

static int note(const char *call, const char *format, ...) {
    va_list args;
    log_bytes += snprintf(log_text + log_bytes, sizeof log_text - log_bytes, "%s", call);
    va_start(args, format);
    log_bytes += vsnprintf(log_text + log_bytes, sizeof log_text - log_bytes, format, args);
    va_end(args);
    log_bytes += snprintf(log_text + log_bytes, sizeof log_text - log_bytes, "\n");
    if (fail_code && !strcmp(call, fail_call) && fail_after-- == 0) {
        int code = fail_code;
        fail_code = 0;
        return code;
    }
    return 0;
}

const char *mock_log(void) { return log_text; }
void mock_reset(void) {
    log_bytes = 0, log_text[0] = 0, fail_code = 0, device_count = 2, major = 9, minor = 0;
    pointer_device = 0, capturing = 0, n_functions = 0;
}
void mock_fail(const char *call, int code, int after) {
    snprintf(fail_call, sizeof fail_call, "%s", call);
    fail_code = code, fail_after = after;
}
void mock_device(int count, int a, int b) { device_count = count, major = a, minor = b; }
void mock_pointer_device(int ordinal) { pointer_device = ordinal; }
/* How many arguments of a launch are recorded; a kernel has at least as many. */
void mock_params(int n) { n_params = n; }
void mock_capturing(int is) { capturing = is; }
void mock_current(int ordinal) { current = ordinal < 0 ? NULL : &contexts[ordinal]; }

int cuInit(unsigned flags) { return note("cuInit", " %u", flags); }
#ifdef OLD_DRIVER
int cuDriverGetVersion(int *version) { *version = 11080; return 0; }
#else
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
#endif
int cuDeviceGetCount(int *n) { *n = device_count; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int n, int device) {
    snprintf(name, n, "Mock %d", device);
    return 0;
}
int cuDeviceTotalMem_v2(size_t *n, int device) { (void)device; *n = 1 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    *value = which == 75 ? major : which == 76 ? minor : which == 97 ? 232448 : 132;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts[device];
    return note("cuDevicePrimaryCtxRetain", " %d", device);
}
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxPushCurrent_v2(void *context) {
    current = context;
    return note("cuCtxPushCurrent", " %d", (int)((char *)context - contexts));
}
int cuCtxPopCurrent_v2(void **context) {
    *context = current, current = NULL;
    return note("cuCtxPopCurrent", "");
}
int cuCtxSynchronize(void) { return note("cuCtxSynchronize", ""); }
int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return note("cuModuleLoadData", " %.8s", (const char *)image);
}
int cuModuleUnload(void *module) { (void)module; return note("cuModuleUnload", ""); }
int cuModuleGetFunction(struct function **function, void *module, const char *name) {
    (void)module;
    *function = &functions[n_functions++];
    snprintf((*function)->name, sizeof (*function)->name, "%s", name);
    return note("cuModuleGetFunction", " %s", name);
}
int cuFuncGetAttribute(int *value, int which, struct function *function) {
    (void)which, (void)function;
    *value = 32;
    return 0;
}
int cuFuncSetAttribute(struct function *function, int which, int value) {
    return note("cuFuncSetAttribute", " %s %d %d", function->name, which, value);
}
int cuMemAlloc_v2(uint64_t *address, size_t n) {
    *address = (uint64_t)(uintptr_t)malloc(n);
    return note("cuMemAlloc", " %zu", n);
}
int cuMemFree_v2(uint64_t address) { free((void *)(uintptr_t)address); return note("cuMemFree", ""); }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) {
    memcpy((void *)(uintptr_t)to, from, n);
    return note("cuMemcpyHtoD", " %zu", n);
}
int cuPointerGetAttribute(void *value, int which, uint64_t address) {
    (void)which, (void)address;
    *(int *)value = pointer_device;
    return pointer_device < 0 ? 1 : 0;
}
int cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = capturing; return 0; }
int cuStreamSynchronize(void *stream) { return note("cuStreamSynchronize", " %zu", (size_t)stream); }
/* Events: the n-th that is recorded passes n milliseconds after the start. */
struct event { float at; };
static int n_events;
int cuEventCreate(struct event **event, unsigned flags) {
    (void)flags;
    *event = calloc(1, sizeof **event);
    return 0;
}
int cuEventRecord(struct event *event, void *stream) {
    event->at = ++n_events;
    return note("cuEventRecord", " stream %zu", (size_t)stream);
}
int cuEventSynchronize(struct event *event) { (void)event; return note("cuEventSynchronize", ""); }
int cuEventElapsedTime(float *milliseconds, struct event *from, struct event *to) {
    *milliseconds = to->at - from->at;
    return 0;
}
int cuEventDestroy_v2(struct event *event) { free(event); return 0; }
int cuLaunchKernel(struct function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
    (void)extra;
    char args[256] = "";
    for (int i = 0; i < n_params; i++)
        snprintf(args + strlen(args), sizeof args - strlen(args), " %llx",
                 *(unsigned long long *)params[i]);
    return note("cuLaunchKernel", " %s grid %u %u %u block %u %u %u shared %u stream %zu args%s", f->name,
                gx, gy, gz, bx, by, bz, shared, (size_t)stream, args);
}
#ifndef OLD_DRIVER
/* Which of cuda.h's conditions for 16-bit elements in swizzled lines of 128 bytes a map does not keep. */
static const char *broken(const void *map, int type, unsigned rank, uint64_t address, const uint64_t *sizes,
                          const uint64_t *strides, const unsigned *box, const unsigned *steps) {
    if ((uint64_t)(uintptr_t)map % 64) return "map";
    if (type != 6 && type != 9) return "type";
    if (rank < 1 || rank > 5) return "rank";
    if (address % 16) return "address";
    for (unsigned i = 0; i < rank; i++) {
        if (!sizes[i] || sizes[i] > 1ull << 32) return "size";
        if (!box[i] || box[i] > 256) return "box";
        if (!steps[i] || steps[i] > 8) return "step";
    }
    for (unsigned i = 0; i + 1 < rank; i++)
        if (strides[i] % 16 || strides[i] >= 1ull << 40) return "stride";
    if (strides[0] < sizes[0] * 2) return "line";
    for (unsigned i = 1; i + 1 < rank; i++)
        if (strides[i] % strides[i - 1] || strides[i] / strides[i - 1] < sizes[i]) return "plane";
    if (box[0] * 2 % 16 || box[0] * 2 > 128) return "line of a box";
    return NULL;
}
/* A map holds the address first, so that a launch's line shows it. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                           int swizzle, int promotion, int beyond) {
    const uint64_t at = (uint64_t)(uintptr_t)address;
    const char *problem = broken(map, type, rank, at, sizes, strides, box, steps);
    if (problem) {
        note("cuTensorMapEncodeTiled", " refused: %s", problem);
        return 1;
    }
    memset(map, 0, 128);
    map[0] = at;
    return note("cuTensorMapEncodeTiled",
                " type %d rank %u at %llx sizes %llu %llu %llu strides %llu %llu box %u %u %u steps %u %u %u "
                "interleave %d swizzle %d promotion %d beyond %d",
                type, rank, (unsigned long long)map[0], (unsigned long long)sizes[0],
                (unsigned long long)sizes[1], (unsigned long long)sizes[2], (unsigned long long)strides[0],
                (unsigned long long)strides[1], box[0], box[1], box[2], steps[0], steps[1], steps[2], interleave,
                swizzle, promotion, beyond);
}
#endif
int cuGetErrorName(int code, const char **text) {
    *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 2 ? "out of memory" : "as the test asked";
    return 0;
}
