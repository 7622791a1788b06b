/* Included by module.c after the tables of types. */

/*
 * out = the norm of x + residual, all [tokens, hidden], and that sum into `sum`;
 * or where there is no norm, the sum alone. A product that follows gets its codes from the norm.
 */
static void run_norm(const Layer *l, NormPart part, const void *x, const void *residual, void *sum,
                     void *out, long tokens, const Linear *product) {
    Norm n = {.x = x,
              .residual = residual,
              .sum = sum,
              .out = out,
              .weight = part.weight,
              .x_stride = l->hidden,
              .residual_stride = l->hidden};
    n.out_stride = n.size = l->hidden;
    n.tokens = tokens;
    n.heads = 1;
    n.eps = part.eps;
    n.is_wide = part.is_wide;
    if (part.weight != NULL && product != NULL && product->codes != NULL) n.product = product;
    if (part.weight != NULL || residual != NULL)
        share_out_rows(tokens * n.size, tokens, norm_types[l->type], &n);
}

/* x += what is added, both [tokens, hidden]; and then x *= the factor, unless it is NULL. */
static void run_sum(const Layer *l, void *x, const void *added, const void *factor, long tokens) {
    Norm n = {.x = added,
              .residual = x,
              .sum = x,
              .factor = factor,
              .x_stride = l->hidden,
              .residual_stride = l->hidden};
    n.out_stride = n.size = l->hidden;
    n.tokens = tokens;
    n.heads = 1;
    share_out_rows(tokens * n.size, tokens, norm_types[l->type], &n);
}

/* Normalizes parts of `part.size` among `width` elements of each token; `out` has x's strides. */
static void run_head_norm(const Layer *l, NormPart part, const void *x, void *out, long stride,
                          long width, long tokens) {
    Norm n = {.x = x,
              .out = out,
              .weight = part.weight,
              .x_stride = stride,
              .head_stride = part.size,
              .out_stride = stride};
    if (part.weight == NULL) return;
    n.tokens = tokens;
    n.heads = width / part.size;
    n.size = part.size;
    n.eps = part.eps;
    n.is_wide = part.is_wide;
    share_out_rows(tokens * width, tokens * n.heads, norm_types[l->type], &n);
}

/* `codes`: memory for those of x. */
static Linear make_linear(const Layer *l, LinearPart part, const void *x, long inputs, void *out,
                          long outputs, long tokens, float factor, void *codes) {
    Linear p = {.x = x,
                .weights = part.weights,
                .bias = part.bias,
                .out = out,
                .x_stride = inputs,
                .out_stride = outputs,
                .quantized = part.quantized};
    p.rows = tokens;
    if (part.quantized.scales != NULL && part.quantized.float8 == CODED) p.codes = codes;
    choose_code_kernel(&p);
    p.inputs = inputs;
    p.outputs = outputs;
    p.factor = factor;
    p.is_gated = part.weights == l->gate_up.weights;
    p.activation = p.is_gated ? l->activation : PLAIN;
    return p;
}

/* Has a product prefetch the beginning of the next one, where both have elements for weights. */
static void precede(const Layer *l, Linear *p, LinearPart next, long inputs, long outputs) {
    Linear following = make_linear(l, next, NULL, inputs, NULL, outputs, p->rows, 0, NULL);
    if (p->quantized.scales == NULL && next.weights != NULL && next.quantized.scales == NULL)
        fetch_after(p, &following, l->element);
}

/* Has adapters change a product of a layer. */
static void adapt(Linear *p, const LayerStep *s, const LowRanks *low_ranks) {
    if (low_ranks == NULL) return;
    p->groups = s->groups;
    p->low_ranks = low_ranks;
}

/* `follows_norm`: a norm made the codes of x. */
static int run_linear(const Layer *l, Linear *p, int follows_norm) {
    if (!follows_norm) quantize_inputs(p, l->type);
    share_out_product(p, l->type);
    return !p->failed;
}

/*
 * qkv [tokens, heads] -> out [tokens, hidden]. `attention` and `write` as of run_layer_step.
 * 0: out of memory.
 */
