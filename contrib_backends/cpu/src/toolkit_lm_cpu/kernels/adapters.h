/* Adapters of a step, as Python hands them over. Included by module.c after the tables of types. */

static void *pointer_of(PyObject *capsule, const char *name) {
    return PyCapsule_GetPointer(capsule, name);
}

static void free_low_rank(PyObject *capsule) { free(pointer_of(capsule, "low_rank")); }

/* The context is the capsule that `next` points into. */
static void free_low_ranks(PyObject *capsule) {
    free(pointer_of(capsule, "low_ranks"));
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
}

static void free_row_groups(PyObject *capsule) {
    RowGroups *groups = pointer_of(capsule, "row_groups");
    if (groups->count) free(groups->of[0].low);
    free(groups);
}

static PyObject *low_rank(PyObject *self, PyObject *given) {
    LowRank *a = calloc(1, sizeof *a);
    (void)self;
    if (a == NULL) return PyErr_NoMemory();
    if (!read_LowRank(given, a) || !is_kernel(a->type)) {
        free(a);
        return NULL;
    }
    return PyCapsule_New(a, "low_rank", free_low_rank);
}

static PyObject *low_ranks(PyObject *self, PyObject *args) {
    PyObject *given, *next;
    const LowRanks *following = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &given, &next)) return NULL;
    const Py_ssize_t count = PyTuple_Size(given);
    if (next != Py_None && (following = pointer_of(next, "low_ranks")) == NULL) return NULL;
    if (following != NULL && following->count != count)
        return PyErr_Format(PyExc_ValueError, "adapters of %ld groups of rows, and %ld follow",
                            (long)count, following->count);
    LowRanks *all = calloc(1, sizeof *all + (size_t)count * sizeof *all->of);
    if (all == NULL) return PyErr_NoMemory();
    all->count = count;
    all->next = following;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PyTuple_GetItem(given, i);
        if (one == Py_None) continue;
        if ((all->of[i] = pointer_of(one, "low_rank")) == NULL) {
            free(all);
            return NULL;
        }
    }
    PyObject *capsule = PyCapsule_New(all, "low_ranks", free_low_ranks);
    if (capsule == NULL)
        free(all);
    else if (following != NULL)
        PyCapsule_SetContext(capsule, Py_NewRef(next));
    return capsule;
}

static PyObject *row_groups(PyObject *self, PyObject *args) {
    PyObject *given;
    long rank;
    size_t rows = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!l", &PyTuple_Type, &given, &rank)) return NULL;
    const Py_ssize_t count = PyTuple_Size(given);
    RowGroups *groups = calloc(1, sizeof *groups + (size_t)count * sizeof *groups->of);
    if (groups == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        RowGroup *group = groups->of + i;
        unsigned long long at;
        if (!PyArg_ParseTuple(PyTuple_GetItem(given, i), "Klf", &at, &group->count,
                              &group->scale)) {
            free(groups);
            return NULL;
        }
        group->rows = (const int64_t *)(uintptr_t)at;
        rows += (size_t)group->count;
    }
    /* No element of A x is larger than a float. */
    float *low = aligned_alloc(64, (rows * (size_t)rank * sizeof *low + 64) / 64 * 64);
    if (low == NULL) {
        free(groups);
        return PyErr_NoMemory();
    }
    groups->count = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        groups->of[i].low = low;
        low += groups->of[i].count * rank;
    }
    if (count == 0) free(low);
    return PyCapsule_New(groups, "row_groups", free_row_groups);
}

/* Adapters of a product with `rows` rows: capsules, or None. */
static int read_low_ranks(PyObject *given, const RowGroups *groups, const LowRanks **to) {
    *to = NULL;
    if (given == Py_None) return 1;
    *to = pointer_of(given, "low_ranks");
    if (*to == NULL) return 0;
    if ((*to)->count == groups->count) return 1;
    PyErr_Format(PyExc_ValueError, "adapters of %ld groups of rows, and there are %ld",
                 (*to)->count, groups->count);
    return 0;
}

static int read_groups(PyObject *given, long rows, const RowGroups **to) {
    *to = pointer_of(given, "row_groups");
    if (*to == NULL) return 0;
    for (long g = 0; g < (*to)->count; g++) {
        const RowGroup *group = (*to)->of + g;
        if (group->count == 0 || group->rows[group->count - 1] < rows) continue;
        PyErr_Format(PyExc_ValueError, "there are %ld rows, and an adapter of row %ld", rows,
                     (long)group->rows[group->count - 1]);
        return 0;
    }
    return 1;
}

static int read_adapted(PyObject *groups, PyObject *low_ranks, Linear *l) {
    if (groups == Py_None) return 1;
    if (!read_groups(groups, l->rows, &l->groups) ||
        !read_low_ranks(low_ranks, l->groups, &l->low_ranks))
        return 0;
    if (l->low_ranks == NULL) l->groups = NULL;
    return 1;
}

static int read_layer_adapters(PyObject *given, LayerStep *s) {
    const LowRanks **of[] = {&s->qkv, &s->out, &s->gate_up, &s->down, &s->gate, &s->projection};
    const int count = sizeof of / sizeof *of;
    s->groups = NULL;
    for (int i = 0; i < count; i++) *of[i] = NULL;
    if (given == Py_None) return 1;
    if (!PyTuple_Check(given) || PyTuple_Size(given) != count + 1) {
        PyErr_SetString(PyExc_TypeError, "a tuple of seven is needed");
        return 0;
    }
    if (!read_groups(PyTuple_GetItem(given, 0), s->tokens, &s->groups)) return 0;
    for (int i = 0; i < count; i++)
        if (!read_low_ranks(PyTuple_GetItem(given, i + 1), s->groups, of[i])) return 0;
    return 1;
}

/* A product; A x of its adapters in the same job. */
static void share_out_product(Linear *l, int type) {
    int low = -1;
    for (long g = 0; l->groups != NULL && g < l->groups->count; g++)
        if (l->low_ranks->of[g] != NULL && l->groups->of[g].count) low = l->low_ranks->of[g]->type;
    if (low < 0) {
        l->groups = NULL;
        share_out_linear(l, linear_types[type]);
        return;
    }
    cut_linear(l);
    l->multiply_low = low_types[low];
    l->multiply = linear_types[type];
    /* Of few items each has one panel, so that all threads have some. */
    l->low_width = PANELS;
    if (count_lows(l) < 4 * atomic_load(&team.threads) && atomic_load(&team.threads) > 1)
        l->low_width = 1;
    l->lows = count_lows(l);
    share_out_if(l->rows * l->inputs * l->outputs > FEW,
                 l->lows + l->row_blocks * l->column_blocks, multiply_adapted, l);
}
