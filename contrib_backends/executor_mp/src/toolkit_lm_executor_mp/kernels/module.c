/*
 * The Python module toolkit_lm_executor_mp._memory:
 * how ranks of one machine exchange tensors over memory that all of them have mapped.
 *
 * The memory begins with counters, on a cache line each: two for each rank (its turns, and whether
 * it has left), then those that the caller names. Two buffers follow for each rank. Who waits for a
 * counter spins for a moment, and then sleeps until it is raised.
 *
 * A collective is a turn, or several where the tensors are larger than a buffer. In a turn each
 * rank fills its buffer, raises its counter, waits for the counters of all, and reads the buffers
 * of all in the order of ranks. Who is in turn n knows that all have begun turn n - 1, and so have
 * read what was written in turn n - 2: two buffers suffice.
 */

/* One library for Python 3.11 and all later versions; compile.py names and tags it so. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Headers of Python 3.12 and later take no reference to None, which Python 3.11 counts. */
#undef Py_RETURN_NONE
#define Py_RETURN_NONE return Py_NewRef(Py_None)

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE()
#endif

#define MOST_RANKS 64
#define MOST_COUNTERS (4 * MOST_RANKS)
#define BUFFER (256 << 10)
#define SPIN_NANOSECONDS 50000LL
#define NAP_NANOSECONDS 100000000LL

typedef struct {
    _Alignas(64) _Atomic uint32_t value; /* a futex */
    _Atomic uint32_t sleepers;
} Counter;

typedef struct {
    Counter *counters;
    char *buffers;
    long rank, size;
    double seconds; /* that a rank waits for another */
} Memory;

enum { TURNS, LEFT, OWN };

static Counter *counter(const Memory *memory, int kind, long rank) {
    return memory->counters + kind * MOST_RANKS + rank;
}

static char *buffer(const Memory *memory, long rank, uint32_t turn) {
    return memory->buffers + ((turn & 1) * memory->size + rank) * BUFFER;
}

static inline int is_reached(Counter *one, uint32_t value) {
    return (int32_t)(atomic_load(&one->value) - value) >= 0;
}

static inline long long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void raise_to(Counter *one, uint32_t value) {
    atomic_store(&one->value, value);
    if (atomic_load(&one->sleepers))
        syscall(SYS_futex, &one->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/*
 * Waits for a counter that `rank` raises.
 * 0: it is reached; else the rank has left (1), or time is over (2).
 */
static int wait_for(const Memory *memory, Counter *one, uint32_t value, long rank) {
    if (is_reached(one, value)) return 0;
    const long long start = nanoseconds(), end = start + (long long)(memory->seconds * 1e9);
    do
        for (int i = 0; i < 16; i++) {
            if (is_reached(one, value)) return 0;
            PAUSE();
        }
    while (nanoseconds() < start + SPIN_NANOSECONDS);
    int state = 2;
    atomic_fetch_add(&one->sleepers, 1);
    while (nanoseconds() < end) {
        const uint32_t seen = atomic_load(&one->value);
        if ((int32_t)(seen - value) >= 0) {
            state = 0;
            break;
        }
        if (atomic_load(&counter(memory, LEFT, rank)->value)) {
            /* It may have raised the counter, and then left. */
            state = !is_reached(one, value);
            break;
        }
        const struct timespec nap = {0, NAP_NANOSECONDS};
        syscall(SYS_futex, &one->value, FUTEX_WAIT, seen, &nap, NULL, 0);
    }
    atomic_fetch_sub(&one->sleepers, 1);
    return state;
}

static void *failed(int state, long rank) {
    if (state == 1)
        PyErr_Format(PyExc_RuntimeError, "rank %ld of the group has gone", rank);
    else
        PyErr_Format(PyExc_RuntimeError, "rank %ld of the group did not come in time", rank);
    return NULL;
}

/*
 * Ends the filling of this rank's buffer, and waits for the others.
 * Like wait_for; sets `*missing` to a rank that has not come.
 */
static int meet(const Memory *memory, uint32_t turn, long *missing) {
    raise_to(counter(memory, TURNS, memory->rank), turn);
    for (*missing = 0; *missing < memory->size; ++*missing) {
        const int state = wait_for(memory, counter(memory, TURNS, *missing), turn, *missing);
        if (state) return state;
    }
    return 0;
}

/*
 * How elements become numbers to add, and sums become elements:
 * of each type, `BLOCK` elements at a time.
 */
#define BLOCK 256

static void load_float32(float *numbers, const void *elements, long count) {
    memcpy(numbers, elements, 4 * count);
}

static void store_float32(void *elements, const float *numbers, long count) {
    memcpy(elements, numbers, 4 * count);
}

static void load_bfloat16(float *numbers, const void *elements, long count) {
    const uint16_t *from = elements;
    for (long i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(numbers + i, &bits, 4);
    }
}

/* To the nearest, ties to even. */
static void store_bfloat16(void *elements, const float *numbers, long count) {
    uint16_t *to = elements;
    for (long i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, numbers + i, 4);
        const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        to[i] =
            (bits & 0x7FFFFFFF) > 0x7F800000 ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)rounded;
    }
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) static void load_float16(float *numbers, const void *elements,
                                                             long count) {
    const uint16_t *from = elements;
    for (long i = 0; i < count; i++) numbers[i] = _cvtsh_ss(from[i]);
}

