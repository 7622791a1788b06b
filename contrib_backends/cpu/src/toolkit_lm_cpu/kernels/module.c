/* The Python module toolkit_lm_cpu._kernels. Threads are OpenMP's: those of torch, which must have been imported before. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "lanes.h"

#define ROWS 8

typedef struct {
    const void *queries, *keys, *values; /* [T, heads, D], [T, kv_heads, D]; a token's heads lie side by side */
    void *out;                           /* [T, heads, D] */
    const int32_t *starts;               /* [sequences + 1] */
    const int32_t *seen;                 /* [sequences]: so many tokens of each, from the first on, are keys */
    long sequences, heads, kv_heads, size;
    long query_stride, key_stride, value_stride, out_stride; /* elements from token to token */
    float scale;
} Batch;

#define TARGET AVX512
#define ELEMENT float
#define PAIR 1
#define NAME(x) x##_f32
#define DOT dot_f32
#define STORE store_f32
#define TERMS 7
#include "encoder.h"
#undef TARGET
#undef ELEMENT
#undef PAIR
#undef NAME
#undef DOT
#undef STORE
#undef TERMS

#define TARGET AVX512_BF16
#define ELEMENT uint16_t
#define PAIR 2
#define NAME(x) x##_bf16
#define DOT dot_bf16
#define STORE store_bf16
#define TERMS 5
#include "encoder.h"

static PyObject *supports(PyObject *self, PyObject *args) {
    const char *dtype;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &dtype)) return NULL;
    __builtin_cpu_init();
    int able = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
    if (strcmp(dtype, "bfloat16") == 0) able = able && __builtin_cpu_supports("avx512bf16");
    return PyBool_FromLong(able && (strcmp(dtype, "bfloat16") == 0 || strcmp(dtype, "float32") == 0));
}

static PyObject *attend(PyObject *self, PyObject *args) {
    Batch batch;
    unsigned long long queries, keys, values, out, starts, seen;
    int is_bf16, done;
    (void)self;
    if (!PyArg_ParseTuple(args, "p(KKKK)(llll)KKllllf", &is_bf16, &queries, &keys, &values, &out, &batch.query_stride, &batch.key_stride,
                          &batch.value_stride, &batch.out_stride, &starts, &seen, &batch.sequences, &batch.heads, &batch.kv_heads, &batch.size,
                          &batch.scale))
        return NULL;
    batch.queries = (const void *)(uintptr_t)queries;
    batch.keys = (const void *)(uintptr_t)keys;
    batch.values = (const void *)(uintptr_t)values;
    batch.out = (void *)(uintptr_t)out;
    batch.starts = (const int32_t *)(uintptr_t)starts;
    batch.seen = (const int32_t *)(uintptr_t)seen;
    Py_BEGIN_ALLOW_THREADS
    done = is_bf16 ? attend_bf16(&batch) : attend_f32(&batch);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"supports", supports, METH_VARARGS, "supports(dtype) -> whether this processor has the instructions for it."},
    {"attend", attend, METH_VARARGS,
     "attend(is_bf16, (queries, keys, values, out), their strides, starts, seen, sequences, heads, kv_heads, size, scale): see the sources."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&definition); }
