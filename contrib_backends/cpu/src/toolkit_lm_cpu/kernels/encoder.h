/*
 * Attention of sequences whose tokens all see the same tokens, nothing padded: softmax(scale q k^T) v.
 *
 * Included once for each type of element, with
 *   ELEMENT         the type
 *   PAIR            elements in a lane: 1 or 2
 *   NAME(x)         x with the type's suffix
 *   TARGET          the instructions that may be used
 *   DOT, STORE      the functions of lanes.h
 *   TERMS           precision of the weights, as of exp2_lanes
 *
 * A thread takes one key-value head of one sequence, L keys of D elements. It lays the keys out so that lanes are tokens, and then, for
 * ROWS queries at a time, computes their scores, the softmax, and the weighted sum of values, whose lanes are elements. All of this fits
 * in a core's own cache. Scores, weights before their sum and the output's sums are float.
 */

typedef struct {
    long queries;     /* of the sequence: its tokens */
    long tokens;      /* L: the first of them, which all see */
    long width;       /* L, rounded up to lanes */
    long size;        /* D */
    float scale;      /* of scores, times log2(e) */
    uint32_t *keys;   /* [D / PAIR, width] lanes */
    uint32_t *values; /* [width / PAIR, D] lanes */
    float *scores;    /* [ROWS, width] */
    ELEMENT *weights; /* [ROWS, width] */
} NAME(Head);

TARGET static void NAME(pack)(const NAME(Head) *w, const ELEMENT *keys, const ELEMENT *values, long key_stride, long value_stride) {
    const long lanes = w->size / PAIR;
    for (long t = 0; t < w->tokens; t += LANES)
        for (long d = 0; d < lanes; d += LANES) {
            const int rows = w->tokens - t < LANES ? (int)(w->tokens - t) : LANES, columns = lanes - d < LANES ? (int)(lanes - d) : LANES;
            const ELEMENT *from = keys + t * key_stride + d * PAIR;
            transpose(from, key_stride * (long)sizeof(ELEMENT), rows, w->keys + d * w->width + t, w->width, columns);
        }
    for (long t = 0; t < w->tokens; t += PAIR)
        for (long d = 0; d < w->size; d += LANES) {
            const ELEMENT *at = values + t * value_stride + d;
#if PAIR == 1
            const __m512i lane = load_f32(at);
#else
            __m512i lane = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
            if (t + 1 < w->tokens) {
                const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(at + value_stride)));
                lane = _mm512_or_si512(lane, _mm512_slli_epi32(next, 16));
            }
#endif
            _mm512_storeu_si512(w->values + t / PAIR * w->size + d, lane);
        }
}

/* sums[r][b] = sum over i of lanes i of `from[r]`, times `by` [count, width] at column + b * LANES. */
TARGET INLINE void NAME(product)(
    __m512 sums[ROWS][2], const void *const from[ROWS], const uint32_t *by, long count, long width, const int blocks) {
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < blocks; b++) sums[r][b] = _mm512_setzero_ps();
    for (long i = 0; i < count; i++) {
        __m512i y[2];
        for (int b = 0; b < blocks; b++) y[b] = _mm512_loadu_si512(by + i * width + b * LANES);
        for (int r = 0; r < ROWS; r++) {
            const __m512i x = _mm512_set1_epi32(((const int32_t *)from[r])[i]);
            for (int b = 0; b < blocks; b++) sums[r][b] = DOT(sums[r][b], x, y[b]);
        }
    }
}

TARGET INLINE void NAME(score)(const NAME(Head) *w, const void *const queries[ROWS], long token, const int blocks) {
    __m512 sums[ROWS][2];
    NAME(product)(sums, queries, w->keys + token, w->size / PAIR, w->width, blocks);
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < blocks; b++)
            _mm512_storeu_ps(w->scores + r * w->width + token + b * LANES, _mm512_mul_ps(sums[r][b], _mm512_set1_ps(w->scale)));
}

