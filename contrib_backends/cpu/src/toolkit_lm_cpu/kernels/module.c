/* The Python module toolkit_lm_cpu._kernels. */

/* One library for Python 3.11 and all later versions; compile.py names and tags it so. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lanes.h"
#include "layer.h"
#include "ops.h"
#include "product.h"
#include "step.h"
#include "team.h"

#include "types.h"

#include "lanes_avx2.h"
#include "functions.h"
#define TYPE FLOAT32
#include "kernels.h"
#define TYPE FLOAT16
#include "kernels.h"
#define TYPE SPLIT
#include "kernels.h"

#include "lanes_avx512.h"
#include "functions.h"
#define TYPE FLOAT32
#include "kernels.h"
#define TYPE FLOAT16
#include "kernels.h"
#define TYPE SPLIT
#include "kernels.h"

#define norm_amx norm_bf16
#define rotate_amx rotate_bf16
#define likeliest_amx likeliest_bf16
#define TYPE BF16
#include "kernels.h"
#define TYPE TILES
#include "kernels.h"

/*
 * By their number in library.py: float32, float16 and bfloat16 by AVX2, by AVX-512;
 * bfloat16 by AVX512-BF16, by AMX.
 */
#define TYPES_OF(x)                                                                                \
    {x##_f32_avx2,   x##_f16_avx2,   x##_split_avx2,                                               \
     x##_f32_avx512, x##_f16_avx512, x##_split_avx512,                                             \
     x##_bf16,       x##_amx}
static int (*const attend_types[])(const Step *) = TYPES_OF(attend);
static void (*const write_types[])(Write *) = TYPES_OF(write);
static const Item linear_types[] = TYPES_OF(multiply);
static const Item pack_types[] = TYPES_OF(pack);
static const Item norm_types[] = TYPES_OF(norm);
static const Item rotate_types[] = TYPES_OF(rotate);
static const Item likeliest_types[] = TYPES_OF(likeliest);

/*
 * Whether there are AMX tiles for bfloat16,
 * and Linux lets this process use them, which it must ask for.
 */
static int has_amx(void) {
    unsigned int a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1) == 0 || (d >> 24 & 1) == 0)
        return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */,
                   18 /* XFEATURE_XTILEDATA */) == 0;
}

/* GCC 12 and Clang 14 do not know it by name. */
static int has_f16c(void) {
    unsigned int a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

static PyObject *supports(PyObject *self, PyObject *args) {
    const char *isa;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &isa)) return NULL;
    __builtin_cpu_init();
    int able = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (strcmp(isa, "avx2") != 0)
        able = able && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (strcmp(isa, "avx512_bf16") == 0 || strcmp(isa, "amx") == 0)
        able = able && __builtin_cpu_supports("avx512bf16");
    if (strcmp(isa, "amx") == 0) able = able && has_amx();
    return PyBool_FromLong(able);
}

static PyObject *attend(PyObject *self, PyObject *args) {
    Step step;
    unsigned long long queries, keys, values, out, starts, seen, first, origins, table, sinks, bias,
        spans;
    int type, done;
    (void)self;
    if (!PyArg_ParseTuple(args, "i(KKKK)(llll)(KKKKlKl)l(llllffl)i(KKllK)", &type, &queries, &keys,
                          &values, &out, &step.query_stride, &step.key_stride, &step.value_stride,
                          &step.out_stride, &starts, &seen, &first, &origins, &step.rows, &table,
                          &step.table_stride, &step.block_tiles, &step.heads, &step.kv_heads,
                          &step.size, &step.real, &step.scale, &step.soft_cap, &step.window,
                          &step.sight, &sinks, &bias, &step.bias_keys, &step.bias_center, &spans))
        return NULL;
    step.group = step.heads / step.kv_heads;
    step.queries = (const void *)(uintptr_t)queries;
    step.keys = (const void *)(uintptr_t)keys;
    step.values = (const void *)(uintptr_t)values;
    step.out = (void *)(uintptr_t)out;
    step.starts = (const int32_t *)(uintptr_t)starts;
    step.seen = (const int32_t *)(uintptr_t)seen;
    step.first = (const int64_t *)(uintptr_t)first;
    step.origins = (const int32_t *)(uintptr_t)origins;
    step.table = (const int32_t *)(uintptr_t)table;
    step.sinks = (const float *)(uintptr_t)sinks;
    step.bias = (const float *)(uintptr_t)bias;
    step.spans = (const int32_t *)(uintptr_t)spans;
    Py_BEGIN_ALLOW_THREADS done = attend_types[type](&step);
    Py_END_ALLOW_THREADS if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *write_kv(PyObject *self, PyObject *args) {
    Write write;
    unsigned long long keys, values, to_keys, to_values, slots;
    int type;
    (void)self;
    if (!PyArg_ParseTuple(args, "i(KKKK)(llll)Kllll", &type, &keys, &values, &to_keys, &to_values,
                          &write.key_stride, &write.value_stride, &write.key_page,
                          &write.value_page, &slots, &write.tokens, &write.kv_heads, &write.size,
                          &write.block_size))
        return NULL;
    write.keys = (const void *)(uintptr_t)keys;
    write.values = (const void *)(uintptr_t)values;
    write.to_keys = (void *)(uintptr_t)to_keys;
    write.to_values = (void *)(uintptr_t)to_values;
    write.slots = (const int64_t *)(uintptr_t)slots;
    Py_BEGIN_ALLOW_THREADS write_types[type](&write);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *set_threads(PyObject *self, PyObject *args) {
    int threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "i", &threads)) return NULL;
    threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    /* Others would have no core of their own. */
    if (threads != atomic_load(&team.threads)) atomic_store(&team.is_bound, 0);
    atomic_store(&team.threads, threads);
    Py_RETURN_NONE;
}