static int run_attention(const Layer *l, const LayerStep *s, char *qkv, void *out, void *codes,
                         Step *attention, Write *write) {
    const long q = l->heads * l->head_size, kv = l->kv_heads * l->head_size, wide = q + 2 * kv,
               tokens = s->tokens;
    char *keys = qkv + q * l->element, *values = keys + kv * l->element,
         *attended = qkv + tokens * wide * l->element;
    run_head_norm(l, l->queries, qkv, qkv, wide, q, tokens);
    if (l->projected > q) {
        run_head_norm(l, l->values, l->projected < wide ? keys : values, values, wide, kv, tokens);
        run_head_norm(l, l->keys, keys, keys, wide, kv, tokens);
    }
    Rotate r = {.x = qkv,
                .cos = s->cos,
                .sin = s->sin,
                .x_stride = wide,
                .head_stride = l->head_size,
                .angle_stride = s->angle_stride};
    r.tokens = tokens;
    r.heads = l->projected > q ? l->heads + l->kv_heads : l->heads;
    r.size = s->angle_size;
    share_out_rows(tokens * r.heads * l->head_size, tokens, rotate_types[l->type], &r);
    attention->queries = qkv;
    attention->out = attended;
    attention->query_stride = wide;
    attention->out_stride = q;
    if (attention->table == NULL) {
        attention->keys = keys;
        attention->values = values;
        attention->key_stride = attention->value_stride = wide;
    } else if (l->projected > q) {
        write->keys = keys;
        write->values = values;
        write->key_stride = write->value_stride = wide;
        write_types[l->attention_type](write);
    }
    Linear product =
        make_linear(l, l->out, attended, q, out, l->hidden, tokens, l->factor, codes);
    adapt(&product, s, s->out);
    precede(l, &product, l->gate_up, l->hidden, l->inner);
    return attend_types[l->attention_type](attention) && run_linear(l, &product, 0);
}

/* Adds to the sum what the gate makes of the embedding. `inner` and `out` are memory for results
 * of its products. 0: out of memory. */
static int run_gate(const Layer *l, const LayerStep *s, void *sum, void *inner, void *out,
                    void *codes) {
    Linear gate = make_linear(l, l->gate, sum, l->hidden, inner, l->embedding_size, s->tokens, 0,
                              codes);
    gate.activation = l->activation;
    adapt(&gate, s, s->gate);
    if (!run_linear(l, &gate, 0)) return 0;
    Times t = {.x = inner, .by = s->embedding, .by_stride = s->embedding_stride};
    t.x_stride = t.size = l->embedding_size;
    t.rows = s->tokens;
    share_out_rows(t.rows * t.size, t.rows, times_types[l->type], &t);
    Linear projection = make_linear(l, l->projection, inner, l->embedding_size, out, l->hidden,
                                    s->tokens, 0, codes);
    adapt(&projection, s, s->projection);
    if (!run_linear(l, &projection, 0)) return 0;
    run_norm(l, l->gated, out, NULL, NULL, out, s->tokens, NULL);
    run_sum(l, sum, out, l->scalar, s->tokens);
    return 1;
}

/*
 * 0: out of memory. The call fills in the pointers that `attention` and `write` lack: queries,
 * keys and values of the step, and the output.
 */
