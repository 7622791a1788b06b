/*
 * Norms and rotations. Included once for each kind of element, with the words of types.h.
 * Arithmetic is in float.
 */

/* Sixteen of a row of x, from input `at` of a quantized product on. Past the last, zeros. */
TARGET INLINE Floats NAME(inputs)(const Linear *l, const ELEMENT *x, long at) {
    const int32_t *order = l->quantized.order;
    const long there = l->inputs - at;
    if (there >= LANES && order == NULL) return FLOATS(x + at);
    ELEMENT edge[LANES] = {0};
    for (long i = 0; i < LANES && i < there; i++)
        edge[i] = x[order == NULL ? at + i : order[at + i]];
    return FLOATS(edge);
}

/*
 * The codes of a whole group of x, in order. 0: it has NaN or infinity, and no codes yet.
 * Magnitudes are compared as words, of which those two are the greatest. `apart`: the bits of an
 * input's number by which its place moves 15 times further, as in tiles.
 */
TARGET INLINE int NAME(quantize_group)(const ELEMENT *x, long group, long apart, int8_t *to,
                                       float *scale, int32_t *total) {
    const Words magnitude = splat_word(0x7fffffff);
    Words most = splat_word(0), sum = most;
#pragma GCC unroll 4
    for (long i = 0; i < group; i += LANES)
        most = max_words(most, and_words(as_words(FLOATS(x + i)), magnitude));
    if (mask_bits(unordered(mul_lanes(as_floats(most), splat(0))))) return 0;
    const float top = reduce_max(as_floats(most));
    /* What is smaller is 0: its factor might be infinite. */
    const Floats factor = splat(top > 1e-30f ? 127 / top : 0);
#pragma GCC unroll 4
    for (long i = 0; i < group; i += LANES) {
        const Words some = words_of(mul_lanes(FLOATS(x + i), factor));
        sum = add_words(sum, some);
        store_codes(to + i + (i & apart) * (TILE - 1), some);
    }
    *scale = top / 127;
    *total = (int32_t)reduce_add(floats_of(sum));
    return 1;
}

/*
 * The codes of a row of x. Its greatest number has code 127 or -127. Where a group has NaN or
 * infinity, its scale is NaN, and so is what it is multiplied with.
 */
TARGET static void NAME(quantize_row)(const Linear *l, const ELEMENT *x, long row) {
    const Quantized *q = &l->quantized;
    const Codes c = codes_of(l);
    const int tiled = row < l->tiled;
    const long step = tile_codes(q), apart = tiled ? -step : 0, times = tiled ? TILE : 1,
               start = (row - row % times) * q->groups * q->group + row % times * step;
    for (long g = 0; g < q->groups; g++) {
        const long first = g * q->group, at = row * q->groups + g;
        int8_t *to = c.codes + start + first * times;
        if (q->order == NULL && first + q->group <= l->inputs &&
            NAME(quantize_group)(x + first, q->group, apart, to, c.scales + at, c.sums + at))
            continue;
        Floats most = splat(0), zeros = most, sum = most;
        for (long i = 0; i < q->group; i += LANES) {
            const Floats some = NAME(inputs)(l, x, first + i);
            most = max_lanes(most, abs_lanes(some));
            zeros = fma_lanes(some, splat(0), zeros);
        }
        const float top = reduce_max(most), zero = reduce_add(zeros);
        /* What is smaller is 0: its factor might be infinite. */
        const float factor = zero == 0 && top > 1e-30f ? 127 / top : 0;
        for (long i = 0; i < q->group; i += LANES) {
            Floats some = mul_lanes(NAME(inputs)(l, x, first + i), splat(factor));
            some = zero == 0 ? round_lanes(some) : splat(0);
            sum = add_lanes(sum, some);
            store_codes(to + i + (i & apart) * (TILE - 1), words_of(some));
        }
        c.scales[at] = top / 127 + zero;
        c.sums[at] = (int32_t)reduce_add(sum);
    }
}

/* Some rows of what a product of quantized weights multiplies. */
TARGET static void NAME(quantize)(void *job, long item) {
    const Linear *l = job;
    const long end = (item + 1) * SOME_ROWS < l->rows ? (item + 1) * SOME_ROWS : l->rows;
    for (long row = item * SOME_ROWS; row < end; row++)
        NAME(quantize_row)(l, (const ELEMENT *)l->x + row * l->x_stride, row);
}

/* A row, times one element, in place. */
TARGET INLINE void NAME(scale)(ELEMENT *x, long size, const void *factor) {
    ELEMENT first[LANES] = {*(const ELEMENT *)factor};
    const Floats by = splat(first_lane(FLOATS(first)));
    for (long i = 0; i < size; i += LANES) STORE(x + i, mul_lanes(FLOATS(x + i), by));
}