static PyObject *bind_threads(PyObject *self, PyObject *cores) {
    (void)self;
    const Py_ssize_t count = PyTuple_Check(cores) ? PyTuple_Size(cores) : -1;
    if (count != atomic_load(&team.threads))
        return PyErr_Format(PyExc_ValueError, "a tuple of one core for each thread is needed");
    for (Py_ssize_t i = 0; i < count; i++) {
        const long core = PyLong_AsLong(PyTuple_GetItem(cores, i));
        if (core < 0 || core >= CPU_SETSIZE)
            return PyErr_Occurred()
                       ? NULL
                       : PyErr_Format(PyExc_ValueError, "core %ld: 0 to %d are known", core,
                                      CPU_SETSIZE - 1);
        team.cores[i] = (int)core;
    }
    if (sched_getaffinity(0, sizeof team.anywhere, &team.anywhere) != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    atomic_store(&team.is_bound, 1);
    Py_RETURN_NONE;
}

static PyObject *pack(PyObject *self, PyObject *args) {
    Pack pack;
    unsigned long long from, to;
    int type;
    (void)self;
    if (!PyArg_ParseTuple(args, "iKKll", &type, &from, &to, &pack.outputs, &pack.inputs))
        return NULL;
    pack.from = (const void *)(uintptr_t)from;
    pack.to = (void *)(uintptr_t)to;
    Py_BEGIN_ALLOW_THREADS share_out((pack.outputs + LANES - 1) / LANES, pack_types[type], &pack);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *linear(PyObject *self, PyObject *args) {
    Linear l;
    unsigned long long weights, bias, x, residual, out;
    int type;
    (void)self;
    if (!PyArg_ParseTuple(args, "(iKKllii)(KlKlKl)l", &type, &weights, &bias, &l.outputs, &l.inputs,
                          &l.activation, &l.is_gated, &x, &l.x_stride, &residual,
                          &l.residual_stride, &out, &l.out_stride, &l.rows))
        return NULL;
    l.weights = (const void *)(uintptr_t)weights;
    l.bias = (const void *)(uintptr_t)bias;
    l.x = (const void *)(uintptr_t)x;
    l.residual = (const void *)(uintptr_t)residual;
    l.out = (void *)(uintptr_t)out;
    l.factor = 0;
    l.failed = 0;
    Py_BEGIN_ALLOW_THREADS share_out_linear(&l, linear_types[type]);
    Py_END_ALLOW_THREADS if (l.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *likeliest_output(PyObject *self, PyObject *args) {
    Linear l = {0};
    unsigned long long weights, bias, x, best, indices;
    int type;
    (void)self;
    if (!PyArg_ParseTuple(args, "(iKKll)(KlKK)l", &type, &weights, &bias, &l.outputs, &l.inputs, &x,
                          &l.x_stride, &best, &indices, &l.rows))
        return NULL;
    l.weights = (const void *)(uintptr_t)weights;
    l.bias = (const void *)(uintptr_t)bias;
    l.x = (const void *)(uintptr_t)x;
    cut_linear(&l);
    /* No element is larger than a float. */
    const size_t count = (size_t)(l.rows * l.column_blocks) + 1;
    l.indices = malloc(count * (sizeof *l.indices + sizeof(float)));
    if (l.indices == NULL) return PyErr_NoMemory();
    l.best = l.indices + count;
    Likeliest of = {l.best, (void *)(uintptr_t)best, (int64_t *)(uintptr_t)indices, l.column_blocks,
                    l.column_blocks};
    Py_BEGIN_ALLOW_THREADS share_out_items(&l, linear_types[type]);
    for (long row = 0; row < l.rows && !l.failed; row++) {
        likeliest_types[type](&of, row);
        of.indices[row] = l.indices[row * l.column_blocks + of.indices[row]];
    }
    free(l.indices);
    Py_END_ALLOW_THREADS if (l.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *norm(PyObject *self, PyObject *args) {
    Norm n;
    unsigned long long x, residual, sum, out, weight, bias;
    int type;
    (void)self;
    if (!PyArg_ParseTuple(args, "i(KKKK)(lll)(lll)(KKfi)", &type, &x, &residual, &sum, &out,
                          &n.x_stride, &n.head_stride, &n.residual_stride, &n.tokens, &n.heads,
                          &n.size, &weight, &bias, &n.eps, &n.is_wide))
        return NULL;
    n.x = (const void *)(uintptr_t)x;
    n.residual = (const void *)(uintptr_t)residual;
    n.sum = (void *)(uintptr_t)sum;
    n.out = (void *)(uintptr_t)out;
    n.weight = (const void *)(uintptr_t)weight;
    n.bias = (const void *)(uintptr_t)bias;
    n.out_stride = n.heads * n.size;
    Py_BEGIN_ALLOW_THREADS share_out_rows(n.tokens * n.heads * n.size, n.tokens * n.heads,
                                          norm_types[type], &n);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *rotate(PyObject *self, PyObject *args) {
    Rotate r;
    unsigned long long x, cos, sin;
    int type;
    (void)self;
    if (!PyArg_ParseTuple(args, "i(KKK)(lll)(lll)", &type, &x, &cos, &sin, &r.x_stride,
                          &r.head_stride, &r.angle_stride, &r.tokens, &r.heads, &r.size))
        return NULL;
    r.x = (void *)(uintptr_t)x;
    r.cos = (const void *)(uintptr_t)cos;
    r.sin = (const void *)(uintptr_t)sin;
    Py_BEGIN_ALLOW_THREADS share_out_rows(r.tokens * r.heads * r.size, r.tokens, rotate_types[type],
                                          &r);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *likeliest(PyObject *self, PyObject *args) {
    Likeliest l;
    unsigned long long scores, best, indices;
    long rows;
    int type;
    (void)self;
    if (!PyArg_ParseTuple(args, "i(KKK)lll", &type, &scores, &best, &indices, &l.stride, &rows,
                          &l.size))
        return NULL;
    l.scores = (const void *)(uintptr_t)scores;
    l.best = (void *)(uintptr_t)best;
    l.indices = (int64_t *)(uintptr_t)indices;
    Py_BEGIN_ALLOW_THREADS share_out_if(rows * l.size > 4 * FEW, rows, likeliest_types[type], &l);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *embed(PyObject *self, PyObject *args) {
    Embed e;
    unsigned long long weights, ids, out;
    long rows;
    (void)self;
    if (!PyArg_ParseTuple(args, "(KKK)llll", &weights, &ids, &out, &e.tokens, &rows, &e.lanes,
                          &e.width))
        return NULL;
    e.weights = (const void *)(uintptr_t)weights;
    e.ids = (const int64_t *)(uintptr_t)ids;
    e.out = (void *)(uintptr_t)out;
    for (long i = 0; i < e.tokens; i++)
        if (e.ids[i] < 0 || e.ids[i] >= rows)
            return PyErr_Format(PyExc_IndexError, "there are %ld rows, and none is %ld", rows,
                                (long)e.ids[i]);
    Py_BEGIN_ALLOW_THREADS share_out_rows(e.tokens * e.lanes, e.tokens, embed_rows, &e);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

/*
 * The whole pages of (start, bytes). Where the system does not take the advice, all stays as it is.
 */
static PyObject *advise(PyObject *args, int advice) {
    unsigned long long start;
    long bytes;
    if (!PyArg_ParseTuple(args, "Kl", &start, &bytes)) return NULL;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE),
                    first = (start + page - 1) / page * page, last = (start + bytes) / page * page;
    if (first < last) madvise((void *)first, last - first, advice);
    Py_RETURN_NONE;
}

static PyObject *in_huge_pages(PyObject *self, PyObject *args) {
    (void)self;
    return advise(args, MADV_HUGEPAGE);
}

static PyObject *lose(PyObject *self, PyObject *args) {
    (void)self;
    return advise(args, MADV_DONTNEED);
}

#include "run_layer.h"

static PyMethodDef methods[] = {
    {"supports", supports, METH_VARARGS,
     "supports(isa) -> whether this processor has \"avx2\", \"avx512\", \"avx512_bf16\" "
     "or \"amx\", as the kernels use it."},
    {"set_threads", set_threads, METH_VARARGS,
     "set_threads(number): the kernels' threads from now on, the caller among them."},
    {"bind_threads", bind_threads, METH_O,
     "bind_threads(cores): from now on each thread of the team keeps to its core, "
     "but for the first: that is the caller's matter."},
    {"pack", pack, METH_VARARGS,
     "pack(type, weight, to, outputs, inputs): a weight as `linear` reads it; "
     "its outputs filled up to 16."},
    {"linear", linear, METH_VARARGS,
     "linear((type, weights, bias, outputs, inputs, activation, is_gated), "
     "(x, x_stride, residual, residual_stride, out, out_stride), rows): see product.h."},
    {"likeliest_output", likeliest_output, METH_VARARGS,
     "likeliest_output((type, weights, bias, outputs, inputs), (x, x_stride, best, indices), "
     "rows): the greatest of what `linear` would give, and where it is, as of `likeliest`."},
    {"norm", norm, METH_VARARGS,
     "norm(type, (x, residual, sum, out), (x_stride, head_stride, residual_stride), "
     "(tokens, heads, size), (weight, bias, eps, is_wide)): see ops.h."},
    {"rotate", rotate, METH_VARARGS,
     "rotate(type, (x, cos, sin), (x_stride, head_stride, angle_stride), (tokens, heads, size)): "
     "see ops.h."},
    {"likeliest", likeliest, METH_VARARGS,
     "likeliest(type, (scores, best, indices), stride, rows, size): see ops.h."},
    {"embed", embed, METH_VARARGS,
     "embed((weights, ids, out), tokens, rows, lanes, width): rows of a packed weight, see ops.h."},
    {"in_huge_pages", in_huge_pages, METH_VARARGS,
     "in_huge_pages(start, bytes): memory that is not used yet may come in huge pages."},
    {"lose", lose, METH_VARARGS,
     "lose(start, bytes): memory whose content nobody reads any more goes back to the system."},
    {"layer", layer, METH_VARARGS,
     "layer((type, attention_type, element), (hidden, inner, heads, kv_heads, head_size), "
     "activation, factor, six norms (weight, size, eps, is_wide): input, post, queries, keys, "
     "attended, fed; four products (weights, bias): qkv, out, gate_up, down) "
     "-> a layer for run_layer: see layer.h."},
    {"run_layer", run_layer, METH_VARARGS,
     "run_layer(layer, (x, residual, y, adds, tokens, workspace), "
     "(cos, sin, angle_stride, angle_size), "
     "(starts, seen, first, origins, rows, table, table_stride), "
     "(keys, values, key_page, value_page, slots, block_tiles), "
     "(scale, soft_cap, window), sight): see layer.h."},
    {"attend", attend, METH_VARARGS,
     "attend(type, (queries, keys, values, out), (query, key, value, out strides), "
     "(starts, seen, first, origins, rows, table, table_stride), block_tiles, "
     "(heads, kv_heads, size, real, scale, soft_cap, window), sight, "
     "(sinks, bias, bias_keys, bias_center, spans)): see step.h."},
    {"write_kv", write_kv, METH_VARARGS,
     "write_kv(type, (keys, values, to_keys, to_values), their strides, slots, tokens, kv_heads, "
     "size, block_size): see step.h."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) {
    if (!make_team()) return PyErr_NoMemory();
    return PyModule_Create(&definition);
}
