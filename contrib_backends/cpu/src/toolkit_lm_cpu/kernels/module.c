/* The Python module toolkit_lm_cpu._kernels. */

/* One library for Python 3.11 and all later versions; compile.py names and tags it so. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Headers of Python 3.12 and later take no reference to None, which Python 3.11 counts. */
#undef Py_RETURN_NONE
#define Py_RETURN_NONE return Py_NewRef(Py_None)

#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lanes.h"
#include "layer.h"
#include "ops.h"
#include "product.h"
#include "states.h"
#include "step.h"
#include "team.h"

#include "arguments.h"

#include "types.h"

#include "lanes_avx2.h"
#include "functions.h"
#include "latent.h"
#include "recurrence.h"
#define CODES(x) x##_codes_avx2
#define TARGET_CODES AVX2
#define ZERO_8 0
#define DOT_8 dot_8_avx2
#define DOT_4 dot_4_avx2
#define CODE_PANELS 1
#include "codes.h"
#define CODES(x) x##_codes_avx_vnni
#define TARGET_CODES AVX_VNNI
#define ZERO_8 128
#define DOT_8 dot_avx_vnni
#define DOT_4 dot_avx_vnni
#define CODE_PANELS 1
#include "codes.h"
#define TYPE FLOAT32
#include "kernels.h"
#define TYPE FLOAT16
#include "kernels.h"
#define TYPE SPLIT
#include "kernels.h"

#include "lanes_avx512.h"
#include "functions.h"
#include "latent.h"
#include "recurrence.h"
#define CODES(x) x##_codes_avx512_vnni
#define TARGET_CODES AVX512_VNNI
#define ZERO_8 128
#define DOT_8 dot_avx512_vnni
#define DOT_4 dot_avx512_vnni
#define CODE_PANELS 3
#include "codes.h"
#include "codes_amx.h"
#define TYPE FLOAT32
#include "kernels.h"
#define TYPE FLOAT16
#include "kernels.h"
#define TYPE SPLIT
#include "kernels.h"

#define norm_amx norm_bf16
#define combine_amx combine_bf16
#define times_amx times_bf16
#define soft_cap_amx soft_cap_bf16
#define quantize_amx quantize_bf16
#define rotate_amx rotate_bf16
#define likeliest_amx likeliest_bf16
#define TYPE BF16
#include "kernels.h"
#define TYPE TILES
#include "kernels.h"

/*
 * All kernels: suffix, instructions from the oldest on, type of elements. Their places are the
 * numbers that Python names them by; library.py reads them from KERNELS of the module.
 */
#define KERNELS(K, x)                                                                              \
    K(x, f32_avx2, "avx2", "float32")                                                              \
    K(x, f16_avx2, "avx2", "float16")                                                              \
    K(x, split_avx2, "avx2", "bfloat16")                                                           \
    K(x, f32_avx512, "avx512", "float32")                                                          \
    K(x, f16_avx512, "avx512", "float16")                                                          \
    K(x, split_avx512, "avx512", "bfloat16")                                                       \
    K(x, bf16, "avx512_bf16", "bfloat16")                                                          \
    K(x, amx, "amx", "bfloat16")
#define KERNEL_OF(x, suffix, isa, dtype) x##_##suffix,
#define TYPES_OF(x) {KERNELS(KERNEL_OF, x)}
static int (*const attend_types[])(const Step *) = TYPES_OF(attend);
static void (*const write_types[])(Write *) = TYPES_OF(write);
static const Item linear_types[] = TYPES_OF(multiply);
static const Item low_types[] = TYPES_OF(multiply_low);
static const Item pack_types[] = TYPES_OF(pack);
static const Item norm_types[] = TYPES_OF(norm);
static const Item soft_cap_types[] = TYPES_OF(soft_cap);
static const Item combine_types[] = TYPES_OF(combine);
static const Item times_types[] = TYPES_OF(times);
static const Item quantize_types[] = TYPES_OF(quantize);
static const Item rotate_types[] = TYPES_OF(rotate);
static const Item likeliest_types[] = TYPES_OF(likeliest);
#define ISA_OF(x, suffix, isa, dtype) isa,
static const char *const isas[] = {KERNELS(ISA_OF, )};

