/*
 * What Python hands over. A list names the fields of a struct that are filled, in order.
 *
 * What changes with each call comes as keyword arguments, which must be named and ordered as the
 * list is: a swapped pair is an error, not a wrong address. What stays for longer comes as a named
 * tuple. The module exports the lists of tuples as FIELDS. arguments.py has a class for each, and
 * library.py refuses the module where they differ. Included by module.c.
 */

#define ROWS_FIELDS(F) F(starts) F(seen) F(first) F(origins) F(rows) F(table) F(table_stride)
#define ATTEND_FIELDS(F)                                                                           \
    F(queries) F(keys) F(values) F(out)                                                            \
    F(query_stride) F(key_stride) F(value_stride) F(out_stride) F(block_tiles)                     \
    F(heads) F(kv_heads) F(size) F(real) F(scale) F(soft_cap) F(window) F(sight)                   \
    F(sinks) F(bias) F(bias_keys) F(bias_center) F(spans)                                          \
    F(code) F(key_scales) F(value_scales) F(scale_page)
#define WRITE_FIELDS(F)                                                                            \
    F(keys) F(values) F(to_keys) F(to_values)                                                      \
    F(key_stride) F(value_stride) F(key_page) F(value_page)                                        \
    F(slots) F(tokens) F(kv_heads) F(size) F(block_size)                                           \
    F(code) F(key_scales) F(value_scales) F(scale_page)
#define PACK_FIELDS(F) F(weight) F(to) F(outputs) F(inputs)
#define LINEAR_FIELDS(F)                                                                           \
    F(weights) F(bias) F(outputs) F(inputs) F(activation) F(is_gated)                              \
    F(x) F(x_stride) F(residual) F(residual_stride) F(out) F(out_stride) F(rows)
#define QUANTIZED_FIELDS(F)                                                                        \
    F(scales) F(offsets) F(values) F(ratios) F(levels) F(zeros) F(order) F(scaled) F(groups)   \
    F(group) F(part) F(bits) F(is_half) F(kernel) F(float8)
#define QUANTIZED_LINEAR_FIELDS(F) LINEAR_FIELDS(F) F(quantized) F(codes)
#define PACK_CODES_FIELDS(F)                                                                       \
    F(codes) F(order) F(to) F(outputs) F(inputs) F(width) F(bits) F(added) F(has_levels)
#define GROUPED_FIELDS(F)                                                                          \
    F(ends) F(biases) F(bias_bytes) F(element) F(x) F(x_stride) F(out) F(codes) F(code_bytes)      \
    F(inputs) F(outputs) F(activation) F(is_gated)
#define EXPERTS_FIELDS(F)                                                                          \
    F(x) F(chosen) F(weights) F(out) F(x_stride) F(tokens) F(top) F(first) F(hidden) F(inner)      \
    F(element) F(up_biases) F(down_biases) F(up_bias_bytes) F(down_bias_bytes) F(rows) F(between)  \
    F(codes) F(up_code_bytes) F(down_code_bytes) F(activation) F(is_gated)
#define NORM_FIELDS(F)                                                                             \
    F(x) F(residual) F(sum) F(out) F(x_stride) F(head_stride) F(residual_stride)                   \
    F(tokens) F(heads) F(size) F(weight) F(bias) F(eps) F(is_wide)
#define ROTATE_FIELDS(F)                                                                           \
    F(x) F(cos) F(sin) F(x_stride) F(head_stride) F(angle_stride) F(tokens) F(heads) F(size)
#define LIKELIEST_FIELDS(F) F(scores) F(best) F(indices) F(stride) F(size)
#define SOFT_CAP_FIELDS(F) F(x) F(stride) F(size) F(cap)
#define EMBED_FIELDS(F) F(weights) F(ids) F(out) F(tokens) F(lanes) F(width)
#define NORM_PART_FIELDS(F) F(weight) F(size) F(eps) F(is_wide)
#define LINEAR_PART_FIELDS(F) F(weights) F(bias) F(quantized)
#define LOW_RANK_PART_FIELDS(F) F(high) F(first) F(last) F(at) F(rank)
#define LOW_RANK_FIELDS(F) F(type) F(low) F(inputs) F(rank) F(first) F(second) F(third)
#define LAYER_FIELDS(F)                                                                            \
    F(type) F(attention_type) F(element)                                                           \
    F(hidden) F(inner) F(heads) F(kv_heads) F(head_size) F(projected) F(activation) F(factor)      \
    F(input) F(post) F(queries) F(keys) F(values) F(attended) F(fed)                               \
    F(qkv) F(out) F(gate_up) F(down)                                                               \
    F(scalar) F(gate) F(projection) F(gated) F(embedding_size)                                     \
    F(key_pages) F(value_pages) F(key_page) F(value_page) F(block_tiles)                           \
    F(code) F(key_scales) F(value_scales) F(scale_page)                                            \
    F(scale) F(soft_cap) F(window) F(sinks)