/* Some rows, times those of another matrix, in place. */
TARGET static void NAME(times)(void *job, long item) {
    const Times *t = job;
    const long end = (item + 1) * SOME_ROWS < t->rows ? (item + 1) * SOME_ROWS : t->rows;
    for (long row = item * SOME_ROWS; row < end; row++) {
        ELEMENT *x = (ELEMENT *)t->x + row * t->x_stride;
        const ELEMENT *by = (const ELEMENT *)t->by + row * t->by_stride;
        for (long i = 0; i < t->size; i += LANES)
            STORE(x + i, mul_lanes(FLOATS(x + i), FLOATS(by + i)));
    }
}

/*
 * Some rows: weight * x / sqrt(mean(x x) + eps), or with a bias,
 * weight * (x - mean) / sqrt(variance + eps) + bias.
 * Without a weight, the sum with the residual alone.
 */
TARGET static void NAME(norm)(void *job, long item) {
    const Norm *n = job;
    const long rows = n->tokens * n->heads,
               end = (item + 1) * SOME_ROWS < rows ? (item + 1) * SOME_ROWS : rows;
    for (long row = item * SOME_ROWS; row < end; row++) {
        const long token = row / n->heads, head = row % n->heads;
        const ELEMENT *x = (const ELEMENT *)n->x + token * n->x_stride + head * n->head_stride;
        ELEMENT *out = (ELEMENT *)n->out + token * n->out_stride + head * n->size;
        Floats sum = splat(0), squares = sum;
        if (n->residual != NULL) {
            const ELEMENT *residual = (const ELEMENT *)n->residual + token * n->residual_stride;
            ELEMENT *to = (ELEMENT *)n->sum + token * n->out_stride;
            for (long i = 0; i < n->size; i += LANES)
                STORE(to + i, add_lanes(FLOATS(x + i), FLOATS(residual + i)));
            if (n->factor != NULL) NAME(scale)(to, n->size, n->factor);
            x = to;
        }
        if (n->weight == NULL) continue;
        for (long i = 0; i < n->size; i += LANES) {
            const Floats some = FLOATS(x + i);
            sum = add_lanes(sum, some);
            squares = fma_lanes(some, some, squares);
        }
        float mean = 0, variance = reduce_add(squares) / (float)n->size;
        if (n->bias != NULL) {
            mean = reduce_add(sum) / (float)n->size;
            squares = splat(0);
            for (long i = 0; i < n->size; i += LANES) {
                const Floats some = sub_lanes(FLOATS(x + i), splat(mean));
                squares = fma_lanes(some, some, squares);
            }
            variance = reduce_add(squares) / (float)n->size;
        }
        const Floats scale = splat(1 / sqrtf(variance + n->eps)), offset = splat(mean);
        for (long i = 0; i < n->size; i += LANES) {
            const Floats weight = n->is_wide ? floats_f32((const float *)n->weight + i)
                                             : FLOATS((const ELEMENT *)n->weight + i);
            Floats y = mul_lanes(mul_lanes(sub_lanes(FLOATS(x + i), offset), scale), weight);
            if (n->bias != NULL) y = add_lanes(y, FLOATS((const ELEMENT *)n->bias + i));
            STORE(out + i, y);
        }
        if (n->product != NULL) NAME(quantize_row)(n->product, out, row);
    }
}

/*
 * Some tokens: the sum of their experts' rows by their weights. A product is rounded before it is
 * added, as where one operation gives it and another adds it.
 */
TARGET static void NAME(combine)(void *job, long item) {
    const Experts *e = job;
    const long end = (item + 1) * SOME_ROWS < e->tokens ? (item + 1) * SOME_ROWS : e->tokens;
    for (long token = item * SOME_ROWS; token < end; token++) {
        const long *places = e->places + token * e->top;
        const float *weights = e->weights + token * e->top;
        for (long i = 0; i < e->hidden; i += LANES) {
            Floats sum = splat(0);
            for (long k = 0; k < e->top; k++) {
                if (places[k] < 0) continue;
                const ELEMENT *row = (const ELEMENT *)e->rows + places[k] * e->hidden;
                sum = add_lanes(sum, rounded(mul_lanes(FLOATS(row + i), splat(weights[k]))));
            }
            STORE((ELEMENT *)e->out + token * e->hidden + i, sum);
        }
    }
}