/*
 * Kernels of products of quantized weights, as KERNELS: suffix, instructions. All give the same.
 */
#define CODE_KERNELS(K, x)                                                                         \
    K(x, codes_avx2, "avx2")                                                                       \
    K(x, codes_avx_vnni, "avx_vnni")                                                               \
    K(x, codes_avx512_vnni, "avx512_vnni")                                                         \
    K(x, codes_amx_int8, "amx_int8")
#define CODE_KERNEL_OF(x, suffix, isa) x##_##suffix,
static const CodePanels code_panels[] = {CODE_KERNELS(CODE_KERNEL_OF, panels)};

/* Of a product of quantized weights: the kernel, and the rows of an item. */
static void choose_code_kernel(Linear *l) {
    if (l->codes == NULL) return;
    l->add_codes = code_panels[l->quantized.kernel];
    if (l->add_codes != panels_codes_amx_int8) return;
    l->block = MANY_ROWS;
    if (l->quantized.group <= MOST_UNPACKED) l->tiled = l->rows / TILE * TILE;
}

static int is_kernel(int type) {
    if (type >= 0 && type < (int)(sizeof norm_types / sizeof *norm_types)) return 1;
    PyErr_Format(PyExc_ValueError, "no kernel has number %d", type);
    return 0;
}

/* As of arguments.h: a number in KERNELS. */
static int read_kernel(PyObject *given, void *to) {
    return read_int(given, to) && is_kernel(*(int *)to);
}

/*
 * Whether there are AMX tiles of a kind, which `bit` says: 22 for bfloat16, 25 for 8 bits;
 * and Linux lets this process use them, which it must ask for.
 */
static int has_amx(int bit) {
    unsigned int a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> bit & 1) == 0 || (d >> 24 & 1) == 0)
        return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */,
                   18 /* XFEATURE_XTILEDATA */) == 0;
}

/* GCC 12 and Clang 14 do not know it by name. */
static int has_f16c(void) {
    unsigned int a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

/* Likewise. */
static int has_avx_vnni(void) {
    unsigned int a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1) != 0;
}

static PyObject *supports(PyObject *self, PyObject *args) {
    const char *isa;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &isa)) return NULL;
    __builtin_cpu_init();
    int able = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (strcmp(isa, "avx_vnni") == 0) return PyBool_FromLong(able && has_avx_vnni());
    if (strcmp(isa, "avx512_vnni") == 0) able = able && __builtin_cpu_supports("avx512vnni");
    if (strcmp(isa, "avx2") != 0)
        able = able && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (strcmp(isa, "avx512_bf16") == 0 || strcmp(isa, "amx") == 0)
        able = able && __builtin_cpu_supports("avx512bf16");
    if (strcmp(isa, "amx") == 0)
        able = able && __builtin_cpu_supports("avx512vbmi") && has_amx(22);
    if (strcmp(isa, "amx_int8") == 0)
        able = able && __builtin_cpu_supports("avx512vnni") && has_amx(25);
    return PyBool_FromLong(able);
}