#define LAYER_STEP_FIELDS(F)                                                                       \
    F(x) F(residual) F(y) F(adds) F(tokens) F(workspace)                                           \
    F(cos) F(sin) F(angle_stride) F(angle_size) F(slots) F(embedding) F(embedding_stride)
#define STATES_FIELDS(F)                                                                           \
    F(tokens) F(blocks) F(starts) F(rows) F(length) F(ring) F(places) F(page)
#define CONVOLVE_FIELDS(F)                                                                         \
    STATES_FIELDS(F)                                                                               \
    F(x) F(weight) F(bias) F(out) F(x_stride) F(channels) F(size) F(width) F(is_bfloat16)          \
    F(activation)
#define RECUR_FIELDS(F)                                                                            \
    STATES_FIELDS(F)                                                                               \
    F(q) F(k) F(v) F(decays) F(factors) F(out) F(stride) F(heads) F(groups) F(keys) F(values)      \
    F(scale) F(eps) F(is_delta) F(per_key)
#define SCAN_FIELDS(F)                                                                             \
    STATES_FIELDS(F)                                                                               \
    F(x) F(time) F(rates) F(into) F(out_of) F(out) F(into_stride) F(out_of_stride) F(channels)     \
    F(size)
#define LATENT_FIELDS(F)                                                                           \
    F(latents) F(places) F(lengths) F(q) F(out) F(stride) F(rows) F(heads) F(size) F(rank)         \
    F(width) F(is_bfloat16) F(scale)

/* (name of the class, list, struct); one that is a field of another comes before it. */
#define TUPLES(T)                                                                                  \
    T(Rows, ROWS_FIELDS, Step)                                                                     \
    T(NormPart, NORM_PART_FIELDS, NormPart)                                                        \
    T(Quantized, QUANTIZED_FIELDS, Quantized)                                                      \
    T(LinearPart, LINEAR_PART_FIELDS, LinearPart)                                                  \
    T(LowRankPart, LOW_RANK_PART_FIELDS, LowRankPart)                                              \
    T(LowRank, LOW_RANK_FIELDS, LowRank)                                                           \
    T(Layer, LAYER_FIELDS, Layer)

/* (suffix, list, struct) */
#define KEYWORDS(K)                                                                                \
    K(attend, ATTEND_FIELDS, Step)                                                                 \
    K(write_kv, WRITE_FIELDS, Write)                                                               \
    K(pack, PACK_FIELDS, Pack)                                                                     \
    K(linear, LINEAR_FIELDS, Linear)                                                               \
    K(pack_codes, PACK_CODES_FIELDS, PackCodes)                                                    \
    K(quantized_linear, QUANTIZED_LINEAR_FIELDS, Linear)                                           \
    K(grouped, GROUPED_FIELDS, GroupedRows)                                                        \
    K(experts, EXPERTS_FIELDS, Experts)                                                            \
    K(norm, NORM_FIELDS, Norm)                                                                     \
    K(rotate, ROTATE_FIELDS, Rotate)                                                               \
    K(likeliest, LIKELIEST_FIELDS, Likeliest)                                                      \
    K(soft_cap, SOFT_CAP_FIELDS, SoftCap)                                                          \
    K(embed, EMBED_FIELDS, Embed)                                                                  \
    K(run_layer, LAYER_STEP_FIELDS, LayerStep)                                                     \
    K(convolve, CONVOLVE_FIELDS, Convolution)                                                      \
    K(recur, RECUR_FIELDS, Recurrence)                                                             \
    K(scan, SCAN_FIELDS, Scan)                                                                     \
    K(latent, LATENT_FIELDS, Latent)

/* These and those of tuples convert an object into what `to` points to. 0: an exception is set. */
static int read_long(PyObject *given, void *to) {
    const long x = PyLong_AsLong(given);
    if (x == -1 && PyErr_Occurred()) return 0;
    *(long *)to = x;
    return 1;
}

static int read_int(PyObject *given, void *to) {
    long x;
    if (!read_long(given, &x)) return 0;
    *(int *)to = (int)x;
    return 1;
}

static int read_float(PyObject *given, void *to) {
    const double x = PyFloat_AsDouble(given);
    if (x == -1 && PyErr_Occurred()) return 0;
    *(float *)to = (float)x;
    return 1;
}

static int read_pointer(PyObject *given, void *to) {
    const unsigned long long x = PyLong_AsUnsignedLongLong(given);
    const void *pointer = (const void *)(uintptr_t)x;
    if (x == (unsigned long long)-1 && PyErr_Occurred()) return 0;
    memcpy(to, &pointer, sizeof pointer);
    return 1;
}

