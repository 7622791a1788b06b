/*
 * Products of quantized weights. Included once for each kind of integer instructions, with
 *   CODES(x)        x with the suffix of the instructions
 *   TARGET_CODES    the instructions that may be used
 *   ZERO_8          zero of the codes of 8 bits as DOT_8 sees them, which are 128 more in memory
 *   DOT_8, DOT_4    sums + products, by fours: sixteen lanes of sums, codes of W and codes of x
 *   CODE_PANELS     panels of a tile, whose sums fit into registers by CODE_ROWS rows
 *
 * W lies in panels of 16 outputs. A lane of 32 bits is an output's:
 *   codes of 8 bits  [N / 16][K / 4][16][4 bytes]   plus 128
 *   codes of 4 bits  [N / 16][K / 8][16][4 bytes]   plus 8; the first four inputs in the low bits
 * Codes of 4 bits may also be indices of values, which are then multiplied as codes of 8 bits; or
 * of levels, which each group of codes has of its own. These are
 *   levels           [N / 16][K / 32][4 quads][4 outputs][16 bytes]
 * of which the first sixteen inputs are in the low bits. Output 4 o + q is the o-th of quad q.
 *
 * Sums of a group are exact integers. A result is the sum of its groups, in their order, each times
 * the scales of both: it is the same by all instructions, and independent of the rest of the batch.
 */

/*
 * Panels of a product, and rows of x to multiply them with. `form`: 8 or 4 bits, or 0 for indices
 * of values.
 */
TARGET_CODES INLINE void CODES(tile)(const Tile *t, const int rows, const int panels,
                                     const int form, const int fetched) {
    const Quantized *q = t->weight;
    const long groups = q->groups, scaled = q->scaled, words = q->group / 4, width = groups * words;
    const long lanes = form == 8 ? words : words / 2, panel = groups * lanes * LANES * 4;
    const int32_t *x = (const int32_t *)t->codes;
    const char *w = t->panels, *ahead = t->ahead;
    /* A row alone has registers for sums of the other lanes, whose instructions need not wait. */
    const int apart = rows == 1 && form != 8;
    /* One scale of an output multiplies the sum of all groups. */
    const int at_last = scaled == 1 && q->offsets == NULL;
    const Words values = form == 0 ? bytes_16(q->values) : splat_word(0);
    Floats f[CODE_ROWS][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < panels; b++) f[r][b] = splat(0);
    for (long g = 0; g < groups; g++) {
        const long scale = (scaled > 1 ? g : 0) * LANES;
        Words c[CODE_ROWS][PANELS], others[PANELS];
        if (fetched == panels)
#pragma GCC unroll 4
            for (int b = 0; b < panels; b++) {
                const long at = t->first_ahead + b * scaled * LANES + scale;
                _mm_prefetch((const char *)q->scales + at * (q->is_half ? 2 : 4), _MM_HINT_T1);
                if (q->offsets != NULL)
                    _mm_prefetch((const char *)(q->offsets + at), _MM_HINT_T1);
            }
#pragma GCC unroll 4
        for (int b = 0; b < panels; b++) others[b] = splat_word(0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const Words zeros = splat_word((form == 4 ? -8 : -ZERO_8) * t->sums[r * groups + g]);
#pragma GCC unroll 4
            for (int b = 0; b < panels; b++) c[r][b] = zeros;
        }
        for (long k = 0; k < lanes; k++, w += LANES * 4) {
            Words v[PANELS];
#pragma GCC unroll 4
            for (int b = 0; b < panels; b++) v[b] = load_32(w + b * panel);
#pragma GCC unroll 4
            for (int p = 0; p < fetched; p++) _mm_prefetch(ahead + p * 64, _MM_HINT_T1);
            ahead += fetched * 64;
            if (form == 8) {
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const Words one = splat_word(x[r * width + k]);
#pragma GCC unroll 4
                    for (int b = 0; b < panels; b++) c[r][b] = DOT_8(c[r][b], v[b], one);
                }
            } else {
                const Words fifteen = splat_word(0x0f0f0f0f);
                Words high[PANELS];
#pragma GCC unroll 4
                for (int b = 0; b < panels; b++) {
                    high[b] = and_words(right_4(v[b]), fifteen);
                    v[b] = and_words(v[b], fifteen);
                    if (form == 0) {
                        high[b] = look_up(values, high[b]);
                        v[b] = look_up(values, v[b]);
                    }
                }
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const Words one = splat_word(x[r * width + 2 * k]),
                                other = splat_word(x[r * width + 2 * k + 1]);
#pragma GCC unroll 4
                    for (int b = 0; b < panels; b++) {
                        c[r][b] = form == 4 ? DOT_4(c[r][b], v[b], one) : DOT_8(c[r][b], v[b], one);
                        Words *to = apart ? &others[b] : &c[r][b];
                        *to = form == 4 ? DOT_4(*to, high[b], other) : DOT_8(*to, high[b], other);
                    }
                }
            }
        }
        x += words;