static PyObject *attend(PyObject *self, PyObject *const *values, Py_ssize_t count,
                        PyObject *names) {
    const Call call = {values, count, names};
    Step step;
    int type, done;
    (void)self;
    if (!take_attend(call, 2, &step) || !read_kernel(values[0], &type) ||
        !read_Rows(values[1], &step))
        return NULL;
    step.group = step.heads / step.kv_heads;
    Py_BEGIN_ALLOW_THREADS done = attend_types[type](&step);
    Py_END_ALLOW_THREADS if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *write_kv(PyObject *self, PyObject *const *values, Py_ssize_t count,
                          PyObject *names) {
    const Call call = {values, count, names};
    Write write;
    int type;
    (void)self;
    if (!take_write_kv(call, 1, &write) || !read_kernel(values[0], &type)) return NULL;
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

static PyObject *pack(PyObject *self, PyObject *const *values, Py_ssize_t count,
                      PyObject *names) {
    const Call call = {values, count, names};
    Pack pack;
    int type;
    (void)self;
    if (!take_pack(call, 1, &pack) || !read_kernel(values[0], &type)) return NULL;
    Py_BEGIN_ALLOW_THREADS share_out((pack.outputs + LANES - 1) / LANES, pack_types[type], &pack);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *pack_codes(PyObject *self, PyObject *const *values, Py_ssize_t count,
                            PyObject *names) {
    const Call call = {values, count, names};
    PackCodes pack = {0};
    (void)self;
    if (!take_pack_codes(call, 0, &pack)) return NULL;
    Py_BEGIN_ALLOW_THREADS share_out((pack.outputs + LANES - 1) / LANES, pack_panel_of_codes,
                                     &pack);
    Py_END_ALLOW_THREADS if (pack.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#include "adapters.h"

/* Finds the codes of x of a product of quantized weights. */
static void quantize_inputs(Linear *l, int type) {
    if (l->codes == NULL) return;
    share_out_rows(l->rows * l->inputs, l->rows, quantize_types[type], l);
}

/* The arguments of a product, of which `quantized_linear` has more. */
static int take_product(Call call, Py_ssize_t count, int is_quantized, Linear *l, int *type) {
    if (!(is_quantized ? take_quantized_linear(call, count, l) : take_linear(call, count, l)) ||
        !read_kernel(call.values[0], type))
        return 0;
    choose_code_kernel(l);
    return 1;
}

static PyObject *quantized_linear(PyObject *self, PyObject *const *values, Py_ssize_t count,
                                  PyObject *names) {
    const Call call = {values, count, names};
    Linear l = {0};
    int type;
    (void)self;
    if (!take_product(call, 3, 1, &l, &type) || !read_adapted(values[1], values[2], &l))
        return NULL;
    Py_BEGIN_ALLOW_THREADS quantize_inputs(&l, type);
    share_out_product(&l, type);
    Py_END_ALLOW_THREADS if (l.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *linear(PyObject *self, PyObject *const *values, Py_ssize_t count,
                        PyObject *names) {
    const Call call = {values, count, names};
    Linear l = {0};
    int type;
    (void)self;
    if (!take_product(call, 3, 0, &l, &type) || !read_adapted(values[1], values[2], &l))
        return NULL;
    Py_BEGIN_ALLOW_THREADS share_out_product(&l, type);
    Py_END_ALLOW_THREADS if (l.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *find_likeliest(Call call, int is_quantized) {
    Linear l = {0};
    void *best, *indices;
    int type;
    if (!take_product(call, 3, is_quantized, &l, &type) || !read_pointer(call.values[1], &best) ||
        !read_pointer(call.values[2], &indices))
        return NULL;
    cut_linear(&l);
    /* No element is larger than a float. */
    const size_t most = (size_t)(l.rows * l.column_blocks) + 1;
    l.indices = malloc(most * (sizeof *l.indices + sizeof(float)));
    if (l.indices == NULL) return PyErr_NoMemory();
    l.best = l.indices + most;
    Likeliest of = {l.best, best, indices, l.column_blocks, l.column_blocks};
    Py_BEGIN_ALLOW_THREADS quantize_inputs(&l, type);
    share_out_items(&l, linear_types[type]);
    for (long row = 0; row < l.rows && !l.failed; row++) {
        likeliest_types[type](&of, row);
        of.indices[row] = l.indices[row * l.column_blocks + of.indices[row]];
    }
    free(l.indices);
    Py_END_ALLOW_THREADS if (l.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *likeliest_output(PyObject *self, PyObject *const *values, Py_ssize_t count,
                                  PyObject *names) {
    (void)self;
    return find_likeliest((Call){values, count, names}, 0);
}

static PyObject *likeliest_quantized(PyObject *self, PyObject *const *values, Py_ssize_t count,
                                     PyObject *names) {
    (void)self;
    return find_likeliest((Call){values, count, names}, 1);
}

static PyObject *norm(PyObject *self, PyObject *const *values, Py_ssize_t count,
                      PyObject *names) {
    const Call call = {values, count, names};
    Norm n = {0};
    int type;
    (void)self;
    if (!take_norm(call, 1, &n) || !read_kernel(values[0], &type)) return NULL;
    n.out_stride = n.heads * n.size;
    Py_BEGIN_ALLOW_THREADS share_out_rows(n.tokens * n.heads * n.size, n.tokens * n.heads,
                                          norm_types[type], &n);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *rotate(PyObject *self, PyObject *const *values, Py_ssize_t count,
                        PyObject *names) {
    const Call call = {values, count, names};
    Rotate r;
    int type;
    (void)self;
    if (!take_rotate(call, 1, &r) || !read_kernel(values[0], &type)) return NULL;
    Py_BEGIN_ALLOW_THREADS share_out_rows(r.tokens * r.heads * r.size, r.tokens, rotate_types[type],
                                          &r);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *likeliest(PyObject *self, PyObject *const *values, Py_ssize_t count,
                           PyObject *names) {
    const Call call = {values, count, names};
    Likeliest l;
    long rows;
    int type;
    (void)self;
    if (!take_likeliest(call, 2, &l) || !read_kernel(values[0], &type) ||
        !read_long(values[1], &rows))
        return NULL;
    Py_BEGIN_ALLOW_THREADS share_out_if(rows * l.size > 4 * FEW, rows, likeliest_types[type], &l);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *soft_cap(PyObject *self, PyObject *const *values, Py_ssize_t count,
                          PyObject *names) {
    const Call call = {values, count, names};
    SoftCap s;
    long rows;
    int type;
    (void)self;
    if (!take_soft_cap(call, 2, &s) || !read_kernel(values[0], &type) ||
        !read_long(values[1], &rows))
        return NULL;
    Py_BEGIN_ALLOW_THREADS share_out_if(rows * s.size > FEW, rows, soft_cap_types[type], &s);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *embed(PyObject *self, PyObject *const *values, Py_ssize_t count,
                       PyObject *names) {
    const Call call = {values, count, names};
    Embed e;
    long rows;
    (void)self;
    if (!take_embed(call, 1, &e) || !read_long(values[0], &rows)) return NULL;
    for (long i = 0; i < e.tokens; i++)
        if (e.ids[i] < 0 || e.ids[i] >= rows)
            return PyErr_Format(PyExc_IndexError, "there are %ld rows, and none is %ld", rows,
                                (long)e.ids[i]);
    Py_BEGIN_ALLOW_THREADS share_out_rows(e.tokens * e.lanes, e.tokens, embed_rows, &e);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

/* What is compiled once for each set of instructions, for all kinds of elements. */
#define FOR_ISA(x, type) (strcmp(isas[type], "avx2") == 0 ? x##_avx2 : x##_avx512)

static PyObject *convolve(PyObject *self, PyObject *const *values, Py_ssize_t count,
                          PyObject *names) {
    const Call call = {values, count, names};
    Convolution c;
    int type;
    (void)self;
    if (!take_convolve(call, 1, &c) || !read_kernel(values[0], &type)) return NULL;
    const long items = c.rows * ((c.channels + SOME_CHANNELS - 1) / SOME_CHANNELS);
    Py_BEGIN_ALLOW_THREADS share_out_if(
        c.rows * c.length * c.channels > FEW, items, FOR_ISA(convolve, type), &c);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *recur(PyObject *self, PyObject *const *values, Py_ssize_t count,
                       PyObject *names) {
    const Call call = {values, count, names};
    Recurrence r = {0};
    int type;
    (void)self;
    if (!take_recur(call, 1, &r) || !read_kernel(values[0], &type)) return NULL;
    const long columns = (r.values + SOME_COLUMNS - 1) / SOME_COLUMNS,
               items = r.rows * r.heads * columns;
    Py_BEGIN_ALLOW_THREADS share_out_if(items * r.length * r.keys > FEW, items,
                                        FOR_ISA(recur, type), &r);
    Py_END_ALLOW_THREADS if (r.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *scan(PyObject *self, PyObject *const *values, Py_ssize_t count, PyObject *names) {
    const Call call = {values, count, names};
    Scan s = {0};
    int type;
    (void)self;
    if (!take_scan(call, 1, &s) || !read_kernel(values[0], &type)) return NULL;
    const long items = s.rows * ((s.channels + SOME_COLUMNS - 1) / SOME_COLUMNS);
    Py_BEGIN_ALLOW_THREADS share_out_if(s.rows * s.length * s.channels * s.size > FEW, items,
                                        FOR_ISA(scan, type), &s);
    Py_END_ALLOW_THREADS if (s.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *latent(PyObject *self, PyObject *const *values, Py_ssize_t count,
                        PyObject *names) {
    const Call call = {values, count, names};
    Latent l = {0};
    int type;
    (void)self;
    if (!take_latent(call, 1, &l) || !read_kernel(values[0], &type)) return NULL;
    const long items = l.rows * ((l.heads + SOME_HEADS - 1) / SOME_HEADS);
    Py_BEGIN_ALLOW_THREADS share_out(items, FOR_ISA(latent, type), &l);
    Py_END_ALLOW_THREADS if (l.failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
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

#include "grouped.h"
#include "experts.h"
#include "run_layer.h"

/* Their keyword arguments are in arguments.h. */
#define AS_KEYWORDS(name) (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"supports", supports, METH_VARARGS,
     "supports(isa) -> whether this processor has \"avx2\", \"avx512\", \"avx512_bf16\", "
     "\"amx\", \"avx_vnni\", \"avx512_vnni\" or \"amx_int8\", as the kernels use it."},
    {"set_threads", set_threads, METH_VARARGS,
     "set_threads(number): the kernels' threads from now on, the caller among them."},
    {"bind_threads", bind_threads, METH_O,
     "bind_threads(cores): from now on each thread of the team keeps to its core, "
     "but for the first: that is the caller's matter."},
    {"pack", AS_KEYWORDS(pack),
     "pack(type, *, ...): a weight as `linear` reads it, its outputs filled up to 16: see "
     "product.h."},
    {"linear", AS_KEYWORDS(linear),
     "linear(type, groups, low_ranks, *, ...): see product.h. Without adapters, None and None."},
    {"likeliest_output", AS_KEYWORDS(likeliest_output),
     "likeliest_output(type, best, indices, *, ...): the greatest of what `linear` would give, "
     "and where it is, as of `likeliest`."},
    {"pack_codes", AS_KEYWORDS(pack_codes),
     "pack_codes(*, ...): codes of a quantized weight as `quantized_linear` reads them, its "
     "outputs filled up to 16: see codes.h."},
    {"quantized_linear", AS_KEYWORDS(quantized_linear),
     "quantized_linear(type, groups, low_ranks, *, ...): as `linear`, of a weight in codes."},
    {"likeliest_quantized", AS_KEYWORDS(likeliest_quantized),
     "likeliest_quantized(type, best, indices, *, ...): as `likeliest_output`, of a weight in "
     "codes."},
    {"group", group, METH_O, "group(tuple of LinearPart) -> weights for `grouped`: see grouped.h."},
    {"grouped", AS_KEYWORDS(grouped),
     "grouped(type, group, *, ...): `linear`, or `quantized_linear`, of each weight and its rows."},
    {"experts", AS_KEYWORDS(experts),
     "experts(type, group, group, *, ...): experts, of gate and up and of down: see experts.h."},
    {"norm", AS_KEYWORDS(norm), "norm(type, *, ...): see ops.h."},
    {"rotate", AS_KEYWORDS(rotate), "rotate(type, *, ...): see ops.h."},
    {"likeliest", AS_KEYWORDS(likeliest), "likeliest(type, rows, *, ...): see ops.h."},
    {"soft_cap", AS_KEYWORDS(soft_cap), "soft_cap(type, rows, *, ...): see ops.h."},
    {"embed", AS_KEYWORDS(embed),
     "embed(rows, *, ...): some of the rows of a packed weight, see ops.h."},
    {"convolve", AS_KEYWORDS(convolve), "convolve(type, *, ...): see states.h."},
    {"latent", AS_KEYWORDS(latent), "latent(type, *, ...): see states.h."},
    {"recur", AS_KEYWORDS(recur), "recur(type, *, ...): see states.h."},
    {"scan", AS_KEYWORDS(scan), "scan(type, *, ...): see states.h."},
    {"in_huge_pages", in_huge_pages, METH_VARARGS,
     "in_huge_pages(start, bytes): memory that is not used yet may come in huge pages."},
    {"lose", lose, METH_VARARGS,
     "lose(start, bytes): memory whose content nobody reads any more goes back to the system."},
    {"low_rank", low_rank, METH_O, "low_rank(LowRank) -> A and B of an adapter: see product.h."},
    {"low_ranks", low_ranks, METH_VARARGS,
     "low_ranks(tuple, next) -> those of a product, by group of rows; None: it changes nothing. "
     "`next`: those of the model's next product, or None."},
    {"row_groups", row_groups, METH_VARARGS,
     "row_groups(groups, rank) -> rows with adapters, (address of the rows, number, scale) of each "
     "group; `rank`: the greatest of their adapters."},
    {"layer", layer, METH_O, "layer(Layer) -> a layer for run_layer: see layer.h."},
    {"run_layer", AS_KEYWORDS(run_layer),
     "run_layer(layer, Rows, adapted, *, ...): see layer.h. `adapted`: None, or row_groups, and "
     "low_ranks or None of qkv, out, gate_up, down, gate and projection."},
    {"attend", AS_KEYWORDS(attend), "attend(type, Rows, *, ...): see step.h."},
    {"write_kv", AS_KEYWORDS(write_kv), "write_kv(type, *, ...): see step.h."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

/* The module's attribute `name`, from a new object. */
static int export(PyObject *module, const char *name, PyObject *object) {
    const int failed = object == NULL || PyModule_AddObjectRef(module, name, object) < 0;
    Py_XDECREF(object);
    return !failed;
}

/* What Python must agree with: numbers, and the fields of tuples. */
static int export_all(PyObject *module) {
#define NUMBER(name) {#name, name},
    static const struct {
        const char *name;
        long number;
    } numbers[] = {ACTIVATIONS(NUMBER) NUMBER(LANES) NUMBER(TILE) NUMBER(MOST_SIZE)
                       NUMBER(AMX_INPUTS) NUMBER(MOST_TAPS) NUMBER(SEE_ALL) NUMBER(SEE_PAST)
                           NUMBER(SEE_AROUND) NUMBER(AS_INT8) NUMBER(AS_E4M3) NUMBER(E4M3)
                               NUMBER(E5M2)};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].number) < 0) return 0;
#define ENTRY(x, suffix, isa, dtype) , isa, dtype, pair_##suffix
#define FORMAT(x, suffix, isa, dtype) "(ssi)"
#define CODE_ENTRY(x, suffix, isa) , isa
#define CODE_FORMAT(x, suffix, isa) "s"
    return export(module, "CODE_KERNELS",
                  Py_BuildValue("(" CODE_KERNELS(CODE_FORMAT, ) ")" CODE_KERNELS(CODE_ENTRY, ))) &&
           export(module, "KERNELS",
                  Py_BuildValue("(" KERNELS(FORMAT, ) ")" KERNELS(ENTRY, ))) &&
           export(module, "FIELDS", all_fields());
}

PyMODINIT_FUNC PyInit__kernels(void) {
    if (!make_team()) return PyErr_NoMemory();
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && !export_all(module)) Py_CLEAR(module);
    return module;
}
