/*
 * Exact attention of a step's flat batch: softmax(scale q k^T) v, and the KV cache that it reads.
 *
 * Included once for each kind of element, with the words of types.h.
 *
 * Keys and values lie in tiles of 16 tokens, one for each KV head,
 * so that both products read whole vectors:
 *   keys   [D / PAIR][16] lanes: a lane is a token
 *   values [16 / PAIR][D] lanes: a lane is an element
 * In the cache a block holds its heads' tiles one after the other.
 * Without a cache they are laid out so in a thread's own memory.
 *
 * The query heads that share a KV head, of one token or of several, are the rows of both products,
 * up to ROWS at a time. Keys are taken SPAN at a time. Spans are merged in order by their softmax
 * states. A row's result depends on its own keys alone. It does not depend on the rest of the
 * batch, the number of threads, or the division of the prompt into chunks.
 *
 * The tiles of AMX add 32 products at a time, in an order of their own. So their values are those
 * of two tiles of the cache, side by side: the pair that a key belongs to follows from its position
 * alone, and what a row does not see of it has the weight 0.
 */

typedef struct {
    /* the rows of a work item, MANY at most, and what fills up the last rows of a product */
    const void *queries[MANY + ROWS];        /* [D] each */
    const float *bias[MANY + ROWS];          /* [keys] each, or NULL */
    long from[MANY + ROWS], to[MANY + ROWS]; /* the keys that a row sees */
    long row;                                /* the first of those that are multiplied */
    const LANE *keys[SPAN / TILE + 1]; /* tiles of the span */
    const LANE *values[SPAN / TILE];
    long begin;       /* the span's first key */
    long first, last; /* of its keys, those that any row sees, from the span's first on */
    float scores[ROWS * SPAN] __attribute__((aligned(64)));
    WEIGHT weights[ROWS * SPAN] __attribute__((aligned(64)));
    /* scales of the span's keys and values, where the cache is quantized */
    float key_scales[SPAN], value_scales[SPAN];
    long decoded; /* the span whose tiles are decoded; -1: none */
    uint32_t tiles_decoded; /* of them, those that are, a bit each */
    /* [ROWS][D] weighted values, not divided yet */
    float sums[ROWS * MOST_SIZE] __attribute__((aligned(64)));
    /* heads that zeros fill up, of a tile's keys and values */
    ELEMENT padded[2 * TILE * MOST_SIZE];
    Sum sum[ROWS];
    /* the queries side by side, where they are not read in place */
    ELEMENT rows[MANY * MOST_SIZE] __attribute__((aligned(64)));
    Sum many[MANY]; /* states of the spans so far, and their sums [MANY][D] */
    float many_sums[MANY * MOST_SIZE] __attribute__((aligned(64)));
#if CONVERTS
    float converted[MANY * MOST_SIZE] __attribute__((aligned(64)));
#endif
#if AMX
    uint8_t table[2][128] __attribute__((aligned(64))); /* of make_table */
    Pair pairs[SPAN / TILE / 2];
    long packed;           /* the span whose pairs are packed; -1: none */
    uint32_t pairs_packed; /* of them, those that are, a bit each */
    LANE packs[SPAN / PAIR * MOST_SIZE] __attribute__((aligned(64)));
    /* the first and the last pair, as far as they are seen */
    LANE edge[2][TILE * MOST_SIZE] __attribute__((aligned(64)));
#endif
} NAME(Span);

/* Writes a whole tile: keys and values [count, D] of up to 16 tokens, zeros past `count`. */
TARGET static void NAME(write_tile)(const ELEMENT *keys, const ELEMENT *values, long key_stride,
                                    long value_stride, int count, long size, LANE *to_keys,
                                    LANE *to_values) {
    const long lanes = size / PAIR;
#if CONVERTS
    for (long d = 0; d < lanes; d++)
        for (int t = 0; t < TILE; t++)
            to_keys[d * TILE + t] = t < count ? keys[t * key_stride + d] : 0;
#else
    for (long d = 0; d < lanes; d += LANES) {
        const int columns = lanes - d < LANES ? (int)(lanes - d) : LANES;
        transpose(keys + d * PAIR, key_stride * (long)sizeof *keys, count,
                  (uint32_t *)to_keys + d * TILE, TILE, columns);
    }
#endif
    for (int t = 0; t < TILE; t += PAIR)
        for (long d = 0; d < size; d += LANES) {
            const ELEMENT *at = values + t * value_stride + d;
            LANE *to = to_values + t / PAIR * size + d;
#if PAIR == 1
            if (t < count)
                memcpy(to, at, LANES * sizeof *to);
            else
                memset(to, 0, LANES * sizeof *to);
#else
            const Words low = t < count ? load_u16(at) : splat_word(0),
                        high = t + 1 < count ? load_u16(at + value_stride) : splat_word(0);
            store_32(to, or_words(low, left_16(high)));
#endif
        }
}

/* Writes one token into a tile. */
TARGET static void NAME(write_token)(const ELEMENT *key, const ELEMENT *value, int t, long size,
                                     LANE *to_keys, LANE *to_values) {
    const LANE *lanes = (const LANE *)key;
    for (long d = 0; d < size / PAIR; d++) to_keys[d * TILE + t] = lanes[d];
#if PAIR == 1
    memcpy(to_values + t * size, value, size * sizeof *value);
#else
    /* Only half of each lane is written: another thread may be writing the other token's half. */
    for (long d = 0; d < size; d += LANES)
        store_halves(to_values + t / 2 * size + d, value + d, t % 2);
#endif
}

