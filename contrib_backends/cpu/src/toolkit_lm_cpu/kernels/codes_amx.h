/*
 * Products of quantized weights by the tiles of AMX, as of codes.h. The bits are the same: the
 * arithmetic after a group's sums is.
 *
 * Tiles 0 to 2 hold sums of up to 16 rows by PANELS panels, 3 to 5 those of 16 more rows. Tile 6
 * holds codes of x, 7 of weights. The sums of a group are scaled while the tiles multiply the next
 * one: vectors take about as long as tiles.
 */

/* `step`: codes of x in a row of a tile. */
AMX_INT8 static void shape_codes(long rows, long step) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape __attribute__((aligned(64))) = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64}};
    for (int i = 0; i < 6; i++) shape.rows[i] = (uint8_t)rows;
    shape.bytes[6] = (uint16_t)step;
    shape.rows[6] = (uint8_t)rows;
    shape.bytes[7] = 64;
    shape.rows[7] = (uint8_t)(step / 4);
    TILES_READ(&shape);
    _tile_loadconfig(&shape);
}

/* Lines to prefetch, some at a time. */
typedef struct {
    const char *at;
    long left;
} Ahead;

INLINE void fetch_ahead(Ahead *a, long lines) {
    if (lines > a->left) lines = a->left;
    a->left -= lines;
    for (; lines > 0; lines--, a->at += 64) _mm_prefetch(a->at, _MM_HINT_T1);
}

/*
 * Codes of a panel, or their values, as signed ones of 8 bits: [codes / 4][16][4]. Prefetches a
 * line with each two that it reads.
 */
AMX_INT8 static void unpack_codes(const Quantized *q, const char *from, long codes, int8_t *to,
                                  Ahead *ahead) {
    const Words fifteen = splat_word(0x0f0f0f0f), eight = splat_word(0x08080808),
                zero = splat_word((int32_t)0x80808080u);
    if (q->bits == 8) {
        for (long k = 0; k < codes; k += 4, from += 64, to += 64) {
            store_32(to, _mm512_xor_si512(load_32(from), zero));
            if (k % 8 == 0) fetch_ahead(ahead, 1);
        }
        return;
    }
    const Words values =
        q->values != NULL ? _mm512_xor_si512(bytes_16(q->values), zero) : fifteen;
    for (long k = 0; k < codes; k += 8, from += 64, to += 128) {
        const Words both = load_32(from);
        Words low = and_words(both, fifteen), high = and_words(right_4(both), fifteen);
        if (q->values != NULL)
            low = look_up(values, low), high = look_up(values, high);
        else
            low = _mm512_sub_epi8(low, eight), high = _mm512_sub_epi8(high, eight);
        store_32(to, low);
        store_32(to + 64, high);
        if (k % 16 == 0) fetch_ahead(ahead, 1);
    }
}

/* The same of levels: groups of x from `first` on. `panel`: its number. */
AMX_INT8 static void unpack_levels(const Quantized *q, const char *from, long panel, long first,
                                   long codes, int8_t *to, Ahead *ahead) {
    const Levels levels = levels_of(q);
    const Words fifteen = splat_word(0x0f0f0f0f);
    long at = panel * panel_ratios(q) + first * q->group / q->part * LANES;
    for (long p = 0; p < codes; p += q->part, at += LANES) {
        Words table[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) table[i] = levels_at(q, &levels, at, i);
        for (long k = 0; k < q->part; k += 32, from += 256, to += 512) {
            Words low[4], high[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const Words v = load_32(from + i * 64);
                low[i] = look_up(table[i], and_words(v, fifteen));
                high[i] = look_up(table[i], and_words(right_4(v), fifteen));
            }
            transpose_quads(low);
            transpose_quads(high);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                store_32(to + i * 64, low[i]);
                store_32(to + 256 + i * 64, high[i]);
            }
            fetch_ahead(ahead, 2);
        }
    }
}

/* Sums of a group, which wait to be scaled. */
typedef struct {
    const Quantized *q;
    const int32_t *c;      /* [6][16][16], as tiles 0 to 5 */
    const float *x_scales; /* [rows], `groups` apart */
    const int32_t *x_sums; /* likewise */
    float *to;             /* [rows][PANELS][16] */
    long at;               /* of the first panel's scales */
    long rows;             /* of a tile; 0: nothing waits */
    int late;              /* one scale of an output multiplies the sum of all groups */
} Waiting;

