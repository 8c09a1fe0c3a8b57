/* A cuDNN that computes nothing: records the calls that Shorthaul makes and fails where a test asks.

   A call is recorded as one line: descriptors by kind and number, attributes with their numbers, types and
   values. Of six engines, five are recommended and one is for fallback: the first is nondeterministic, the
   second and third use tensor cores, of which the third wants 1 MiB of workspace, the fourth cannot be
   planned, the fifth wants 1 GiB, the sixth is plain. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char log_text[1 << 20];
static size_t log_bytes;
static char fail_call[64];
static int fail_status, n_alive, n_made, broken_kind, broken_status;

static char is_writing;
static void put(const char *format, ...) {
    va_list args;
    while (__atomic_test_and_set(&is_writing, __ATOMIC_ACQUIRE)) usleep(1);
    va_start(args, format);
    log_bytes += vsnprintf(log_text + log_bytes, sizeof log_text - log_bytes, format, args);
    va_end(args);
    __atomic_clear(&is_writing, __ATOMIC_RELEASE);
}
/* A handle is for one thread at a time. Calls that use it take a while if asked to; those that found
   another one under way are counted. */
static int is_slow, n_inside, n_overlaps;
static void enter(void) {
    if (__atomic_fetch_add(&n_inside, 1, __ATOMIC_SEQ_CST)) __atomic_fetch_add(&n_overlaps, 1, __ATOMIC_SEQ_CST);
    if (is_slow) usleep(300);
}
static void leave(void) { __atomic_fetch_sub(&n_inside, 1, __ATOMIC_SEQ_CST); }
/* Ends a line; the status of the call. */
static int done(const char *call) {
    put("\n");
    if (fail_status && !strcmp(call, fail_call)) {
        int status = fail_status;
        fail_status = 0;
        return status;
    }
    return 0;
}

const char *mock_log(void) { return log_text; }
void mock_reset(void) {
    log_bytes = 0, log_text[0] = 0, fail_status = 0, n_made = 0, broken_status = 0, is_slow = 0, n_overlaps = 0;
}
/* From now on descriptors of a kind cannot be finalized. */
void mock_break(int kind, int status) { broken_kind = kind, broken_status = status; }
void mock_slow(void) { is_slow = 1; }
int mock_overlaps(void) { return n_overlaps; }
/* Descriptors made and not yet given back. */
int mock_alive(void) { return n_alive; }
void mock_fail(const char *call, int status) {
    snprintf(fail_call, sizeof fail_call, "%s", call);
    fail_status = status;
}

size_t cudnnGetVersion(void) { return 92600; }
const char *cudnnGetErrorString(int status) {
    return status == 3000 ? "CUDNN_STATUS_NOT_SUPPORTED" : status == 5000 ? "CUDNN_STATUS_EXECUTION_FAILED" : "?";
}
void cudnnGetLastErrorString(char *text, size_t n) { snprintf(text, n, "as the test asked"); }

int cudnnCreate(void **handle) {
    *handle = (void *)0xd00d;
    put("cudnnCreate");
    return done("cudnnCreate");
}
int cudnnSetStream(void *handle, void *stream) {
    enter();
    put("cudnnSetStream %zx %zu", (size_t)handle, (size_t)stream);
    leave();
    return done("cudnnSetStream");
}

enum { ENGINE = 2, ENGINECFG = 3, HEURISTIC = 4, PLAN = 5, GRAPH = 15, PACK = 16 };
struct object {
    int kind, number, engine, mode, n;
    uint64_t ids[8], addresses[8], workspace;
};

int cudnnBackendCreateDescriptor(int kind, struct object **object) {
    *object = calloc(1, sizeof **object);
    (*object)->kind = kind;
    (*object)->number = __atomic_add_fetch(&n_made, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&n_alive, 1, __ATOMIC_SEQ_CST);
    return 0;
}
int cudnnBackendDestroyDescriptor(struct object *object) {
    free(object);
    __atomic_fetch_sub(&n_alive, 1, __ATOMIC_SEQ_CST);
    return 0;
}
int cudnnBackendFinalize(struct object *object) {
    if (object->kind == HEURISTIC || object->kind == PLAN || object->kind == GRAPH)
        enter(), leave();
    if (broken_status && object->kind == broken_kind)
        return broken_status;
    if (object->kind == PLAN && object->engine == 3)
        return 3000;
    put("finalize %d #%d", object->kind, object->number);
    return done("cudnnBackendFinalize");
}

/* Bytes of a value by its type: numbers, addresses and descriptors have 8; enumerations and floats 4. */
static size_t size_of(int type) {
    return type == 24 || type == 2 ? 1 : type == 0 || type == 3 || type == 5 || type == 6 || type == 15 ? 8 : 4;
}
int cudnnBackendSetAttribute(struct object *object, int attribute, int type, int64_t n, const void *values) {
    put("set %d #%d %d type %d:", object->kind, object->number, attribute, type);
    for (int i = 0; i < n; i++) {
        uint64_t bits = 0;
        memcpy(&bits, (const char *)values + i * size_of(type), size_of(type));
        if (type == 15) {
            struct object *of = (struct object *)(uintptr_t)bits;
            put(" #%d", of->number);
            object->engine = of->engine;
        } else if (type == 4) {
            float value;
            memcpy(&value, &bits, 4);
            put(" %g", value);
        } else {
            put(" %llx", (unsigned long long)bits);
        }
        if (attribute == 200)
            object->mode = bits;
        if (attribute == 1000)
            object->ids[i] = bits, object->n = n;
        if (attribute == 1001)
            object->addresses[i] = bits;
        if (attribute == 1003)
            object->workspace = bits;
    }
    return done("cudnnBackendSetAttribute");
}

int cudnnBackendGetAttribute(struct object *object, int attribute, int type, int64_t most, int64_t *n, void *values) {
    (void)type;
    if (attribute == 202) {
        enter(), leave();
        /* Results: engines 0 to 4, or for fallback (mode 2) the one with number 5. */
        int first = object->mode == 2 ? 5 : 0, count = object->mode == 2 ? 1 : 5;
        *n = count;
        for (int i = 0; i < most && i < count; i++)
            ((struct object **)values)[i]->engine = first + i;
        return 0;
    }
    if (attribute == 300) {
        *n = 1;
        (*(struct object **)values)->engine = object->engine;
        return 0;
    }
    if (attribute == 1303) {
        static const int notes[] = {4, 0, 0, 0, 0, 9};
        *n = 1;
        *(int *)values = notes[object->engine];
        return 0;
    }
    if (attribute == 402) {
        static const int64_t bytes[] = {0, 0, 1 << 20, 0, 1 << 30, 0};
        *n = 1;
        *(int64_t *)values = bytes[object->engine];
        return 0;
    }
    return 2000;
}

int cudnnBackendExecute(void *handle, struct object *plan, struct object *pack) {
    enter(), leave();
    put("execute %zx engine %d", (size_t)handle, plan->engine);
    for (int i = 0; i < pack->n; i++)
        put(" %llu at %llx", (unsigned long long)pack->ids[i], (unsigned long long)pack->addresses[i]);
    put(" workspace %llx", (unsigned long long)pack->workspace);
    return done("cudnnBackendExecute");
}