/* Writes a segment of tokens, of one KV head, to the cache. */
TARGET static void NAME(write_segment)(void *job, long item) {
    const Write *w = job;
    const long tile_lanes = TILE * w->size / PAIR, segment = item / w->kv_heads,
               head = item % w->kv_heads;
    const long end = (segment + 1) * SEGMENT < w->tokens ? (segment + 1) * SEGMENT : w->tokens;
    for (long i = segment * SEGMENT, next; i < end; i = next) {
        const long slot = w->slots[i], within = slot % w->block_size;
        next = i + 1;
        if (slot < 0) continue;
        if (w->code != AS_ELEMENTS) {
            NAME(write_quantized)(w, i, head);
            continue;
        }
        const long at = (head * w->block_size + within) / TILE * tile_lanes;
        const ELEMENT *key = (const ELEMENT *)w->keys + i * w->key_stride + head * w->size;
        const ELEMENT *value = (const ELEMENT *)w->values + i * w->value_stride + head * w->size;
        LANE *keys = (LANE *)((ELEMENT *)w->to_keys + slot / w->block_size * w->key_page) + at;
        LANE *values =
            (LANE *)((ELEMENT *)w->to_values + slot / w->block_size * w->value_page) + at;
        if (slot % TILE == 0)
            while (next < end && next - i < TILE && w->slots[next] == slot + next - i) next++;
        if (next - i == TILE) {
            NAME(write_tile)(key, value, w->key_stride, w->value_stride, TILE, w->size, keys,
                             values);
        } else {
            next = i + 1;
            NAME(write_token)(key, value, (int)(slot % TILE), w->size, keys, values);
        }
    }
}

static void NAME(write)(Write *w) {
    const long segments = (w->tokens + SEGMENT - 1) / SEGMENT;
    share_out_if(w->tokens * w->kv_heads * w->size > LONG / 16, segments * w->kv_heads,
                 NAME(write_segment), w);
}

/*
 * Scores of sixteen keys, times log2(e): scaled, capped and biased.
 * Keys that the row does not see are masked.
 */
TARGET INLINE Floats NAME(shape)(const Step *step, Floats score, const float *bias, Mask seen) {
    if (step->soft_cap > 0) {
        const Floats part = mul_lanes(score, splat(step->scale / step->soft_cap));
        score = mul_lanes(tanh_lanes(part), splat(step->soft_cap * LOG2_E));
    } else {
        score = mul_lanes(score, splat(step->scale * LOG2_E));
    }
    if (bias != NULL) score = fma_lanes(floats_masked(seen, bias), splat(LOG2_E), score);
    return select_lanes(seen, score, splat(-INFINITY));
}

/*
 * Shapes the scores of one row, and finds the greatest. `is_plain`: they are only scaled, by a
 * factor above 0, which is left to `weigh_row`. `is_coded`: the cache is quantized.
 */
TARGET INLINE void NAME(find_top)(const Step *step, NAME(Span) *s, int r, const int is_plain,
                                  const int is_coded) {
    const long begin = s->first / TILE * TILE, end = s->last, from = s->from[s->row + r] - s->begin,
               to = s->to[s->row + r] - s->begin;
    const float *bias = s->bias[s->row + r] == NULL ? NULL : s->bias[s->row + r] + s->begin;
    float *scores = s->scores + r * SPAN;
    Floats most = splat(-INFINITY);
    for (long t = begin; t < end; t += TILE) {
        const int is_whole = from <= t && to >= t + TILE;
        Floats score = floats_f32(scores + t);
        if (is_coded) score = mul_lanes(score, floats_f32(s->key_scales + t));
        if (!is_plain)
            score = NAME(shape)(step, score, bias == NULL ? NULL : bias + t,
                                lanes_between(from - t, to - t));
        else if (!is_whole)
            score = select_lanes(lanes_between(from - t, to - t), score, splat(-INFINITY));
        most = max_lanes(most, score);
        if (!is_plain || !is_whole) store_f32(scores + t, score);
    }
    s->sum[r].top = reduce_max(most);
}

/* Turns the scores of one row, as `find_top` leaves them, into softmax weights. */
TARGET INLINE void NAME(weigh_row)(const Step *step, NAME(Span) *s, int r, const int is_plain,
                                   const int is_coded) {
    const long begin = s->first / TILE * TILE, end = s->last, from = s->from[s->row + r] - s->begin,
               to = s->to[s->row + r] - s->begin;
    const float factor = step->scale * LOG2_E, top = s->sum[r].top;
    const float *scores = s->scores + r * SPAN;
    Floats sum = splat(0);
    const Floats above = splat(top == -INFINITY ? 0.0f : top);
    for (long t = begin; t < end; t += TILE) {
        const Floats below = sub_lanes(floats_f32(scores + t), above);
        Floats weights = exp2_lanes(is_plain ? mul_lanes(below, splat(factor)) : below, TERMS);
        sum = add_lanes(sum, weights);
        if (is_coded)
            weights = mul_lanes(weights, floats_masked(lanes_between(from - t, to - t),
                                                       s->value_scales + t));
        STORE_WEIGHTS(s->weights + r * SPAN + t, weights);
    }
    const float total = reduce_add(sum);
    /*
     * A total that is not itself is NaN, which one NaN among the scores makes it. `top` may have
     * missed that, since max_lanes takes the second of two where the first is NaN; it may even be
     * -INFINITY, and `join` takes a span with such a top for one that is not seen. So the top
     * becomes NaN too, and the row's result after it.
     */
    s->sum[r] = (Sum){total != total ? total : is_plain ? top * factor : top, total};
}

