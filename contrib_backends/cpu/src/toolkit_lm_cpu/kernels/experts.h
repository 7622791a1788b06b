/*
 * A layer's experts, of which each token goes to a few: the rows of each expert are brought
 * together, multiplied as `grouped` does, and each token's results are summed with their weights,
 * in the order of its experts. Included by module.c.
 */

#define ELSEWHERE -1 /* the place of a row whose expert is not held */

/* Counts the rows of each expert, and places them, those of an expert in the order of tokens. */
static void place_rows(const Experts *e, long count, int32_t *ends, long *places) {
    const long rows = e->tokens * e->top;
    memset(ends, 0, (size_t)count * sizeof *ends);
    for (long i = 0; i < rows; i++) {
        const long expert = (long)e->chosen[i] - e->first;
        places[i] = expert >= 0 && expert < count ? expert : ELSEWHERE;
        if (places[i] != ELSEWHERE) ends[expert]++;
    }
    for (long k = 1; k < count; k++) ends[k] += ends[k - 1];
    /* From the last row on, each end moves to where its expert's rows begin. */
    for (long i = rows - 1; i >= 0; i--)
        if (places[i] != ELSEWHERE) places[i] = --ends[places[i]];
}

static void gather_rows(void *job, long item) {
    const Experts *e = job;
    const long rows = e->tokens * e->top, bytes = e->hidden * e->element,
               end = (item + 1) * SOME_ROWS < rows ? (item + 1) * SOME_ROWS : rows;
    for (long i = item * SOME_ROWS; i < end; i++)
        if (e->places[i] != ELSEWHERE)
            memcpy((char *)e->rows + e->places[i] * bytes,
                   (const char *)e->x + i / e->top * e->x_stride * e->element, (size_t)bytes);
}

/* 0: out of memory. */
static int compute_experts(Experts *e, const Group *gate_up, const Group *down, int type) {
    const long rows = e->tokens * e->top, count = gate_up->count;
    long *places = malloc((size_t)rows * sizeof *places + (size_t)(count + 1) * sizeof(int32_t));
    if (places == NULL) return 0;
    int32_t *ends = (int32_t *)(places + rows);
    place_rows(e, count, ends, places);
    /* They are where rows begin by now: those of one expert end where those of the next begin. */
    long held = 0;
    for (long i = 0; i < rows; i++) held += places[i] != ELSEWHERE;
    memmove(ends, ends + 1, (size_t)(count - 1) * sizeof *ends);
    ends[count - 1] = (int32_t)held;
    e->places = places;
    share_out_rows(rows * e->hidden, rows, gather_rows, e);
    GroupedRows first = {.ends = ends,
                         .biases = e->up_biases,
                         .bias_bytes = e->up_bias_bytes,
                         .element = e->element,
                         .x = e->rows,
                         .out = e->between,
                         .codes = e->up_code_bytes > 0 ? e->codes : NULL,
                         .code_bytes = e->up_code_bytes,
                         .x_stride = e->hidden,
                         .inputs = e->hidden,
                         .outputs = e->inner,
                         .activation = e->activation,
                         .is_gated = e->is_gated};
    GroupedRows second = {.ends = ends,
                          .biases = e->down_biases,
                          .bias_bytes = e->down_bias_bytes,
                          .element = e->element,
                          .x = e->between,
                          .out = e->rows,
                          .codes = e->down_code_bytes > 0 ? e->codes : NULL,
                          .code_bytes = e->down_code_bytes,
                          .x_stride = e->inner,
                          .inputs = e->inner,
                          .outputs = e->hidden};
    const int done =
        multiply_grouped(gate_up, &first, type) && multiply_grouped(down, &second, type);
    if (done) share_out_rows(rows * e->hidden, e->tokens, combine_types[type], e);
    free(places);
    return done;
}

static PyObject *experts(PyObject *self, PyObject *const *values, Py_ssize_t count,
                         PyObject *names) {
    const Call call = {values, count, names};
    Experts e = {0};
    int type, done;
    (void)self;
    if (!take_experts(call, 3, &e) || !read_kernel(values[0], &type)) return NULL;
    const Group *gate_up = PyCapsule_GetPointer(values[1], GROUP);
    const Group *down = gate_up == NULL ? NULL : PyCapsule_GetPointer(values[2], GROUP);
    if (down == NULL) return NULL;
    if (gate_up->count != down->count || gate_up->count == 0)
        return PyErr_Format(PyExc_ValueError, "as many experts are needed in both groups");
    Py_BEGIN_ALLOW_THREADS done = compute_experts(&e, gate_up, down, type);
    Py_END_ALLOW_THREADS if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