/* Weights of one row, not yet divided by their sum, whose inverse is returned. */
TARGET INLINE float NAME(weigh)(const NAME(Head) *w, int row) {
    const float *scores = w->scores + row * w->width;
    const __m512 none = _mm512_set1_ps(-INFINITY);
    const long last = w->width - LANES;
    const __mmask16 there = (__mmask16)(0xffffu >> (w->width - w->tokens));
    __m512 most = none, sum = _mm512_setzero_ps();
    for (long t = 0; t < w->width; t += LANES) {
        const __m512 score = _mm512_loadu_ps(scores + t);
        most = _mm512_max_ps(most, t == last ? _mm512_mask_mov_ps(none, there, score) : score);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (long t = 0; t < w->width; t += LANES) {
        __m512 weights = exp2_lanes(_mm512_sub_ps(_mm512_loadu_ps(scores + t), top), TERMS);
        if (t == last) weights = _mm512_maskz_mov_ps(there, weights);
        sum = _mm512_add_ps(sum, weights);
        STORE(w->weights + row * w->width + t, weights);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

TARGET INLINE void NAME(combine)(
    const NAME(Head) *w, const float inverse[ROWS], ELEMENT *const out[ROWS], int rows, long element, const int blocks) {
    __m512 sums[ROWS][2];
    const void *weights[ROWS];
    for (int r = 0; r < ROWS; r++) weights[r] = w->weights + r * w->width;
    NAME(product)(sums, weights, w->values + element, (w->tokens + PAIR - 1) / PAIR, w->size, blocks);
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) STORE(out[r] + element + b * LANES, _mm512_mul_ps(sums[r][b], _mm512_set1_ps(inverse[r])));
}

/* One query head. The last rows stand in for those that are missing in the last block; what they give is not written. */
TARGET static void NAME(attend_head)(const NAME(Head) *w, const ELEMENT *queries, ELEMENT *out, long query_stride, long out_stride) {
    for (long first = 0; first < w->queries; first += ROWS) {
        const int rows = w->queries - first < ROWS ? (int)(w->queries - first) : ROWS;
        const void *from[ROWS];
        ELEMENT *to[ROWS];
        float inverse[ROWS];
        for (int r = 0; r < ROWS; r++) {
            const long t = first + (r < rows ? r : rows - 1);
            from[r] = queries + t * query_stride;
            to[r] = out + t * out_stride;
        }
        long t = 0, d = 0;
        for (; t + 2 * LANES <= w->width; t += 2 * LANES) NAME(score)(w, from, t, 2);
        if (t < w->width) NAME(score)(w, from, t, 1);
        for (int r = 0; r < ROWS; r++) inverse[r] = NAME(weigh)(w, r);
        for (; d + 2 * LANES <= w->size; d += 2 * LANES) NAME(combine)(w, inverse, to, rows, d, 2);
        if (d < w->size) NAME(combine)(w, inverse, to, rows, d, 1);
    }
}

/* False: there was no memory. */
TARGET static int NAME(attend)(const Batch *batch) {
    const long group = batch->heads / batch->kv_heads, size = batch->size;
    long longest = 0;
    int done = 1;
    for (long i = 0; i < batch->sequences; i++) {
        if (batch->seen[i] > longest) longest = batch->seen[i];
    }
    const long width = (longest + LANES - 1) / LANES * LANES;
    if (longest == 0) return 1;
#pragma omp parallel
    {
        const size_t lanes = 2 * (size_t)(width * size / PAIR) + ROWS * width + ROWS * width / PAIR;
        uint32_t *memory = calloc(lanes, sizeof *memory);
        if (memory == NULL) {
#pragma omp atomic write
            done = 0;
        }
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < batch->sequences * batch->kv_heads; task++) {
            if (memory == NULL) continue;
            const long i = task / batch->kv_heads, kv_head = task % batch->kv_heads, start = batch->starts[i];
            NAME(Head) w = {.queries = batch->starts[i + 1] - start, .tokens = batch->seen[i], .size = size};
            w.scale = batch->scale * 1.44269504f;
            if (w.tokens == 0) continue;
            w.width = (w.tokens + LANES - 1) / LANES * LANES;
            w.keys = memory;
            w.values = w.keys + w.width * size / PAIR;
            w.scores = (float *)(w.values + w.width * size / PAIR);
            w.weights = (ELEMENT *)(w.scores + ROWS * w.width);
            NAME(pack)(&w, (const ELEMENT *)batch->keys + start * batch->key_stride + kv_head * size,
                       (const ELEMENT *)batch->values + start * batch->value_stride + kv_head * size, batch->key_stride, batch->value_stride);
            for (long head = kv_head * group; head < (kv_head + 1) * group; head++)
                NAME(attend_head)(&w, (const ELEMENT *)batch->queries + start * batch->query_stride + head * size,
                                  (ELEMENT *)batch->out + start * batch->out_stride + head * size, batch->query_stride, batch->out_stride);
        }
        free(memory);
    }
    return done;
}