/* Rows one after the other in each pass, so that what one waits for does not hold up the next. */
TARGET INLINE void NAME(weigh_rows)(const Step *step, NAME(Span) *s, int rows, const int is_plain,
                                    const int is_coded) {
    for (int r = 0; r < rows; r++) NAME(find_top)(step, s, r, is_plain, is_coded);
    for (int r = 0; r < rows; r++) NAME(weigh_row)(step, s, r, is_plain, is_coded);
}

TARGET INLINE void NAME(weigh)(const Step *step, NAME(Span) *s, int rows) {
    if (step->code != AS_ELEMENTS)
        NAME(weigh_rows)(step, s, rows, 0, 1);
    else if (step->bias == NULL && step->soft_cap <= 0 && step->scale > 0)
        NAME(weigh_rows)(step, s, rows, 1, 0);
    else
        NAME(weigh_rows)(step, s, rows, 0, 0);
}

#if !AMX

/* sums[r][b] += sum over i in [first, last) of lanes i of x[r], times y[b] at i * stride. */
TARGET INLINE void NAME(product)(Floats sums[ROWS][4], const void *const *x, const LANE *const *y,
                                 long stride, long first, long last, const int rows,
                                 const int blocks) {
    for (long i = first; i < last; i++) {
        Words lanes[4];
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) lanes[b] = LOAD(y[b] + i * stride);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const Words one = splat_word(((const int32_t *)x[r])[i]);
#pragma GCC unroll 4
            for (int b = 0; b < blocks; b++) sums[r][b] = DOT(sums[r][b], one, lanes[b]);
        }
    }
}

TARGET INLINE void NAME(score_tiles)(NAME(Span) *s, long size, long tile, const int rows,
                                     const int tiles) {
    Floats sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < tiles; b++) sums[r][b] = splat(0);
    NAME(product)(sums, s->queries + s->row, s->keys + tile, TILE, 0, size / PAIR, rows, tiles);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < tiles; b++)
            store_f32(s->scores + r * SPAN + (tile + b) * TILE, sums[r][b]);
}

#if PAIR == 2
TARGET INLINE void NAME(add_half)(Floats sums[ROWS][4], const void *const *x, const LANE *const *y,
                                  long stride, long i, uint32_t half, const int rows,
                                  const int blocks) {
    for (int b = 0; b < blocks; b++) {
        const Words lanes = and_words(LOAD(y[b] + i * stride), splat_word((int32_t)half));
        for (int r = 0; r < rows; r++)
            sums[r][b] = DOT(sums[r][b], splat_word(((const int32_t *)x[r])[i]), lanes);
    }
}
#endif

TARGET INLINE void NAME(combine_blocks)(NAME(Span) *s, long size, long element, const int rows,
                                        const int blocks) {
    Floats sums[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) sums[r][b] = splat(0);
    for (long t = s->first / TILE * TILE; t < s->last; t += TILE) {
        const LANE *values[4];
        const void *weights[ROWS];
        const long first = s->first > t ? s->first - t : 0,
                   last = s->last - t < TILE ? s->last - t : TILE;
        for (int b = 0; b < blocks; b++) values[b] = s->values[t / TILE] + element + b * TILE;
        for (int r = 0; r < rows; r++) weights[r] = s->weights + r * SPAN + t;
#if PAIR == 1
        NAME(product)(sums, weights, values, size, first, last, rows, blocks);
#else
        /*
         * Of a pair that is seen in part, the other half is whatever lies there.
         * Lanes are added in order all the same.
         */
        if (first % 2)
            NAME(add_half)(sums, weights, values, size, first / 2, 0xffff0000u, rows, blocks);
        NAME(product)(sums, weights, values, size, (first + 1) / 2, last / 2, rows, blocks);
        if (last % 2)
            NAME(add_half)(sums, weights, values, size, last / 2, 0x0000ffffu, rows, blocks);
#endif
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++)
            store_f32(s->sums + r * size + element + b * TILE, sums[r][b]);
}

/* The sums of `rows` rows, 1, 2, 4 or 8. */
TARGET INLINE void NAME(attend_span)(const Step *step, NAME(Span) *s, const int rows) {
    const long size = step->size, last = (s->last + TILE - 1) / TILE;
    const int wide = rows * 4 <= SUMS ? 4 : rows * 2 <= SUMS ? 2 : 1;
    long tile = s->first / TILE, d = 0;
    for (; tile + wide <= last; tile += wide) NAME(score_tiles)(s, size, tile, rows, wide);
    if (wide == 4 && tile + 2 <= last) NAME(score_tiles)(s, size, tile, rows, 2), tile += 2;
    if (wide > 1 && tile < last) NAME(score_tiles)(s, size, tile, rows, 1);
    NAME(weigh)(step, s, rows);
    for (; d + wide * TILE <= size; d += wide * TILE) NAME(combine_blocks)(s, size, d, rows, wide);
    if (wide == 4 && d + 2 * TILE <= size) NAME(combine_blocks)(s, size, d, rows, 2), d += 2 * TILE;
    if (wide > 1 && d < size) NAME(combine_blocks)(s, size, d, rows, 1);
}