#pragma GCC unroll 4
        for (int b = 0; b < panels; b++) {
            if (apart) c[0][b] = add_words(c[0][b], others[b]);
            const Floats scales =
                at_last ? splat(1) : scales_at(q, t->first + b * scaled * LANES + scale);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                f[r][b] = fma_lanes(floats_of(c[r][b]),
                                    mul_lanes(scales, splat(t->x_scales[r * groups + g])), f[r][b]);
        }
        if (q->offsets != NULL)
#pragma GCC unroll 4
            for (int b = 0; b < panels; b++) {
                const Floats offsets =
                    floats_f32(q->offsets + t->first + b * scaled * LANES + scale);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    f[r][b] = fnma_lanes(offsets,
                                         splat(t->x_scales[r * groups + g] *
                                               (float)t->sums[r * groups + g]),
                                         f[r][b]);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < panels; b++)
            store_f32(t->out + (r * PANELS + b) * LANES,
                      at_last ? mul_lanes(f[r][b], scales_at(q, t->first + b * LANES)) : f[r][b]);
}

/* The same of one panel of levels. `fetched`: whether each line prefetches one. */
TARGET_CODES INLINE void CODES(levels_tile)(const Tile *t, const int rows, const int fetched) {
    enum { QUADS = CODE_PANELS == PANELS ? 4 : 1 }; /* whose sums fit into registers */
    const Quantized *q = t->weight;
    const long groups = q->groups, width = groups * q->group, parts = q->group / q->part,
               blocks = q->part / 32;
    const Levels levels = levels_of(q);
    const Words fifteen = splat_word(0x0f0f0f0f), zero = splat_word((int32_t)0x80808080u);
    const char *w = t->panels, *ahead = t->ahead;
    Floats f[CODE_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) f[r] = splat(0);
    for (long g = 0; g < groups; g++, w += parts * blocks * 256, ahead += parts * blocks * 256) {
        Words c[CODE_ROWS][4];
#pragma GCC unroll 4
        for (int first = 0; first < 4; first += QUADS) {
            const int8_t *x = t->codes + g * q->group;
            const char *from = w + first * 64, *next = ahead + first * 64;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int i = 0; i < QUADS; i++) c[r][first + i] = splat_word(0);
            for (long p = 0; p < parts; p++) {
                const long at = (g * parts + p) * LANES;
                Words table[QUADS];
                if (fetched) {
                    _mm_prefetch((const char *)q->ratios + t->ratio_ahead + at, _MM_HINT_T1);
                    if (q->zeros != NULL)
                        _mm_prefetch((const char *)(q->zeros + t->ratio_ahead + at), _MM_HINT_T1);
                }
#pragma GCC unroll 4
                for (int i = 0; i < QUADS; i++)
                    table[i] = xor_words(
                        levels_at(q, &levels, t->first_ratio + at, first + i), zero);
                for (long k = 0; k < blocks; k++, x += 32, from += 256, next += 256) {
#pragma GCC unroll 4
                    for (int i = 0; i < QUADS; i++) {
                        const Words v = load_32(from + i * 64);
                        if (fetched) _mm_prefetch(next + i * 64, _MM_HINT_T1);
                        const Words low = look_up(table[i], and_words(v, fifteen)),
                                    high = look_up(table[i], and_words(right_4(v), fifteen));
#pragma GCC unroll 8
                        for (int r = 0; r < rows; r++) {
                            Words *to = &c[r][first + i];
                            *to = DOT_8(*to, low, bytes_16(x + r * width));
                            *to = DOT_8(*to, high, bytes_16(x + r * width + 16));
                        }
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const Words sums =
                add_words(sum_quads(c[r]), splat_word(-ZERO_8 * t->sums[r * groups + g]));
            f[r] = fma_lanes(floats_of(sums), splat(t->x_scales[r * groups + g]), f[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        store_f32(t->out + r * PANELS * LANES, mul_lanes(f[r], scales_at(q, t->first)));
}

#define TILE_OF(rows, fetched)                                                                     \
    TARGET_CODES static void CODES(levels_##rows##_##fetched)(const Tile *t) {                     \
        CODES(levels_tile)(t, rows, fetched);                                                      \
    }
TILE_OF(1, 0)
TILE_OF(2, 0)
TILE_OF(3, 0)
TILE_OF(4, 0)
TILE_OF(1, 1)
TILE_OF(2, 1)
TILE_OF(3, 1)
TILE_OF(4, 1)
#undef TILE_OF
static const TileProduct CODES(of_levels)[2][CODE_ROWS + 1] = {
    {NULL, CODES(levels_1_0), CODES(levels_2_0), CODES(levels_3_0), CODES(levels_4_0)},
    {NULL, CODES(levels_1_1), CODES(levels_2_1), CODES(levels_3_1), CODES(levels_4_1)},
};

#define TILE_OF(rows, panels, form, fetched)                                                       \
    TARGET_CODES static void CODES(tile_##rows##_##panels##_##form##_##fetched)(const Tile *t) {   \
        if (panels <= CODE_PANELS) CODES(tile)(t, rows, panels, form, fetched);                    \
    }
#define TILES_OF(panels, form, fetched)                                                            \
    TILE_OF(1, panels, form, fetched)                                                              \
    TILE_OF(2, panels, form, fetched)                                                              \
    TILE_OF(3, panels, form, fetched)                                                              \
    TILE_OF(4, panels, form, fetched)                                                              \
    static const TileProduct CODES(tiles_##panels##_##form##_##fetched)[] = {                      \
        NULL,                                                                                      \
        CODES(tile_1_##panels##_##form##_##fetched),                                               \
        CODES(tile_2_##panels##_##form##_##fetched),                                               \
        CODES(tile_3_##panels##_##form##_##fetched),                                               \
        CODES(tile_4_##panels##_##form##_##fetched),                                               \
    };
#define ALL_TILES(form)                                                                            \
    TILES_OF(1, form, 0)                                                                           \
    TILES_OF(1, form, 1)                                                                           \
    TILES_OF(3, form, 0)                                                                           \
    TILES_OF(3, form, 1)                                                                           \
    TILES_OF(3, form, 3)                                                                           \
    /* [whether of PANELS panels][lines][rows] */                                                  \
    static const TileProduct *const CODES(tiles_##form)[2][4] = {                                  \
        {CODES(tiles_1_##form##_0), CODES(tiles_1_##form##_1)},                                    \
        {CODES(tiles_3_##form##_0), CODES(tiles_3_##form##_1), NULL, CODES(tiles_3_##form##_3)},   \
    };
ALL_TILES(0)
ALL_TILES(4)
ALL_TILES(8)
#undef TILE_OF
#undef TILES_OF
#undef ALL_TILES

/*
 * sums [rows][PANELS][16] of up to PANELS panels, from panel `first` on, and rows of x from `row`
 * on. `next`: the panels to prefetch, or NULL.
 */
static void CODES(panels)(const Linear *l, long row, long rows, long first, long panels,
                          const char *next, float *sums) {
    const Quantized *q = &l->quantized;
    const long width = q->groups * q->group, panel = panel_bytes(q), lines = panel / 64;
    const Codes x = codes_of(l);
    const int has_levels = q->ratios != NULL,
              at_once = panels == PANELS && CODE_PANELS == PANELS && !has_levels;
    const long ratios = has_levels ? panel_ratios(q) : 0;
    const TileProduct *const(*tiles)[4] = q->values != NULL ? CODES(tiles_0)
                                          : q->bits == 4    ? CODES(tiles_4)
                                                            : CODES(tiles_8);
    const long count = (rows + CODE_ROWS - 1) / CODE_ROWS;
    for (long i = 0, at = 0; i < count; i++) {
        const long end = rows * (i + 1) / count, here = row + at;
        Tile t = {.weight = q,
                  .codes = x.codes + here * width,
                  .x_scales = x.scales + here * q->groups,
                  .sums = x.sums + here * q->groups};
        for (long b = 0; b < panels; b += at_once ? PANELS : 1) {
            const long p = first + b;
            /*
             * PANELS at once prefetch all of `next`: the only group of rows does, or the first
             * three. One alone prefetches the one after it.
             */
            const int is_last = at_once || b + 1 == panels;
            const int fetched = is_last && next == NULL ? 0
                                : !at_once              ? i == 0
                                : count < 3             ? 3 * (i == 0)
                                                        : i < 3;
            t.panels = (const char *)l->weights + p * panel;
            t.first = p * q->scaled * LANES;
            t.first_ratio = p * ratios;
            t.ahead = t.panels + panel;
            if (is_last && next != NULL) t.ahead = next + (at_once ? i * lines * 64 : 0);
            const long then =
                is_last && next != NULL ? (next - (const char *)l->weights) / panel : p + 1;
            t.first_ahead = then * q->scaled * LANES;
            t.ratio_ahead = then * ratios;
            t.out = sums + (at * PANELS + b) * LANES;
            (has_levels ? CODES(of_levels)[fetched] : tiles[at_once][fetched])[end - at](&t);
        }
        at = end;
    }
}

#undef CODES
#undef TARGET_CODES
#undef ZERO_8
#undef DOT_8
#undef DOT_4
#undef CODE_PANELS
