/*
 * Products of weights in float8. Included by linear.h, with the words of types.h.
 *
 * W lies in panels of 16 outputs, [N / 16][K / 2][16][2 bytes], for all kinds of elements. Panels
 * are decoded piece by piece, as they are multiplied: numbers of float8 are exact in every kind of
 * element. A result is the sum of its pieces, in their order, each times the scale of its group.
 * Pieces do not depend on the number of rows.
 */

/* Panels [K / 2][16][2] of `inputs` -> lanes of linear.h. Prefetches as much from `ahead` on. */
TARGET INLINE void NAME(decode_float8)(const char *from, long inputs, LANE *to, const char *ahead,
                                       const int format) {
    for (long k = 0; k < inputs; k += 4) {
        if (ahead != NULL) _mm_prefetch(ahead + k * LANES, _MM_HINT_T1);
#pragma GCC unroll 2
        for (long i = k; i < k + 4; i += 2) {
            LANE *pair = to + i / PAIR * LANES;
#if PAIR == 2
            store_32(pair, pairs_float8(from + i * LANES, format));
#else
            const Words pairs = load_u16(from + i * LANES);
            STORE(pair, floats_float8(and_words(pairs, splat_word(0xff)), format));
            STORE(pair + LANES, floats_float8(right_8(pairs), format));
#endif
        }
    }
}

/*
 * part [rows][PANELS][16] of up to 2 TILE rows of x and a piece of panels. `shaped`: the rows that
 * tiles have; 0: none yet.
 */
TARGET INLINE void NAME(multiply_decoded)(const LANE *decoded, long lanes, const int32_t *x,
                                          long x_stride, long rows, long panels, float *part,
                                          long *shaped) {
#if AMX
    for (long row = 0; row < rows;) {
        const long left = rows - row, there = left < TILE ? left : TILE;
        const int tall = left >= 2 * TILE;
        const int32_t *from = x + row * x_stride;
        float *to = part + row * PANELS * LANES;
        if (there != *shaped) NAME(shape_product)((int)(*shaped = there));
        if (panels == PANELS && tall)
            NAME(tile)(from, x_stride, decoded, lanes * LANES, lanes, to, 1, NULL, 0, PANELS, 1);
        else if (panels == PANELS)
            NAME(tile)(from, x_stride, decoded, lanes * LANES, lanes, to, 1, NULL, 0, PANELS, 0);
        else
            for (long i = 0; i < 1 + tall; i++)
                for (long b = 0; b < panels; b++)
                    NAME(tile)(from + i * TILE * x_stride, x_stride, decoded + b * lanes * LANES,
                               lanes * LANES, lanes, to + (i * TILE * PANELS + b) * LANES, 1, NULL,
                               0, 1, 0);
        row += tall ? 2 * TILE : there;
    }
    TILES_READ(part);
#else
    (void)shaped;
    NAME(panels)(decoded, lanes, x, x_stride, rows, panels, NULL, NULL, part);
#endif
}

/* As NAME(panels). */
TARGET static void NAME(panels_float8)(const Linear *l, const int32_t *x, long x_stride, long rows,
                                       long first, long panels, const char *next, float *sums) {
    const Quantized *q = &l->quantized;
    const long panel = panel_bytes(q);
    LANE decoded[PANELS * DECODED / PAIR * LANES] __attribute__((aligned(64)));
    float part[2 * TILE * PANELS * LANES] __attribute__((aligned(64)));
    long shaped = 0;
    for (long begin = 0, some; begin < l->inputs; begin += some) {
        const long g = begin / q->group, left = (g + 1) * q->group - begin;
        some = left < DECODED ? left : DECODED;
        for (long b = 0; b < panels; b++) {
            const long at = b * panel + begin * LANES;
            const char *from = (const char *)l->weights + first * panel + at;
            const char *ahead = next == NULL ? NULL : next + at;
            LANE *to = decoded + b * some / PAIR * LANES;
            if (q->float8 == E5M2)
                NAME(decode_float8)(from, some, to, ahead, E5M2);
            else
                NAME(decode_float8)(from, some, to, ahead, E4M3);
        }
        for (long row = 0; row < rows; row += 2 * TILE) {
            const long there = rows - row < 2 * TILE ? rows - row : 2 * TILE;
            NAME(multiply_decoded)(decoded, some / PAIR, x + row * x_stride + begin / PAIR,
                                   x_stride, there, panels, part, &shaped);
            for (long b = 0; b < panels; b++) {
                const Floats scales =
                    scales_at(q, ((first + b) * q->scaled + (q->scaled > 1 ? g : 0)) * LANES);
                for (long r = 0; r < there; r++) {
                    const float *from = part + (r * PANELS + b) * LANES;
                    float *to = sums + ((row + r) * PANELS + b) * LANES;
                    const Floats before = begin == 0 ? splat(0) : floats_f32(to);
                    store_f32(to, fma_lanes(floats_f32(from), scales, before));
                }
            }
        }
    }
#if AMX
    _tile_release();
#endif
}