/* Attends over the span that `s` describes, for its first `rows` rows. */
TARGET static void NAME(attend_rows)(const Step *step, NAME(Span) *s, int rows) {
    const int wide = rows > 4 ? 8 : rows > 2 ? 4 : rows;
    /* Only the last rows of a work item are fewer than ROWS: nothing is after them. */
    for (long r = s->row + rows, last = r - 1; r < s->row + wide; r++) {
        s->queries[r] = s->queries[last], s->bias[r] = s->bias[last];
        s->from[r] = s->from[last], s->to[r] = s->to[last];
    }
#if ROWS > 4
    if (wide == 8)
        NAME(attend_span)(step, s, 8);
    else
#endif
        if (wide == 4)
        NAME(attend_span)(step, s, 4);
    else if (wide == 2)
        NAME(attend_span)(step, s, 2);
    else
        NAME(attend_span)(step, s, 1);
}

#else

/*
 * Tiles 0 to 3 hold results, of rows 0 to 15 and 16 to 31; 4 and 5 queries or weights, 6 and 7 keys
 * or values. What rows that there are not give is not read.
 */
TARGET static void NAME(shape_tiles)(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape __attribute__((aligned(64))) = {.palette = 1,
                                            .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                            .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    TILES_READ(&shape);
    _tile_loadconfig(&shape);
}

/*
 * Adds x [16 or 32 rows] by y0, and where it is `wide` by y1. Those are read once for 32 rows, and
 * by a load that keeps them out of the first-level cache, which scores and weights fill.
 */
#define ADD_PRODUCTS(x, x_stride, y0, y1, y_bytes)                                                 \
    do {                                                                                           \
        _tile_loadd(4, x, (x_stride) * (long)sizeof(ELEMENT));                                     \
        _tile_stream_loadd(6, y0, y_bytes);                                                        \
        _tile_dpbf16ps(0, 4, 6);                                                                   \
        if (tall) _tile_loadd(5, (x) + TILE * (x_stride), (x_stride) * (long)sizeof(ELEMENT));     \
        if (tall) _tile_dpbf16ps(1, 5, 6);                                                         \
        if (wide) _tile_stream_loadd(7, y1, y_bytes);                                              \
        if (wide) _tile_dpbf16ps(2, 4, 7);                                                         \
        if (tall && wide) _tile_dpbf16ps(3, 5, 7);                                                 \
    } while (0)

/* Sums are zero, of products with what `s` holds and points to. */
TARGET INLINE void NAME(clear)(const NAME(Span) *s, const int tall, const int wide) {
    TILES_READ(s);
    _tile_zero(0);
    if (tall) _tile_zero(1);
    if (wide) _tile_zero(2);
    if (tall && wide) _tile_zero(3);
}

TARGET INLINE void NAME(keep)(float *to, long stride, const int tall, const int wide) {
    _tile_stored(0, to, stride * (long)sizeof *to);
    if (tall) _tile_stored(1, to + TILE * stride, stride * (long)sizeof *to);
    if (wide) _tile_stored(2, to + TILE, stride * (long)sizeof *to);
    if (tall && wide) _tile_stored(3, to + TILE * stride + TILE, stride * (long)sizeof *to);
}

TARGET INLINE void NAME(score_tiles)(NAME(Span) *s, long size, long tile, const int tall,
                                     const int wide) {
    const ELEMENT *rows = s->rows + s->row * size;
    NAME(clear)(s, tall, wide);
    for (long d = 0; d < size; d += 2 * TILE)
        ADD_PRODUCTS(rows + d, size, s->keys[tile] + d / 2 * TILE,
                     s->keys[tile + 1] + d / 2 * TILE, 64);
    NAME(keep)(s->scores + tile * TILE, SPAN, tall, wide);
}

/*
 * Packs a tile's values, `width` elements of each token from `values` on, into its half of a pair:
 * those of keys [first, last), else zeros.
 */
TARGET INLINE void NAME(pack_half)(const LANE *values, long size, long width, long first, long last,
                                   LANE *to) {
    for (int pair = 0; pair < TILE / 2; pair++, values += size, to += TILE) {
        const uint32_t low = 2 * pair >= first && 2 * pair < last ? 0xffffu : 0,
                       high = 2 * pair + 1 >= first && 2 * pair + 1 < last ? 0xffff0000u : 0;
        const Words seen = splat_word((int32_t)(low | high));
        if (low | high)
            for (long d = 0; d < width; d += LANES)
                store_32(to + d * TILE, and_words(load_32(values + d), seen));
        else
            for (long d = 0; d < width; d += LANES) store_32(to + d * TILE, splat_word(0));
    }
}

/*
 * Finds values of pair p of the span, `width` elements of each token from d on: in place where its
 * tiles are side by side, else in `packed`, which is written if it `is_new`. Of a pair that is seen
 * in part the others may hold anything, and become zeros.
 */
TARGET INLINE Pair NAME(pair_of)(const NAME(Span) *s, long size, long p, long d, long width,
                                 LANE *packed, int is_new) {
    const LANE *const *values = s->values + 2 * p;
    const long first = s->first - p * 2 * TILE, last = s->last - p * 2 * TILE;
    if (first <= 0 && last >= 2 * TILE && values[1] == values[0] + TILE / PAIR * size)
        return (Pair){values[0] + d, size * (long)sizeof(LANE), TILE};
    if (is_new) {
        NAME(pack_half)(values[0] + d, size, width, first, last, packed);
        NAME(pack_half)(values[1] + d, size, width, first - TILE, last - TILE, packed + 8 * TILE);
    }
    return (Pair){packed, 64, TILE * TILE};
}

/* Finds all values of the span, packed once for the rows of a work item that see whole pairs. */
TARGET static void NAME(pair_up)(NAME(Span) *s, long size) {
    const long end = (s->last + 2 * TILE - 1) / (2 * TILE);
    if (s->packed != s->begin) s->pairs_packed = 0;
    s->packed = s->begin;
    for (long p = s->first / (2 * TILE), edge = 0; p < end; p++) {
        const int is_edge = s->first > p * 2 * TILE || s->last < (p + 1) * 2 * TILE;
        LANE *to = is_edge ? s->edge[edge++] : s->packs + p * TILE * size;
        s->pairs[p] =
            NAME(pair_of)(s, size, p, 0, size, to, is_edge || !(s->pairs_packed >> p & 1));
        if (!is_edge) s->pairs_packed |= 1u << p;
    }
}

TARGET INLINE void NAME(combine_blocks)(NAME(Span) *s, long size, long d, long first, long last) {
    const int tall = 1, wide = 1;
    NAME(clear)(s, tall, wide);
    for (long p = first; p < last; p++) {
        const LANE *at = s->pairs[p].at + d / TILE * s->pairs[p].next;
        ADD_PRODUCTS(s->weights + p * 2 * TILE, SPAN, at, at + s->pairs[p].next, s->pairs[p].bytes);
    }
    NAME(keep)(s->sums + d, size, tall, wide);
}

TARGET INLINE Pair NAME(few_of)(NAME(Span) *s, long size, long p, long d, const int blocks) {
    LANE *packed = s->packs + p % 4 * FEW_BLOCKS * TILE * TILE;
    return NAME(pair_of)(s, size, p, d, blocks * TILE, packed, 1);
}

/*
 * The same for 16 rows and `blocks` times 16 elements. A pair is packed while the one before it is
 * multiplied.
 */
TARGET INLINE void NAME(combine_few)(NAME(Span) *s, long size, long d, long first, long last,
                                     const int blocks) {
    Pair next = NAME(few_of)(s, size, first, d, blocks);
    NAME(clear)(s, 1, blocks > 2);
    for (long p = first; p < last; p++) {
        const Pair pair = next;
        if (p + 1 < last) next = NAME(few_of)(s, size, p + 1, d, blocks);
        TILES_READ(s);
        _tile_loadd(4, s->weights + p * 2 * TILE, SPAN * (long)sizeof(WEIGHT));
        _tile_loadd(5, pair.at, pair.bytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, pair.at + pair.next, pair.bytes);
        _tile_dpbf16ps(1, 4, 6);
        if (blocks == 2) continue;
        _tile_loadd(5, pair.at + 2 * pair.next, pair.bytes);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, pair.at + 3 * pair.next, pair.bytes);
        _tile_dpbf16ps(3, 4, 6);
    }
    const long bytes = size * (long)sizeof(float);
    _tile_stored(0, s->sums + d, bytes);
    _tile_stored(1, s->sums + d + TILE, bytes);
    if (blocks > 2) _tile_stored(2, s->sums + d + 2 * TILE, bytes);
    if (blocks > 2) _tile_stored(3, s->sums + d + 3 * TILE, bytes);
}