static int read_NormPart(PyObject *given, void *to);
static int read_LinearPart(PyObject *given, void *to);
static int read_LowRankPart(PyObject *given, void *to);
static int read_Quantized(PyObject *given, void *to);

#define NAME_OF(field) #field,
#define READ_FIELD(field)                                                                          \
    &&_Generic(to->field,                                                                          \
               int: read_int,                                                                      \
               long: read_long,                                                                    \
               float: read_float,                                                                  \
               NormPart: read_NormPart,                                                            \
               LinearPart: read_LinearPart,                                                        \
               LowRankPart: read_LowRankPart,                                                      \
               Quantized: read_Quantized,                                                          \
               default: read_pointer)(*values++, (void *)&to->field)
#define COUNT(array) (sizeof(array) / sizeof *(array))

#define TUPLE(name, FIELDS, Struct)                                                                \
    static const char *const fields_of_##name[] = {FIELDS(NAME_OF)};                               \
    static int read_##name(PyObject *given, void *struct_) {                                       \
        PyObject *items[COUNT(fields_of_##name)], **values = items;                                \
        Struct *to = struct_;                                                                      \
        if (!PyTuple_Check(given) || PyTuple_Size(given) != (Py_ssize_t)COUNT(items)) {            \
            PyErr_Format(PyExc_TypeError, "a tuple %s is needed", #name);                          \
            return 0;                                                                              \
        }                                                                                          \
        for (size_t i = 0; i < COUNT(items); i++)                                                  \
            items[i] = PyTuple_GetItem(given, (Py_ssize_t)i);                                      \
        return 1 FIELDS(READ_FIELD);                                                               \
    }
TUPLES(TUPLE)

/* The arguments of a call, as METH_FASTCALL | METH_KEYWORDS gives them. */
typedef struct {
    PyObject *const *values; /* those without a name first */
    Py_ssize_t count;        /* of these */
    PyObject *names;         /* of the others: a tuple, or NULL */
} Call;

/*
 * Whether a call has `count` arguments without a name, and then those of a list.
 * `seen` holds the last names that were right: mostly they are of the same line of Python.
 */
static int has_arguments(Call call, Py_ssize_t count, const char *const *fields, size_t num_fields,
                         PyObject **seen) {
    if (call.count != count) {
        PyErr_Format(PyExc_TypeError, "%zd arguments without a name, not %zd", count, call.count);
        return 0;
    }
    if (call.names != NULL && call.names == *seen) return 1;
    const size_t given = call.names == NULL ? 0 : (size_t)PyTuple_Size(call.names);
    for (size_t i = 0; i < given || i < num_fields; i++) {
        PyObject *name = i < given ? PyTuple_GetItem(call.names, (Py_ssize_t)i) : Py_None;
        if (i < num_fields && i < given && PyUnicode_CompareWithASCIIString(name, fields[i]) == 0)
            continue;
        PyErr_Format(PyExc_TypeError, "keyword argument %zu is %S, not %s", i + 1, name,
                     i < num_fields ? fields[i] : "of this function");
        return 0;
    }
    Py_INCREF(call.names);
    Py_XDECREF(*seen);
    *seen = call.names;
    return 1;
}

#define KEYWORDS_OF(name, FIELDS, Struct)                                                          \
    static int take_##name(Call call, Py_ssize_t count, Struct *to) {                              \
        static const char *const fields[] = {FIELDS(NAME_OF)};                                     \
        static PyObject *seen;                                                                     \
        if (!has_arguments(call, count, fields, COUNT(fields), &seen)) return 0;                   \
        PyObject *const *values = call.values + count;                                             \
        return 1 FIELDS(READ_FIELD);                                                               \
    }
KEYWORDS(KEYWORDS_OF)
#undef NAME_OF
#undef READ_FIELD
#undef TUPLE
#undef KEYWORDS_OF

/* A new tuple of texts. */
static PyObject *texts(const char *const *from, size_t count) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (size_t i = 0; tuple != NULL && i < count; i++) {
        PyObject *text = PyUnicode_FromString(from[i]);
        if (text == NULL || PyTuple_SetItem(tuple, (Py_ssize_t)i, text) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

/* {name of a tuple: names of its fields} */
static PyObject *all_fields(void) {
    static const struct {
        const char *name;
        const char *const *fields;
        size_t count;
    } tuples[] = {
#define ENTRY(name, FIELDS, Struct)                                                                \
    {#name, fields_of_##name, COUNT(fields_of_##name)},
        TUPLES(ENTRY)
#undef ENTRY
    };
    PyObject *all = PyDict_New();
    for (size_t i = 0; all != NULL && i < COUNT(tuples); i++) {
        PyObject *fields = texts(tuples[i].fields, tuples[i].count);
        if (fields == NULL || PyDict_SetItemString(all, tuples[i].name, fields) < 0) Py_CLEAR(all);
        Py_XDECREF(fields);
    }
    return all;
}