__attribute__((target("avx,f16c"))) static void store_float16(void *elements, const float *numbers,
                                                              long count) {
    uint16_t *to = elements;
    for (long i = 0; i < count; i++) to[i] = _cvtss_sh(numbers[i], _MM_FROUND_TO_NEAREST_INT);
}

static int has_float16(void) {
    unsigned int a, b, c, d;
    return __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#elif defined(__aarch64__)
static void load_float16(float *numbers, const void *elements, long count) {
    const __fp16 *from = elements;
    for (long i = 0; i < count; i++) numbers[i] = from[i];
}

static void store_float16(void *elements, const float *numbers, long count) {
    __fp16 *to = elements;
    for (long i = 0; i < count; i++) to[i] = (__fp16)numbers[i];
}

static int has_float16(void) { return 1; }
#else
#define load_float16 load_bfloat16
#define store_float16 store_bfloat16
static int has_float16(void) { return 0; }
#endif

static const struct {
    long bytes;
    void (*load)(float *, const void *, long);
    void (*store)(void *, const float *, long);
} types[] = {{4, load_float32, store_float32},
             {2, load_bfloat16, store_bfloat16},
             {2, load_float16, store_float16}};

/* The sum of what is in all buffers, in the order of ranks. */
static void sum(const Memory *memory, uint32_t turn, int type, char *out, long count) {
    float sums[BLOCK], numbers[BLOCK];
    const long width = types[type].bytes;
    for (long first = 0; first < count; first += BLOCK) {
        const long many = count - first < BLOCK ? count - first : BLOCK;
        types[type].load(sums, buffer(memory, 0, turn) + first * width, many);
        for (long rank = 1; rank < memory->size; rank++) {
            types[type].load(numbers, buffer(memory, rank, turn) + first * width, many);
            for (long i = 0; i < many; i++) sums[i] += numbers[i];
        }
        types[type].store(out + first * width, sums, many);
    }
}

/*
 * Copies bytes of one rank to their places in `out`, where `inner` bytes of each rank alternate.
 * `first`: index of the first byte among the rank's own. `many`: number of bytes.
 */
static void scatter(char *out, const char *own, long rank, long size, long inner, long first,
                    long many) {
    while (many) {
        const long row = first / inner, in_row = first % inner,
                   now = inner - in_row < many ? inner - in_row : many;
        memcpy(out + (row * size + rank) * inner + in_row, own, now);
        own += now, first += now, many -= now;
    }
}

static uint32_t next_turn(const Memory *memory) {
    return atomic_load(&counter(memory, TURNS, memory->rank)->value) + 1;
}

static Memory at(unsigned long long address, long rank, long size, double seconds) {
    char *memory = (char *)(uintptr_t)address;
    return (Memory){(Counter *)memory, memory + MOST_COUNTERS * sizeof(Counter), rank, size,
                    seconds};
}

static PyObject *all_reduce(PyObject *self, PyObject *args) {
    unsigned long long address, data;
    long rank, size, count, missing = 0;
    int type, state = 0;
    double seconds;
    (void)self;
    if (!PyArg_ParseTuple(args, "(Klld)iKl", &address, &rank, &size, &seconds, &type, &data,
                          &count))
        return NULL;
    Memory memory = at(address, rank, size, seconds);
    char *tensor = (char *)(uintptr_t)data;
    const long width = types[type].bytes;
    Py_BEGIN_ALLOW_THREADS;
    for (long first = 0; first < count && !state; first += BUFFER / width) {
        const long many = count - first < BUFFER / width ? count - first : BUFFER / width;
        const uint32_t turn = next_turn(&memory);
        memcpy(buffer(&memory, rank, turn), tensor + first * width, many * width);
        state = meet(&memory, turn, &missing);
        if (!state) sum(&memory, turn, type, tensor + first * width, many);
    }
    Py_END_ALLOW_THREADS;
    if (state) return failed(state, missing);
    Py_RETURN_NONE;
}

static PyObject *all_gather(PyObject *self, PyObject *args) {
    unsigned long long address, data, out;
    long rank, size, bytes, inner, missing = 0;
    int state = 0;
    double seconds;
    (void)self;
    if (!PyArg_ParseTuple(args, "(Klld)KKll", &address, &rank, &size, &seconds, &data, &out, &bytes,
                          &inner))
        return NULL;
    Memory memory = at(address, rank, size, seconds);
    const char *tensor = (const char *)(uintptr_t)data;
    Py_BEGIN_ALLOW_THREADS;
    for (long first = 0; first < bytes && !state; first += BUFFER) {
        const long many = bytes - first < BUFFER ? bytes - first : BUFFER;
        const uint32_t turn = next_turn(&memory);
        memcpy(buffer(&memory, rank, turn), tensor + first, many);
        state = meet(&memory, turn, &missing);
        for (long one = 0; one < size && !state; one++)
            scatter((char *)(uintptr_t)out, buffer(&memory, one, turn), one, size, inner, first,
                    many);
    }
    Py_END_ALLOW_THREADS;
    if (state) return failed(state, missing);
    Py_RETURN_NONE;
}

static PyObject *post(PyObject *self, PyObject *args) {
    unsigned long long address;
    long rank, size, number;
    double seconds;
    (void)self;
    if (!PyArg_ParseTuple(args, "(Klld)l", &address, &rank, &size, &seconds, &number)) return NULL;
    Memory memory = at(address, rank, size, seconds);
    Counter *one = counter(&memory, OWN, number);
    raise_to(one, atomic_load(&one->value) + 1);
    Py_RETURN_NONE;
}

static PyObject *wait(PyObject *self, PyObject *args) {
    unsigned long long address;
    unsigned int value;
    long rank, size, number, other;
    int state;
    double seconds;
    (void)self;
    if (!PyArg_ParseTuple(args, "(Klld)lIl", &address, &rank, &size, &seconds, &number, &value,
                          &other))
        return NULL;
    Memory memory = at(address, rank, size, seconds);
    Py_BEGIN_ALLOW_THREADS;
    state = wait_for(&memory, counter(&memory, OWN, number), value, other);
    Py_END_ALLOW_THREADS;
    if (state) return failed(state, other);
    Py_RETURN_NONE;
}

static PyObject *leave(PyObject *self, PyObject *args) {
    unsigned long long address;
    long rank, size;
    double seconds;
    (void)self;
    if (!PyArg_ParseTuple(args, "(Klld)", &address, &rank, &size, &seconds)) return NULL;
    Memory memory = at(address, rank, size, seconds);
    atomic_store(&counter(&memory, LEFT, rank)->value, 1);
    for (int i = 0; i < MOST_COUNTERS; i++)
        if (atomic_load(&memory.counters[i].sleepers))
            syscall(SYS_futex, &memory.counters[i].value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"all_reduce", all_reduce, METH_VARARGS, NULL},
    {"all_gather", all_gather, METH_VARARGS, NULL},
    {"post", post, METH_VARARGS, NULL},
    {"wait", wait, METH_VARARGS, NULL},
    {"leave", leave, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_memory", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__memory(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddIntConstant(module, "MOST_RANKS", MOST_RANKS) < 0 ||
        PyModule_AddIntConstant(module, "BUFFER", BUFFER) < 0 ||
        PyModule_AddIntConstant(module, "MOST_OWN", MOST_COUNTERS - OWN * MOST_RANKS) < 0 ||
        PyModule_AddIntConstant(module, "COUNTERS", MOST_COUNTERS * sizeof(Counter)) < 0 ||
        PyModule_AddIntConstant(module, "HAS_FLOAT16", has_float16()) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