/* Prefetches values of a tile. Few rows read them from memory, and nothing foresees where. */
TARGET INLINE void NAME(fetch)(const LANE *tile, long size) {
    for (long i = 0; i < TILE / PAIR * size; i += LANES) _mm_prefetch(tile + i, _MM_HINT_T1);
}

/* Attends over the span that `s` describes, for its first `rows` rows. */
TARGET INLINE void NAME(attend_span)(const Step *step, NAME(Span) *s, int rows, const int tall) {
    const long size = step->size, first = s->first / TILE, last = (s->last + TILE - 1) / TILE;
    long tile = first;
    for (; tile + 2 <= last; tile += 2) {
        if (!tall && step->code == AS_ELEMENTS) {
            NAME(fetch)(s->values[tile], size);
            NAME(fetch)(s->values[tile + 1], size);
        }
        NAME(score_tiles)(s, size, tile, tall, 1);
    }
    if (tile < last) NAME(score_tiles)(s, size, tile, tall, 0);
    NAME(weigh)(step, s, rows);
    for (int r = 0; r < rows; r++) {
        WEIGHT *weights = s->weights + r * SPAN;
        if (first % 2) STORE_WEIGHTS(weights + (first - 1) * TILE, splat(0));
        if (last % 2) STORE_WEIGHTS(weights + last * TILE, splat(0));
    }
    const long end = (last + 1) / 2;
    long d = 0;
    if (tall) {
        NAME(pair_up)(s, size);
        for (; d < size; d += 2 * TILE) NAME(combine_blocks)(s, size, d, first / 2, end);
        return;
    }
    s->packed = -1; /* what was packed is overwritten */
    for (; d + FEW_BLOCKS * TILE <= size; d += FEW_BLOCKS * TILE)
        NAME(combine_few)(s, size, d, first / 2, end, FEW_BLOCKS);
    if (d < size) NAME(combine_few)(s, size, d, first / 2, end, 2);
}

TARGET static void NAME(attend_rows)(const Step *step, NAME(Span) *s, int rows) {
    if (rows > TILE)
        NAME(attend_span)(step, s, rows, 1);
    else
        NAME(attend_span)(step, s, rows, 0);
}

#endif

/* Merges a row's next span into the softmax state of those before it. */
TARGET static void NAME(join)(Sum *all, float *sums, Sum next, const float *next_sums, long size) {
    const float top = all->top > next.top ? all->top : next.top;
    if (top == -INFINITY) return;
    const Floats old = exp2_lanes(splat(all->top - top), 7),
                 new = exp2_lanes(splat(next.top - top), 7);
    for (long d = 0; d < size; d += LANES) {
        const Floats more = mul_lanes(floats_f32(next_sums + d), new);
        store_f32(sums + d, fma_lanes(floats_f32(sums + d), old, more));
    }
    all->total = all->total * first_lane(old) + next.total * first_lane(new);
    all->top = top;
}

