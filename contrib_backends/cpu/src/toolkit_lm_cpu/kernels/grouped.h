/*
 * Products of the rows of several weights, of one shape, in one job: of experts, or of heads.
 * Each is as `linear`, or `quantized_linear`, of its rows alone. Included by module.c.
 */

typedef struct {
    long count;
    LinearPart of[];
} Group;

#define GROUP "toolkit_lm_cpu.group"

/* The products that have rows, and what is done with each of their items. */
typedef struct {
    Linear *of;
    long *first; /* the first item of each */
    long count;
    Item item;
} GroupedJob;

static void grouped_item(void *job, long item) {
    const GroupedJob *g = job;
    long low = 0, high = g->count - 1;
    while (low < high) {
        const long middle = (low + high + 1) / 2;
        if (g->first[middle] <= item)
            low = middle;
        else
            high = middle - 1;
    }
    g->item(g->of + low, item - g->first[low]);
}

static void free_group(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, GROUP)); }

static PyObject *group(PyObject *self, PyObject *parts) {
    (void)self;
    if (!PyTuple_Check(parts))
        return PyErr_Format(PyExc_TypeError, "a tuple of products is needed");
    const Py_ssize_t count = PyTuple_Size(parts);
    Group *made = malloc(sizeof *made + (size_t)count * sizeof *made->of);
    if (made == NULL) return PyErr_NoMemory();
    made->count = count;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!read_LinearPart(PyTuple_GetItem(parts, i), made->of + i)) {
            free(made);
            return NULL;
        }
    PyObject *capsule = PyCapsule_New(made, GROUP, free_group);
    if (capsule == NULL) free(made);
    return capsule;
}

/* The product of one weight. */
static Linear linear_of(const GroupedRows *r, const LinearPart *part, long index, long begin) {
    Linear l = {.x = (const char *)r->x + begin * r->x_stride * r->element,
                .weights = part->weights,
                .bias = r->biases == NULL ? NULL
                                          : (const char *)r->biases + index * r->bias_bytes,
                .out = (char *)r->out + begin * r->outputs * r->element,
                .x_stride = r->x_stride,
                .out_stride = r->outputs,
                .rows = r->ends[index] - begin,
                .inputs = r->inputs,
                .outputs = r->outputs,
                .activation = r->activation,
                .is_gated = r->is_gated,
                .quantized = part->quantized,
                .codes = r->codes == NULL ? NULL : (char *)r->codes + begin * r->code_bytes};
    choose_code_kernel(&l);
    cut_linear(&l);
    return l;
}

/* Items of all products: some of their rows each, or what `cut_linear` made. */
static long number_items(GroupedJob *job, int are_rows) {
    long items = 0;
    for (long i = 0; i < job->count; i++) {
        const Linear *l = job->of + i;
        job->first[i] = items;
        items += are_rows ? (l->rows + SOME_ROWS - 1) / SOME_ROWS
                          : l->row_blocks * l->column_blocks;
    }
    return items;
}

/* 0: out of memory. */
static int multiply_grouped(const Group *weights, const GroupedRows *r, int type) {
    GroupedJob job = {.of = malloc((size_t)weights->count * (sizeof(Linear) + sizeof(long)) + 1)};
    if (job.of == NULL) return 0;
    job.first = (long *)(job.of + weights->count);
    long begin = 0;
    for (long i = 0; i < weights->count; begin = r->ends[i++])
        if (r->ends[i] > begin) job.of[job.count++] = linear_of(r, weights->of + i, i, begin);
    if (r->codes != NULL) {
        job.item = quantize_types[type];
        share_out_if(begin * r->inputs > 4 * FEW, number_items(&job, 1), grouped_item, &job);
    }
    job.item = linear_types[type];
    share_out_if(begin * r->inputs * r->outputs > FEW, number_items(&job, 0), grouped_item, &job);
    int failed = 0;
    for (long i = 0; i < job.count; i++) failed |= job.of[i].failed;
    free(job.of);
    return !failed;
}

static PyObject *grouped(PyObject *self, PyObject *const *values, Py_ssize_t count,
                         PyObject *names) {
    const Call call = {values, count, names};
    GroupedRows rows = {0};
    int type, done;
    (void)self;
    if (!take_grouped(call, 2, &rows) || !read_kernel(values[0], &type)) return NULL;
    const Group *weights = PyCapsule_GetPointer(values[1], GROUP);
    if (weights == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS done = multiply_grouped(weights, &rows, type);
    Py_END_ALLOW_THREADS if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
