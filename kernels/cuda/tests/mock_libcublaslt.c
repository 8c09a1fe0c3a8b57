/* A cuBLASLt that computes nothing: records the calls that Shorthaul makes and fails where a test asks.

   A call is recorded as one line, attributes with their numbers, sizes and values. Five algorithms are
   offered, of which the n-th wants n MiB of workspace and is told by its first word, 100 + n. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char log_text[1 << 20];
static size_t log_bytes;
static char fail_call[64];
static int fail_status, n_offers = 5, n_alive;

static int note(const char *call, const char *format, ...) {
    va_list args;
    log_bytes += snprintf(log_text + log_bytes, sizeof log_text - log_bytes, "%s", call);
    va_start(args, format);
    log_bytes += vsnprintf(log_text + log_bytes, sizeof log_text - log_bytes, format, args);
    va_end(args);
    log_bytes += snprintf(log_text + log_bytes, sizeof log_text - log_bytes, "\n");
    if (fail_status && !strcmp(call, fail_call)) {
        int status = fail_status;
        fail_status = 0;
        return status;
    }
    return 0;
}

const char *mock_log(void) { return log_text; }
void mock_reset(void) { log_bytes = 0, log_text[0] = 0, fail_status = 0, n_offers = 5; }
void mock_offers(int n) { n_offers = n; }
/* Descriptions made and not yet given back. */
int mock_alive(void) { return n_alive; }
void mock_fail(const char *call, int status) {
    snprintf(fail_call, sizeof fail_call, "%s", call);
    fail_status = status;
}

size_t cublasLtGetVersion(void) { return 130401; }
const char *cublasLtGetStatusName(int status) {
    return status == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : status == 13 ? "CUBLAS_STATUS_EXECUTION_FAILED" : 0;
}
const char *cublasLtGetStatusString(int status) { return status == 99 ? 0 : "as the test asked"; }

int cublasLtCreate(void **handle) {
    *handle = malloc(8);
    return note("cublasLtCreate", "");
}

/* Of one kind of object each: its attributes' values, by number. */
struct object { char kind[16]; uint64_t values[64]; };

static int made(struct object **object, const char *kind) {
    *object = calloc(1, sizeof **object);
    snprintf((*object)->kind, sizeof (*object)->kind, "%s", kind);
    n_alive++;
    return 0;
}
static int forgotten(struct object *object) { free(object); n_alive--; return 0; }
static int set(struct object *object, const char *call, int which, const void *value, size_t size) {
    uint64_t bits = 0;
    memcpy(&bits, value, size);
    object->values[which] = bits;
    return note(call, " %d %zu %lld", which, size, (long long)(size == 4 ? (int32_t)bits : (int64_t)bits));
}

int cublasLtMatmulDescCreate(struct object **object, int compute, int scale) {
    int status = note("cublasLtMatmulDescCreate", " %d %d", compute, scale);
    return status ? status : made(object, "description");
}
int cublasLtMatmulDescSetAttribute(struct object *object, int which, const void *value, size_t size) {
    return set(object, "cublasLtMatmulDescSetAttribute", which, value, size);
}
int cublasLtMatmulDescDestroy(struct object *object) { return forgotten(object); }
int cublasLtMatrixLayoutCreate(struct object **object, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    int status = note("cublasLtMatrixLayoutCreate", " %d %llu x %llu ld %lld", type, (unsigned long long)rows,
                      (unsigned long long)columns, (long long)ld);
    return status ? status : made(object, "layout");
}
int cublasLtMatrixLayoutSetAttribute(struct object *object, int which, const void *value, size_t size) {
    return set(object, "cublasLtMatrixLayoutSetAttribute", which, value, size);
}
int cublasLtMatrixLayoutDestroy(struct object *object) { return forgotten(object); }
int cublasLtMatmulPreferenceCreate(struct object **object) { return made(object, "preference"); }
int cublasLtMatmulPreferenceSetAttribute(struct object *object, int which, const void *value, size_t size) {
    return set(object, "cublasLtMatmulPreferenceSetAttribute", which, value, size);
}
int cublasLtMatmulPreferenceDestroy(struct object *object) { return forgotten(object); }

struct algorithm { uint64_t data[8]; };
struct result { struct algorithm algorithm; size_t workspace; int status; float waves; int reserved[4]; };

int cublasLtMatmulAlgoGetHeuristic(void *handle, struct object *description, struct object *a,
                                   struct object *b, struct object *c, struct object *d,
                                   struct object *preference, int n, struct result *results, int *found) {
    (void)handle, (void)description, (void)a, (void)b, (void)c, (void)d;
    *found = 0;
    for (int i = 0; i < n_offers && *found < n; i++) {
        size_t workspace = (size_t)i << 20;
        if (workspace > preference->values[1])
            continue;
        results[*found] = (struct result){{{100 + i}}, workspace, 0, 1, {0}};
        ++*found;
    }
    return note("cublasLtMatmulAlgoGetHeuristic", " %d", n);
}

int cublasLtMatmul(void *handle, struct object *description, const void *alpha, const void *a,
                   struct object *a_layout, const void *b, struct object *b_layout, const void *beta,
                   const void *c, struct object *c_layout, void *d, struct object *d_layout,
                   const struct algorithm *algorithm, void *workspace, size_t workspace_bytes, void *stream) {
    (void)handle, (void)a_layout, (void)b_layout, (void)c_layout, (void)d_layout;
    const float *one = alpha, *zero = beta;
    return note("cublasLtMatmul", " %g %g a %zx b %zx c %zx d %zx bias %llx algorithm %llu workspace %zx %zu stream %zu",
                *one, *zero, (size_t)a, (size_t)b, (size_t)c, (size_t)d,
                (unsigned long long)description->values[8], (unsigned long long)algorithm->data[0],
                (size_t)workspace, workspace_bytes, (size_t)stream);
}