/* The output of a row of a work item. */
TARGET INLINE ELEMENT *NAME(output_of)(const Step *step, const Work *work, long row) {
    const long ahead = step->group == 1 ? row : row / step->group;
    return (ELEMENT *)step->out +
           (step->starts[work->row] + work->token + ahead) * step->out_stride +
           (work->kv_head * step->group + row - ahead * step->group) * step->real;
}

/* Prefetches the outputs of rows: they lie apart, and each is a part of a page of its own. */
TARGET static void NAME(fetch_outputs)(const Step *step, const Work *work, long row, long end) {
    for (; row < end; row++) {
        const ELEMENT *out = NAME(output_of)(step, work, row);
        for (long d = 0; d < step->real; d += 64 / (long)sizeof *out)
            _mm_prefetch(out + d, _MM_HINT_T0);
    }
}

/* Writes the output of a row of a work item. */
TARGET static void NAME(finish)(const Step *step, const Work *work, long row, Sum all,
                                const float *sums) {
    const long head = work->kv_head * step->group + row % step->group;
    ELEMENT *out = NAME(output_of)(step, work, row);
    float share = 1;
    if (step->sinks != NULL) {
        const float sink = step->sinks[head] * LOG2_E, top = all.top > sink ? all.top : sink;
        share = first_lane(exp2_lanes(splat(all.top - top), 7));
        all.total = all.total * share + first_lane(exp2_lanes(splat(sink - top), 7));
    }
    const Floats inverse = splat(all.total == 0 ? 0 : share / all.total);
    const long whole = step->real / LANES * LANES;
    for (long d = 0; d < whole; d += LANES)
        STORE(out + d, mul_lanes(floats_f32(sums + d), inverse));
    if (whole < step->real) {
        ELEMENT edge[LANES];
        STORE(edge, mul_lanes(floats_f32(sums + whole), inverse));
        memcpy(out + whole, edge, (size_t)(step->real - whole) * sizeof *edge);
    }
}

/* Heads of `real` elements, `stride` from one to the next, side by side as heads of `size`. */
static void NAME(fill_up)(const ELEMENT *from, long stride, long count, long real, long size,
                          ELEMENT *to) {
    for (long i = 0; i < count; i++) {
        memcpy(to + i * size, from + i * stride, (size_t)real * sizeof *to);
        memset(to + i * size + real, 0, (size_t)(size - real) * sizeof *to);
    }
}

/*
 * Tiles of a sequence that is not cached: keys and values [tokens, D] of one KV head,
 * `stride` elements from token to token.
 */
TARGET static void NAME(lay_out)(const ELEMENT *keys, const ELEMENT *values, long key_stride,
                                 long value_stride, long tokens, long real, long size,
                                 ELEMENT *padded, LANE *key_tiles, LANE *value_tiles) {
    for (long t = 0; t < tokens; t += TILE) {
        const int count = tokens - t < TILE ? (int)(tokens - t) : TILE;
        const ELEMENT *some_keys = keys + t * key_stride, *some_values = values + t * value_stride;
        LANE *to_keys = key_tiles + t * size / PAIR, *to_values = value_tiles + t * size / PAIR;
        if (real == size) {
            NAME(write_tile)(some_keys, some_values, key_stride, value_stride, count, size, to_keys,
                             to_values);
        } else {
            NAME(fill_up)(some_keys, key_stride, count, real, size, padded);
            NAME(fill_up)(some_values, value_stride, count, real, size, padded + TILE * size);
            NAME(write_tile)(padded, padded + TILE * size, size, size, count, size, to_keys,
                             to_values);
        }
    }
}

/* Makes the query of a token by one head row r of those of a work item. */
TARGET INLINE void NAME(choose)(const Step *step, const Work *work, NAME(Span) *s, long token,
                                long head, int r) {
    const long at = step->starts[work->row] + token, size = step->size;
    const ELEMENT *const given =
        (const ELEMENT *)step->queries + at * step->query_stride + head * step->real;
    const ELEMENT *query = given;
    if (AMX || step->real != size) {
        NAME(fill_up)(query, 0, 1, step->real, size, s->rows + r * size);
        query = s->rows + r * size;
    }
    s->queries[r] = query;
    /* Of the tokens to come: their queries lie apart, each on a page of its own. */
    if (token + ROWS / 2 < work->token + work->tokens)
        for (long d = 0; d < step->real; d += 64 / (long)sizeof *query)
            _mm_prefetch(given + ROWS / 2 * step->query_stride + d, _MM_HINT_T0);
#if CONVERTS
    for (long d = 0; d < size; d += LANES)
        store_f32(s->converted + r * size + d, FLOATS(query + d));
    s->queries[r] = s->converted + r * size;
#endif
    if (step->bias == NULL)
        s->bias[r] = NULL;
    else if (step->bias_center < 0)
        s->bias[r] = step->bias + (head * step->starts[step->rows] + at) * step->bias_keys;
    else
        s->bias[r] = step->bias + head * step->bias_keys + step->bias_center -
                     (step->first[work->row] + token);
    visible(step, work->row, token, &s->from[r], &s->to[r]);
}