/* As `rotate`, of one token and the last dimensions, fewer than a vector's. */
TARGET static void NAME(rotate_edge)(const Rotate *r, ELEMENT *x, const ELEMENT *cos,
                                     const ELEMENT *sin, long half, size_t there) {
    ELEMENT angles[4][LANES] = {0}, low[LANES] = {0}, high[LANES] = {0};
    memcpy(angles[0], cos, there * sizeof *cos), memcpy(angles[1], cos + half, there * sizeof *cos);
    memcpy(angles[2], sin, there * sizeof *sin), memcpy(angles[3], sin + half, there * sizeof *sin);
    for (long head = 0; head < r->heads; head++, x += r->head_stride) {
        memcpy(low, x, there * sizeof *x), memcpy(high, x + half, there * sizeof *x);
        const Floats first = FLOATS(low), second = FLOATS(high);
        STORE(low, fma_lanes(second, FLOATS(angles[2]), mul_lanes(first, FLOATS(angles[0]))));
        STORE(high, fma_lanes(first, FLOATS(angles[3]), mul_lanes(second, FLOATS(angles[1]))));
        memcpy(x, low, there * sizeof *x), memcpy(x + half, high, there * sizeof *x);
    }
}

/* Some tokens: their heads turned, in place. Dimension i turns with i + size / 2. */
TARGET static void NAME(rotate)(void *job, long item) {
    const Rotate *r = job;
    const long end = (item + 1) * SOME_ROWS < r->tokens ? (item + 1) * SOME_ROWS : r->tokens,
               half = r->size / 2;
    const long whole = half / LANES * LANES;
    for (long token = item * SOME_ROWS; token < end; token++) {
        const ELEMENT *cos = (const ELEMENT *)r->cos + token * r->angle_stride,
                      *sin = (const ELEMENT *)r->sin + token * r->angle_stride;
        if (whole < half)
            NAME(rotate_edge)(r, (ELEMENT *)r->x + token * r->x_stride + whole, cos + whole,
                              sin + whole, half, (size_t)(half - whole));
        for (long i = 0; i < whole; i += LANES) {
            const Floats cos_low = FLOATS(cos + i), cos_high = FLOATS(cos + half + i);
            const Floats sin_low = FLOATS(sin + i), sin_high = FLOATS(sin + half + i);
            for (long head = 0; head < r->heads; head++) {
                ELEMENT *x = (ELEMENT *)r->x + token * r->x_stride + head * r->head_stride + i;
                const Floats low = FLOATS(x), high = FLOATS(x + half);
                STORE(x, fma_lanes(high, sin_low, mul_lanes(low, cos_low)));
                STORE(x + half, fma_lanes(low, sin_high, mul_lanes(high, cos_high)));
            }
        }
    }
}

/* A row: cap * tanh(x / cap), in place. Each of the three results is rounded. */
TARGET static void NAME(soft_cap)(void *job, long row) {
    const SoftCap *s = job;
    ELEMENT *x = (ELEMENT *)s->x + row * s->stride, edge[LANES] = {0};
    const Floats cap = splat(s->cap);
    for (long i = 0; i < s->size; i += LANES) {
        const long there = s->size - i;
        ELEMENT *at = there < LANES ? edge : x + i;
        if (there < LANES) memcpy(edge, x + i, (size_t)there * sizeof *edge);
        STORE(at, div_lanes(FLOATS(at), cap));
        STORE(at, tanh_lanes(FLOATS(at)));
        STORE(at, mul_lanes(FLOATS(at), cap));
        if (there < LANES) memcpy(x + i, edge, (size_t)there * sizeof *edge);
    }
}

/* The greatest element of a row, and where it is: the first of equals. NaN is greater than all. */
TARGET static void NAME(likeliest)(void *job, long row) {
    const Likeliest *l = job;
    const ELEMENT *scores = (const ELEMENT *)l->scores + row * l->stride;
    ELEMENT edge[LANES];
    Floats best = splat(-INFINITY);
    unsigned nan = 0;
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 1) best = splat(reduce_max(best));
        for (long i = 0; i < l->size; i += LANES) {
            const ELEMENT *from = scores + i;
            const long there = l->size - i;
            if (there < LANES) memcpy(edge, from, (size_t)there * sizeof *edge), from = edge;
            Floats some = FLOATS(from);
            if (there < LANES) some = select_lanes(lanes_between(0, there), some, splat(-INFINITY));
            if (pass == 0) {
                best = max_lanes(best, some);
                nan |= mask_bits(unordered(some));
                continue;
            }
            const unsigned found = mask_bits(nan ? unordered(some) : equal(some, best));
            if (!found) continue;
            ((int64_t *)l->indices)[row] = i + __builtin_ctz(found);
            memcpy((ELEMENT *)l->best + row, from + __builtin_ctz(found), sizeof(ELEMENT));
            return;
        }
    }
}
