/*
 * Norms and rotations. Included once for each kind of element, with the words of types.h.
 * Arithmetic is in float.
 */

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