/* Prefetches a quantized tile of a row: blocks lie anywhere, so that nothing else foresees it. */
TARGET INLINE void NAME(fetch_tile)(const Step *step, const Work *work, long tile) {
    if (tile * TILE >= step->seen[work->row]) return;
    const long block = step->table[work->row * step->table_stride + tile / step->block_tiles];
    const long within = (work->kv_head * step->block_tiles + tile % step->block_tiles) * TILE;
    const char *keys = (const char *)step->keys + block * step->key_stride + within * step->size,
               *values =
                   (const char *)step->values + block * step->value_stride + within * step->size;
    for (long i = 0; i < TILE * step->size; i += 64) {
        _mm_prefetch(keys + i, _MM_HINT_T1);
        _mm_prefetch(values + i, _MM_HINT_T1);
    }
    if (step->scale_page == 0) return;
    _mm_prefetch((const char *)(step->key_scales + block * step->scale_page + within),
                 _MM_HINT_T1);
    _mm_prefetch((const char *)(step->value_scales + block * step->scale_page + within),
                 _MM_HINT_T1);
}

/* Decodes a tile of the span to its place in the work item's own memory, and finds its scales. */
TARGET static void NAME(decode_tile)(const Step *step, const Work *work, NAME(Span) *s, long t,
                                     LANE *own_keys, LANE *own_values) {
    const long tile = s->begin / TILE + t, lanes = TILE * step->size / PAIR;
    const long block = step->table[work->row * step->table_stride + tile / step->block_tiles];
    const long within = work->kv_head * step->block_tiles + tile % step->block_tiles;
    s->keys[t] = own_keys + t * lanes;
    s->values[t] = own_values + t * lanes;
    if (s->decoded == s->begin && s->tiles_decoded >> t & 1) return;
    if (s->decoded != s->begin) s->tiles_decoded = 0;
    s->decoded = s->begin;
    s->tiles_decoded |= 1u << t;
    NAME(fetch_tile)(step, work, tile + FETCHED_TILES);
    const uint8_t *keys = (const uint8_t *)step->keys + block * step->key_stride +
                          within * TILE * step->size,
                  *values = (const uint8_t *)step->values + block * step->value_stride +
                            within * TILE * step->size;
#if AMX
    NAME(look_up_codes)(step->code, s->table, keys, TILE * step->size, own_keys + t * lanes);
    NAME(look_up_codes)(step->code, s->table, values, TILE * step->size, own_values + t * lanes);
#else
    NAME(decode_keys)(step->code, keys, step->size, own_keys + t * lanes);
    NAME(decode_values)(step->code, values, step->size, own_values + t * lanes);
#endif
    for (int i = 0; i < TILE; i++) {
        const long at = step->scale_page ? block * step->scale_page + within * TILE + i : 0;
        s->key_scales[t * TILE + i] = step->key_scales[at];
        s->value_scales[t * TILE + i] = step->value_scales[at];
    }
}

/* Finds the span's keys and values: in the cache, or laid out for this work item. */
static void NAME(locate)(const Step *step, const Work *work, NAME(Span) *s, LANE *own_keys,
                         LANE *own_values) {
    const long tile_lanes = TILE * step->size / PAIR;
    for (long t = s->first / TILE; t * TILE < s->last; t++) {
        const long tile = s->begin / TILE + t;
        if (step->code != AS_ELEMENTS) {
            NAME(decode_tile)(step, work, s, t, own_keys, own_values);
        } else if (step->table == NULL) {
            s->keys[t] = own_keys + tile * tile_lanes;
            s->values[t] = own_values + tile * tile_lanes;
        } else {
            const long block =
                step->table[work->row * step->table_stride + tile / step->block_tiles];
            const long at =
                (work->kv_head * step->block_tiles + tile % step->block_tiles) * tile_lanes;
            s->keys[t] =
                (const LANE *)((const ELEMENT *)step->keys + block * step->key_stride) + at;
            s->values[t] =
                (const LANE *)((const ELEMENT *)step->values + block * step->value_stride) + at;
        }
    }
}

/* Makes rows of a work item, from row `first` of it on, rows of the span from r on. */
TARGET static void NAME(choose_rows)(const Step *step, const Work *work, NAME(Span) *s, long first,
                                     long rows, long r) {
    long token = work->token + first / step->group, head = first % step->group;
    for (const long end = r + rows; r < end; r++) {
        NAME(choose)(step, work, s, token, work->kv_head * step->group + head, (int)r);
        if (++head == step->group) head = 0, token++;
    }
}

/* Attends for `rows` of the rows chosen, from `row` on, over one span. 0: they see none of it. */
TARGET static int NAME(attend_some)(const Step *step, const Work *work, NAME(Span) *s,
                                    LANE *own_keys, LANE *own_values, long span, long row,
                                    long rows) {
    long from = LONG_MAX, to = 0;
    for (long r = row; r < row + rows; r++) {
        if (s->from[r] < from) from = s->from[r];
        if (s->to[r] > to) to = s->to[r];
    }
    s->row = row;
    s->begin = span * SPAN;
    s->first = from > s->begin ? from - s->begin : 0;
    s->last = to - s->begin < SPAN ? to - s->begin : SPAN;
    if (s->first >= s->last) return 0;
    NAME(locate)(step, work, s, own_keys, own_values);
    NAME(attend_rows)(step, s, (int)rows);
    return 1;
}