/* Adds rows [from, end) of the tile of a panel, and of its 16 rows the first (0) or later (1). */
AMX_INT8 INLINE void scale_rows(const Waiting *w, const int later, const int panel, long from,
                                long end) {
    const Quantized *q = w->q;
    const long groups = q->groups, at = w->at + panel * q->scaled * LANES;
    const int32_t *c = w->c + (later * PANELS + panel) * LANES * LANES;
    const float *x_scales = w->x_scales + later * TILE * groups;
    float *to = w->to + (later * TILE * PANELS + panel) * LANES;
    if (w->late) {
#pragma GCC unroll 4
        for (long r = from; r < end; r++)
            store_f32(to + r * PANELS * LANES,
                      fma_lanes(floats_of(load_32(c + r * LANES)), splat(x_scales[r * groups]),
                                floats_f32(to + r * PANELS * LANES)));
        return;
    }
    const Floats scales = scales_at(q, at);
    if (q->offsets == NULL) {
#pragma GCC unroll 4
        for (long r = from; r < end; r++)
            store_f32(to + r * PANELS * LANES,
                      fma_lanes(floats_of(load_32(c + r * LANES)),
                                mul_lanes(scales, splat(x_scales[r * groups])),
                                floats_f32(to + r * PANELS * LANES)));
        return;
    }
    const int32_t *x_sums = w->x_sums + later * TILE * groups;
    const Floats offsets = floats_f32(q->offsets + at);
    for (long r = from; r < end; r++) {
        const Floats f = fma_lanes(floats_of(load_32(c + r * LANES)),
                                   mul_lanes(scales, splat(x_scales[r * groups])),
                                   floats_f32(to + r * PANELS * LANES));
        store_f32(to + r * PANELS * LANES,
                  fnma_lanes(offsets,
                             splat(x_scales[r * groups] * (float)x_sums[r * groups]), f));
    }
}

#define WEIGHTS(b) _tile_loadd(7, weights + (b) * panel + k * LANES, 64)
#define LOW_ROWS() _tile_loadd(6, x + k, width)
#define LATER_ROWS() _tile_loadd(6, x + TILE * width + k, width)
#define ADD(tile)                                                                                  \
    do {                                                                                           \
        _tile_dpbssd(tile, 6, 7);                                                                  \
        scale_rows(w, (tile) / PANELS, (tile) % PANELS, from, end);                                \
    } while (0)

/*
 * c = sums of a group, of up to 16 rows or of 32 if `tall`, by `panels` panels, `panel` codes
 * apart. Meanwhile those that wait are scaled; they are of as many rows and panels.
 */
AMX_INT8 INLINE void add_group(const int8_t *x, long width, const int8_t *weights, long panel,
                               long group, long step, int32_t *c, const Waiting *w, Ahead *ahead,
                               long lines, const int panels, const int tall) {
    const long steps = group / step;
    TILES_READ(x);
    _tile_zero(0);
    if (panels > 1) _tile_zero(1);
    if (panels > 2) _tile_zero(2);
    if (tall) _tile_zero(3);
    if (tall && panels > 1) _tile_zero(4);
    if (tall && panels > 2) _tile_zero(5);
    for (long i = 0, k = 0; i < steps; i++, k += step) {
        const long from = w->rows * i / steps, end = w->rows * (i + 1) / steps;
        fetch_ahead(ahead, lines);
        /* Each tile that is loaded is used twice in a row, where there are 32 rows. */
        LOW_ROWS();
        WEIGHTS(0);
        ADD(0);
        if (tall) {
            LATER_ROWS();
            ADD(3);
            if (panels > 1) {
                WEIGHTS(1);
                ADD(4);
                LOW_ROWS();
                ADD(1);
            }
            if (panels > 2) {
                WEIGHTS(2);
                ADD(2);
                LATER_ROWS();
                ADD(5);
            }
        } else {
            if (panels > 1) {
                WEIGHTS(1);
                ADD(1);
            }
            if (panels > 2) {
                WEIGHTS(2);
                ADD(2);
            }
        }
    }
    _tile_stored(0, c, 64);
    if (panels > 1) _tile_stored(1, c + LANES * LANES, 64);
    if (panels > 2) _tile_stored(2, c + 2 * LANES * LANES, 64);
    if (tall) _tile_stored(3, c + 3 * LANES * LANES, 64);
    if (tall && panels > 1) _tile_stored(4, c + 4 * LANES * LANES, 64);
    if (tall && panels > 2) _tile_stored(5, c + 5 * LANES * LANES, 64);
    TILES_READ(c);
}

#undef WEIGHTS
#undef LOW_ROWS
#undef LATER_ROWS
#undef ADD

/* Groups [first, end) of a tile's rows and panels: `weights` are those of the first group. */
typedef struct {
    const Linear *l;
    const int8_t *weights;
    long panel, step, first, end, lines;
    long first_panel;
} Groups;

