/*
 * Attention of one token per row over latent vectors, which are keys, and values as far as `rank`.
 * A row's heads do not depend on other rows. Included once for each set of instructions.
 */

BASE INLINE Floats ISA(latent_at)(const Latent *l, long place, long at, const int kind) {
    const char *x = (const char *)l->latents + (place * l->size + at) * (kind == 0 ? 4 : 2);
    return kind == 0 ? floats_f32(x) : kind == 1 ? floats_f16(x) : floats_bf16(x);
}

/* Scores of some heads, [heads, line], and the softmax' weights of them. Returns their sums. */
BASE INLINE void ISA(weigh)(const Latent *l, long row, const float *q, float *scores, long line,
                            float *sums, const int heads, const int kind) {
    const int64_t *places = l->places + row * l->stride;
    const long keys = l->lengths[row];
    for (long key = 0; key < keys; key += 2) {
        const long other = key + 1 < keys ? key + 1 : key;
        Floats one[SOME_HEADS], two[SOME_HEADS];
        for (int h = 0; h < heads; h++) one[h] = two[h] = splat(0);
        for (long i = 0; i < l->size; i += LANES) {
            const Floats x = ISA(latent_at)(l, places[key], i, kind),
                         y = ISA(latent_at)(l, places[other], i, kind);
            for (int h = 0; h < heads; h++) {
                const Floats w = floats_f32(q + h * l->size + i);
                one[h] = fma_lanes(w, x, one[h]), two[h] = fma_lanes(w, y, two[h]);
            }
        }
        for (int h = 0; h < heads; h++) {
            scores[h * line + key] = reduce_add(one[h]) * l->scale;
            scores[h * line + other] = reduce_add(two[h]) * l->scale;
        }
    }
    for (int h = 0; h < heads; h++) {
        float *of = scores + h * line;
        Floats most = splat(-1e30f), sum = splat(0);
        for (long key = keys; key < line; key++) of[key] = -1e30f;
        for (long key = 0; key < line; key += LANES)
            most = max_lanes(most, floats_f32(of + key));
        const Floats top = splat(reduce_max(most));
        for (long key = 0; key < line; key += LANES) {
            const Floats x = mul_lanes(sub_lanes(floats_f32(of + key), top), splat(1.44269504f));
            const Floats weight = exp2_lanes(x, 7);
            store_f32(of + key, weight);
            sum = add_lanes(sum, weight);
        }
        sums[h] = reduce_add(sum);
    }
}

/* Some columns of the weighted sums of latents, of some heads. */
BASE INLINE void ISA(gather)(const Latent *l, long row, long column, const float *scores, long line,
                             const float *sums, float *out, const int heads, const int columns,
                             const int kind) {
    const int64_t *places = l->places + row * l->stride;
    Floats total[4][4];
    for (int h = 0; h < heads; h++)
        for (int n = 0; n < columns; n++) total[h][n] = splat(0);
    for (long key = 0; key < l->lengths[row]; key++) {
        Floats x[4];
        for (int n = 0; n < columns; n++)
            x[n] = ISA(latent_at)(l, places[key], column + n * LANES, kind);
        for (int h = 0; h < heads; h++) {
            const Floats weight = splat(scores[h * line + key]);
            for (int n = 0; n < columns; n++) total[h][n] = fma_lanes(weight, x[n], total[h][n]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int n = 0; n < columns; n++)
            store_f32(out + h * l->rank + column + n * LANES,
                      div_lanes(total[h][n], splat(sums[h])));
}

BASE INLINE void ISA(see)(Latent *l, long row, long head, const int kind) {
    const long line = (l->lengths[row] + LANES - 1) / LANES * LANES;
    const long left = l->heads - head, count = left < SOME_HEADS ? left : SOME_HEADS;
    const float *q = l->q + (row * l->heads + head) * l->size;
    float *out = l->out + (row * l->heads + head) * l->rank, sums[SOME_HEADS];
    float *scores = own_memory((size_t)(line * SOME_HEADS) * sizeof *scores);
    if (scores == NULL) {
        l->failed = 1;
        return;
    }
    if (count == SOME_HEADS)
        ISA(weigh)(l, row, q, scores, line, sums, SOME_HEADS, kind);
    else
        for (long h = 0; h < count; h++)
            ISA(weigh)(l, row, q + h * l->size, scores + h * line, line, sums + h, 1, kind);
    for (long c = 0; c < l->rank;) {
        const int wide = c + 4 * LANES <= l->rank;
        for (long h = 0; h < count;) {
            const int all = h + 4 <= count;
            const float *of = scores + h * line;
            float *to = out + h * l->rank;
            if (wide && all)
                ISA(gather)(l, row, c, of, line, sums + h, to, 4, 4, kind);
            else if (wide)
                ISA(gather)(l, row, c, of, line, sums + h, to, 1, 4, kind);
            else
                ISA(gather)(l, row, c, of, line, sums + h, to, 1, 1, kind);
            h += wide && all ? 4 : 1;
        }
        c += wide ? 4 * LANES : LANES;
    }
}

/* Some heads of a row. */
BASE static void ISA(latent)(void *job, long item) {
    Latent *l = job;
    const long blocks = (l->heads + SOME_HEADS - 1) / SOME_HEADS, row = item / blocks,
               head = item % blocks * SOME_HEADS;
    if (l->width == 4)
        ISA(see)(l, row, head, 0);
    else if (l->is_bfloat16)
        ISA(see)(l, row, head, 2);
    else
        ISA(see)(l, row, head, 1);
}