/* Computes a work item: its output, or with `sums` the softmax states over its span. */
TARGET static void NAME(attend_work)(const Step *step, const Work *work, NAME(Span) *s,
                                     LANE *own_keys, LANE *own_values, Sum *all, float *sums) {
    const long size = step->size, group = step->group, rows = work->tokens * group;
    s->decoded = -1;
#if AMX
    s->packed = -1;
#endif
    for (long begin = 0; begin < rows; begin += MANY) {
        const long count = rows - begin < MANY ? rows - begin : MANY;
        long first, last, other;
        visible(step, work->row, work->token + begin / group, &first, &other);
        visible(step, work->row, work->token + (begin + count - 1) / group, &other, &last);
        const long first_span = first / SPAN, end_span = (last + SPAN - 1) / SPAN;
        if (all == NULL && end_span - first_span == 1) {
            for (long row = 0; row < count; row += ROWS) {
                const long some = count - row < ROWS ? count - row : ROWS;
                NAME(choose_rows)(step, work, s, begin + row, some, 0);
                NAME(fetch_outputs)(step, work, begin + row, begin + row + some);
                const int seen =
                    NAME(attend_some)(step, work, s, own_keys, own_values, first_span, 0, some);
                for (long r = 0; r < some; r++)
                    NAME(finish)(step, work, begin + row + r, seen ? s->sum[r] : EMPTY,
                                 s->sums + r * size);
            }
            continue;
        }
        Sum *to = all == NULL ? s->many : all + begin;
        float *to_sums = all == NULL ? s->many_sums : sums + begin * size;
        for (long r = 0; r < count; r++) to[r] = EMPTY;
        memset(to_sums, 0, (size_t)(count * size) * sizeof *to_sums);
        for (long span = first_span, is_first = 1; span < end_span; span++) {
            if (work->span >= 0 && span != work->span) continue;
            for (long row = 0; row < count; row += ROWS) {
                const long some = count - row < ROWS ? count - row : ROWS;
                if (is_first) NAME(choose_rows)(step, work, s, begin + row, some, row);
                if (!NAME(attend_some)(step, work, s, own_keys, own_values, span, row, some))
                    continue;
                for (long r = 0; r < some; r++)
                    NAME(join)(&to[row + r], to_sums + (row + r) * size, s->sum[r],
                               s->sums + r * size, size);
            }
            is_first = 0;
        }
        for (long r = 0; all == NULL && r < count; r++) {
            if (r % ROWS == 0)
                NAME(fetch_outputs)(step, work, begin + r,
                                    begin + (count - r < ROWS ? count : r + ROWS));
            NAME(finish)(step, work, begin + r, to[r], to_sums + r * size);
        }
    }
}

/* Computes a work item of the plan. */
TARGET static void NAME(attend_item)(void *job, long i) {
    Attention *a = job;
    const Step *step = a->step;
    const Work *work = a->plan.work + i;
    const long own = step->table == NULL ? a->plan.longest + TILE : step->code ? SPAN : 0;
    const size_t lanes = (size_t)own * step->size / PAIR;
    NAME(Span) *span = own_memory((sizeof *span + 63) / 64 * 64 + 2 * lanes * sizeof(LANE));
    if (span == NULL) {
        a->failed = 1;
        return;
    }
    LANE *tiles = (LANE *)((char *)span + (sizeof *span + 63) / 64 * 64);
    if (step->table == NULL) {
        const long start = step->origins[work->row];
        NAME(lay_out)(
            (const ELEMENT *)step->keys + start * step->key_stride + work->kv_head * step->real,
            (const ELEMENT *)step->values + start * step->value_stride + work->kv_head * step->real,
            step->key_stride, step->value_stride, step->seen[work->row], step->real, step->size,
            span->padded, tiles, tiles + lanes);
    }
#if AMX
    if (step->code != AS_ELEMENTS) NAME(make_table)(step->code, span->table);
    NAME(shape_tiles)();
#endif
    const long at = i * a->plan.most_rows;
    NAME(attend_work)(step, work, span, tiles, tiles + lanes, a->all == NULL ? NULL : a->all + at,
                      a->sums + at * step->size);
#if AMX
    _tile_release();
#endif
}

/* Merges the spans of a work item's rows, if they were shared out. */
TARGET static void NAME(join_item)(void *job, long item) {
    const Attention *a = job;
    const Step *step = a->step;
    const long rows = a->plan.most_rows, i = item * a->plan.most_spans;
    for (long r = 0; r < a->plan.work[i].tokens * step->group; r++) {
        const long at = i * rows + r;
        for (long j = at + rows; j < at + a->plan.most_spans * rows; j += rows)
            NAME(join)(a->all + at, a->sums + at * step->size, a->all[j], a->sums + j * step->size,
                       step->size);
        NAME(finish)(step, a->plan.work + i, r, a->all[at], a->sums + at * step->size);
    }
}

/* 0: out of memory. */
static int NAME(attend)(const Step *step) {
    Attention a = {.step = step, .plan = make_plan(step, MANY)};
    const size_t rows = (size_t)(a.plan.count * a.plan.most_rows);
    a.all = a.plan.most_spans ? malloc(rows * (sizeof *a.all + (size_t)step->size * sizeof(float)))
                              : NULL;
    a.sums = (float *)(a.all + (a.all == NULL ? 0 : rows));
    a.failed = a.plan.work == NULL || (a.plan.most_spans && a.all == NULL);
    if (!a.failed) share_out_if(a.plan.is_long, a.plan.count, NAME(attend_item), &a);
    if (!a.failed && a.all != NULL)
        share_out(a.plan.count / a.plan.most_spans, NAME(join_item), &a);
    free(a.all);
    free(a.plan.work);
    return !a.failed;
}

#undef ADD_PRODUCTS