/* sums [rows][PANELS][16] += the groups' of up to 16 rows from `row` on, or of 32 if `tall`. */
AMX_INT8 INLINE void add_groups(const Groups *of, long row, long rows, float *sums, Ahead *ahead,
                                const int panels, const int tall) {
    const Quantized *q = &of->l->quantized;
    const Codes x = codes_of(of->l);
    const long width = q->groups * q->group;
    int32_t c[2][2 * PANELS * LANES * LANES] __attribute__((aligned(64)));
    Waiting w = {.q = q, .to = sums, .late = q->scaled == 1 && q->offsets == NULL};
    for (long g = of->first; g < of->end; g++) {
        add_group(x.codes + row * width + g * q->group, width,
                  of->weights + (g - of->first) * q->group * LANES, of->panel, q->group, of->step,
                  c[g % 2], &w, ahead, of->lines, panels, tall);
        w.c = c[g % 2];
        w.x_scales = x.scales + row * q->groups + g;
        w.x_sums = x.sums + row * q->groups + g;
        w.at = (of->first_panel * q->scaled + (q->scaled > 1 ? g : 0)) * LANES;
        w.rows = tall ? TILE : rows;
    }
#pragma GCC unroll 3
    for (int b = 0; b < panels; b++) {
        scale_rows(&w, 0, b, 0, w.rows);
        if (tall) scale_rows(&w, 1, b, 0, w.rows);
    }
}

AMX_INT8 static void add_3_tall(const Groups *of, long row, long rows, float *sums, Ahead *ahead) {
    add_groups(of, row, rows, sums, ahead, 3, 1);
}
AMX_INT8 static void add_3(const Groups *of, long row, long rows, float *sums, Ahead *ahead) {
    add_groups(of, row, rows, sums, ahead, 3, 0);
}
AMX_INT8 static void add_1_tall(const Groups *of, long row, long rows, float *sums, Ahead *ahead) {
    add_groups(of, row, rows, sums, ahead, 1, 1);
}
AMX_INT8 static void add_1(const Groups *of, long row, long rows, float *sums, Ahead *ahead) {
    add_groups(of, row, rows, sums, ahead, 1, 0);
}

/* As CODES(panels) of codes.h. */
AMX_INT8 static void panels_codes_amx_int8(const Linear *l, long row, long rows, long first,
                                           long panels, const char *next, float *sums) {
    const Quantized *q = &l->quantized;
    const long panel = panel_bytes(q), some = MOST_UNPACKED / q->group;
    const long step = q->group % 64 == 0 ? 64 : q->group % 32 == 0 ? 32 : LANES;
    int8_t unpacked[PANELS * MOST_UNPACKED * LANES] __attribute__((aligned(64)));
    /* Of few rows unpacking would cost most; of levels it is the same work either way. */
    if (rows <= (q->ratios != NULL ? 4 : 8) || q->group > MOST_UNPACKED) {
        panels_codes_avx512_vnni(l, row, rows, first, panels, next, sums);
        return;
    }
    memset(sums, 0, (size_t)(rows * PANELS * LANES) * sizeof *sums);
    const long all = panels * panel / 64, blocks = (rows + 2 * TILE - 1) / (2 * TILE),
               steps = q->groups * (q->group / step) * blocks;
    Ahead ahead = {next, next == NULL ? 0 : all};
    long shaped = 0;
    for (long g = 0; g < q->groups; g += some) {
        const long end = g + some < q->groups ? g + some : q->groups,
                   codes = (end - g) * q->group;
        const Groups of = {l, unpacked, codes * LANES, step, g, end, (all + steps - 1) / steps,
                           first};
        for (long b = 0; b < panels; b++) {
            const char *from = (const char *)l->weights + (first + b) * panel +
                               g * q->group * LANES * q->bits / 8;
            if (q->ratios != NULL)
                unpack_levels(q, from, first + b, g, codes, unpacked + b * codes * LANES, &ahead);
            else
                unpack_codes(q, from, codes, unpacked + b * codes * LANES, &ahead);
        }
        for (long r = 0; r < rows;) {
            const long left = rows - r, there = left < TILE ? left : TILE;
            const int tall = left >= 2 * TILE;
            if (there != shaped) shape_codes(shaped = there, step);
            if (panels == PANELS)
                (tall ? add_3_tall : add_3)(&of, row + r, there, sums + r * PANELS * LANES, &ahead);
            else
                for (long b = 0; b < panels; b++) {
                    Groups one = of;
                    one.weights += b * codes * LANES;
                    one.first_panel += b;
                    (tall ? add_1_tall : add_1)(&one, row + r, there,
                                                sums + (r * PANELS + b) * LANES, &ahead);
                }
            r += tall ? 2 * TILE : there;
        }
    }
    _tile_release();
    if (q->scaled > 1 || q->offsets != NULL) return;
    for (long b = 0; b < panels; b++) {
        const Floats scales = scales_at(q, (first + b) * LANES);
        for (long r = 0; r < rows; r++) {
            float *to = sums + (r * PANELS + b) * LANES;
            store_f32(to, mul_lanes(floats_f32(to), scales));
        }
    }
}