static int run_layer_step(const Layer *l, const LayerStep *s, Step *attention, Write *write) {
    const long heads = (l->heads + 2 * l->kv_heads) * l->head_size, tokens = s->tokens,
               most = l->inner > l->embedding_size ? l->inner : l->embedding_size,
               row = l->hidden * l->element, normed = l->input.weight != NULL,
               fed_normed = l->post.weight != NULL;
    char *h = s->workspace, *o = h + tokens * row, *qkv = o + tokens * row,
         *inner = qkv + tokens * (heads + l->heads * l->head_size) * l->element,
         *codes = inner + tokens * most * l->element;
    void *fed = l->scalar == NULL ? s->y : o;
    Linear in = make_linear(l, l->qkv, normed ? h : s->residual, l->hidden, qkv, l->projected,
                            tokens, 0, codes);
    in.out_stride = heads;
    adapt(&in, s, s->qkv);
    precede(l, &in, l->out, l->heads * l->head_size, l->hidden);
    run_norm(l, l->input, s->x, s->adds ? s->residual : NULL, s->residual, h, tokens, &in);
    if (!run_linear(l, &in, normed) || !run_attention(l, s, qkv, o, codes, attention, write))
        return 0;
    run_norm(l, l->attended, o, NULL, NULL, o, tokens, NULL);
    if (l->gate_up.weights == NULL) {
        run_norm(l, l->post, o, s->residual, s->residual, s->y, tokens, NULL);
        return 1;
    }
    Linear gate_up = make_linear(l, l->gate_up, fed_normed ? h : s->residual, l->hidden, inner,
                                 l->inner, tokens, 0, codes);
    adapt(&gate_up, s, s->gate_up);
    precede(l, &gate_up, l->down, l->inner, l->hidden);
    run_norm(l, l->post, o, s->residual, s->residual, h, tokens, &gate_up);
    if (!run_linear(l, &gate_up, fed_normed)) return 0;
    Linear down =
        make_linear(l, l->down, inner, l->inner, fed, l->hidden, tokens, l->factor, codes);
    adapt(&down, s, s->down);
    if (!run_linear(l, &down, 0)) return 0;
    run_norm(l, l->fed, fed, NULL, NULL, fed, tokens, NULL);
    if (l->scalar == NULL) return 1;
    const int is_gated = l->gate.weights != NULL;
    run_sum(l, s->residual, fed, is_gated ? NULL : l->scalar, tokens);
    return is_gated ? run_gate(l, s, s->residual, inner, fed, codes) : 1;
}

static void free_layer(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, "layer")); }

static PyObject *layer(PyObject *self, PyObject *given) {
    Layer *l = calloc(1, sizeof *l);
    (void)self;
    if (l == NULL) return PyErr_NoMemory();
    if (!read_Layer(given, l) || !is_kernel(l->type) || !is_kernel(l->attention_type)) {
        free(l);
        return NULL;
    }
    return PyCapsule_New(l, "layer", free_layer);
}

static PyObject *run_layer(PyObject *self, PyObject *const *values, Py_ssize_t count,
                           PyObject *names) {
    const Call call = {values, count, names};
    LayerStep s;
    Step step = {0};
    int done;
    (void)self;
    if (!take_run_layer(call, 3, &s) || !read_Rows(values[1], &step) ||
        !read_layer_adapters(values[2], &s))
        return NULL;
    const Layer *l = PyCapsule_GetPointer(values[0], "layer");
    if (l == NULL) return NULL;
    step.keys = l->key_pages;
    step.values = l->value_pages;
    step.key_stride = l->key_page;
    step.value_stride = l->value_page;
    step.block_tiles = l->block_tiles;
    step.heads = l->heads;
    step.kv_heads = l->kv_heads;
    step.size = step.real = l->head_size;
    step.group = l->heads / l->kv_heads;
    step.code = l->code;
    step.key_scales = l->key_scales;
    step.value_scales = l->value_scales;
    step.scale_page = l->scale_page;
    step.scale = l->scale;
    step.soft_cap = l->soft_cap;
    step.window = l->window;
    step.sinks = l->sinks;
    step.sight = SEE_PAST;
    Write write = {.to_keys = l->key_pages,
                   .to_values = l->value_pages,
                   .key_page = l->key_page,
                   .value_page = l->value_page,
                   .slots = s.slots,
                   .code = l->code,
                   .key_scales = l->key_scales,
                   .value_scales = l->value_scales,
                   .scale_page = l->scale_page};
    write.tokens = s.tokens;
    write.kv_heads = l->kv_heads;
    write.size = l->head_size;
    write.block_size = l->block_tiles * TILE;
    Py_BEGIN_ALLOW_THREADS done = run_layer_step(l, &s, &step, &write);
    Py_END_ALLOW_THREADS if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}
