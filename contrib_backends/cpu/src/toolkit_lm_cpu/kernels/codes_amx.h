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
 * Codes of 4 bits of a panel, or their values, as signed ones of 8 bits: [codes / 4][16][4].
 * Prefetches a line with each two that it reads.
 */
AMX_INT8 static void unpack_codes(const Quantized *q, const char *from, long codes, int8_t *to,
                                  Ahead *ahead) {
    const Words fifteen = splat_word(0x0f0f0f0f), eight = splat_word(0x08080808),
                zero = splat_word((int32_t)0x80808080u);
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

/* Sums of one group, or of two that follow each other, which wait to be scaled. */
typedef struct {
    const Quantized *q;
    const int32_t *c;      /* [count][2 * 16 rows][PANELS][16] */
    const float *x_scales; /* [rows][groups], from the first of these groups on */
    const int32_t *x_sums; /* likewise */
    float *to;             /* [rows][PANELS][16] */
    long at;               /* of the first panel's scales */
    long count, rows;      /* rows 0: nothing waits */
    int is_first, is_last; /* of all groups */
} Waiting;

/*
 * Adds rows [from, end) of what waits. `late`: one scale of an output multiplies the sum of all
 * groups. `zero`: of the codes of weights.
 */
AMX_INT8 INLINE void scale_rows(const Waiting *w, long from, long end, const int panels,
                                const int late, const int count, const int zero) {
    const Quantized *q = w->q;
    const long groups = q->groups, scaled = q->scaled, next = scaled > 1 ? LANES : 0;
    const Mask added = w->is_first ? 0 : 0xffff;
    Floats scales[2][PANELS];
#pragma GCC unroll 3
    for (int b = 0; b < panels; b++) {
        scales[0][b] = !late || w->is_last ? scales_at(q, w->at + b * scaled * LANES) : splat(1);
        scales[1][b] =
            !late && count > 1 ? scales_at(q, w->at + b * scaled * LANES + next) : splat(1);
    }
    for (long r = from; r < end; r++) {
        const int32_t *c = w->c + r * PANELS * LANES;
        float *to = w->to + r * PANELS * LANES;
        Floats f[PANELS];
#pragma GCC unroll 3
        for (int b = 0; b < panels; b++) f[b] = floats_masked(added, to + b * LANES);
#pragma GCC unroll 2
        for (int g = 0; g < count; g++) {
            const Floats scale = splat(w->x_scales[r * groups + g]);
            const Words zeros = splat_word(zero * w->x_sums[r * groups + g]);
#pragma GCC unroll 3
            for (int b = 0; b < panels; b++) {
                Words sums = load_32(c + (g * 2 * TILE * PANELS + b) * LANES);
                if (zero) sums = _mm512_sub_epi32(sums, zeros);
                f[b] = fma_lanes(floats_of(sums), late ? scale : mul_lanes(scales[g][b], scale),
                                 f[b]);
            }
            if (!late && q->offsets != NULL)
#pragma GCC unroll 3
                for (int b = 0; b < panels; b++)
                    f[b] = fnma_lanes(
                        floats_f32(q->offsets + w->at + b * scaled * LANES + g * next),
                        splat(w->x_scales[r * groups + g] * (float)w->x_sums[r * groups + g]),
                        f[b]);
        }
#pragma GCC unroll 3
        for (int b = 0; b < panels; b++)
            store_f32(to + b * LANES, late ? mul_lanes(f[b], scales[0][b]) : f[b]);
    }
}

#define SCALE_OF(panels, late, count, zero)                                                        \
    AMX_INT8 static void scale_##panels##_##late##_##count##_##zero(const Waiting *w, long from,   \
                                                                    long end) {                    \
        scale_rows(w, from, end, panels, late, count, zero);                                       \
    }
#define SCALES_OF(panels, late)                                                                    \
    SCALE_OF(panels, late, 1, 0)                                                                   \
    SCALE_OF(panels, late, 2, 0)                                                                   \
    SCALE_OF(panels, late, 1, 128)                                                                 \
    SCALE_OF(panels, late, 2, 128)
SCALES_OF(1, 0)
SCALES_OF(1, 1)
SCALES_OF(3, 0)
SCALES_OF(3, 1)
#define SCALES(panels, late)                                                                       \
    {{scale_##panels##_##late##_1_0, scale_##panels##_##late##_2_0},                               \
     {scale_##panels##_##late##_1_128, scale_##panels##_##late##_2_128}}
/* [whether of PANELS panels][late][whether codes have a zero][groups - 1] */
static void (*const scale_some[2][2][2][2])(const Waiting *w, long from, long end) = {
    {SCALES(1, 0), SCALES(1, 1)}, {SCALES(3, 0), SCALES(3, 1)}};
#undef SCALE_OF
#undef SCALES_OF
#undef SCALES

/* Groups [first, end) of a tile's rows and panels: `weights` are those of the first group. */
typedef struct {
    const Linear *l;
    const int8_t *weights;
    long panel, step, first, end, lines;
    long first_panel;
    int zero; /* whether codes have one: they are not unpacked */
} Groups;

#define WEIGHTS(b) _tile_loadd(7, weights + (b) * of->panel + k * LANES, 64)
#define LOW_ROWS() _tile_loadd(6, x + k * times, pitch)
#define LATER_ROWS() _tile_loadd(6, x + TILE * width + k * times, pitch)
#define ADD(tile)                                                                                  \
    do {                                                                                           \
        if (zero)                                                                                  \
            _tile_dpbsud(tile, 6, 7);                                                              \
        else                                                                                       \
            _tile_dpbssd(tile, 6, 7);                                                              \
    } while (0)
#define KEEP(tile)                                                                                 \
    _tile_stored(tile, c + ((tile) / PANELS * TILE * PANELS + (tile) % PANELS) * LANES, PANELS * 64)

/* What waits is scaled by so many parts, between products. */
typedef struct {
    const Waiting *w;
    void (*scale)(const Waiting *w, long from, long end);
    long done, parts;
} Scaling;

INLINE void scale_part(Scaling *s) {
    const long from = s->w->rows * s->done / s->parts;
    const long end = s->w->rows * ++s->done / s->parts;
    if (end > from) s->scale(s->w, from, end);
}

/*
 * c = sums of a group, of up to 16 rows or of 32 if `tall`, by `panels` panels. Meanwhile those
 * that wait are scaled; they are of as many rows and panels. `pitch`: bytes from row to row of x;
 * `times`: bytes from code to code of those that begin a tile.
 */
AMX_INT8 INLINE void add_group(const Groups *of, const int8_t *x, long pitch, long times,
                               const int8_t *weights, int32_t *c, Scaling *s, Ahead *ahead,
                               const int panels, const int tall, const int zero) {
    const Quantized *q = &of->l->quantized;
    const long width = q->groups * q->group;
    TILES_READ(x);
    _tile_zero(0);
    if (panels > 1) _tile_zero(1);
    if (panels > 2) _tile_zero(2);
    if (tall) _tile_zero(3);
    if (tall && panels > 1) _tile_zero(4);
    if (tall && panels > 2) _tile_zero(5);
    for (long k = 0; k < q->group; k += of->step) {
        fetch_ahead(ahead, of->lines);
        /* Each tile that is loaded is used twice in a row, where there are 32 rows. */
        LOW_ROWS();
        WEIGHTS(0);
        ADD(0);
        if (tall) {
            LATER_ROWS();
            ADD(3);
            scale_part(s);
            if (panels > 1) {
                WEIGHTS(1);
                ADD(4);
                LOW_ROWS();
                ADD(1);
                scale_part(s);
            }
            if (panels > 2) {
                WEIGHTS(2);
                ADD(2);
                LATER_ROWS();
                ADD(5);
                scale_part(s);
            }
        } else {
            scale_part(s);
            if (panels > 1) {
                WEIGHTS(1);
                ADD(1);
                scale_part(s);
            }
            if (panels > 2) {
                WEIGHTS(2);
                ADD(2);
                scale_part(s);
            }
        }
    }
    KEEP(0);
    if (panels > 1) KEEP(1);
    if (panels > 2) KEEP(2);
    if (tall) KEEP(3);
    if (tall && panels > 1) KEEP(4);
    if (tall && panels > 2) KEEP(5);
    TILES_READ(c);
}

#undef WEIGHTS
#undef LOW_ROWS
#undef LATER_ROWS
#undef ADD
#undef KEEP

/* sums [rows][PANELS][16] += the groups' of up to 16 rows from `row` on, or of 32 if `tall`. */
AMX_INT8 INLINE void add_groups(const Groups *of, long row, long rows, float *sums, Ahead *ahead,
                                const int panels, const int tall, const int zero) {
    const Quantized *q = &of->l->quantized;
    const Codes x = codes_of(of->l);
    const long width = q->groups * q->group, parts = q->group / of->step * panels;
    const int late = q->scaled == 1 && q->offsets == NULL, tiled = row < of->l->tiled;
    const long pitch = tiled ? of->step : width, times = tiled ? TILE : 1;
    int32_t c[2][2][2 * TILE * PANELS * LANES] __attribute__((aligned(64)));
    Waiting w = {.q = q, .to = sums};
    Scaling s = {.w = &w};
    int which = 0;
    for (long g = of->first; g < of->end; g += 2, which = !which) {
        const long count = of->end - g < 2 ? 1 : 2;
        s.done = 0, s.parts = count * parts;
        for (long i = 0; i < count; i++)
            add_group(of, x.codes + row * width + (g + i) * q->group * times, pitch, times,
                      of->weights + (g + i - of->first) * q->group * LANES, c[which][i], &s, ahead,
                      panels, tall, zero);
        w.c = c[which][0];
        w.x_scales = x.scales + row * q->groups + g;
        w.x_sums = x.sums + row * q->groups + g;
        w.at = (of->first_panel * q->scaled + (q->scaled > 1 ? g : 0)) * LANES;
        w.count = count, w.rows = tall ? 2 * TILE : rows;
        w.is_first = g == 0, w.is_last = g + count == q->groups;
        s.scale = scale_some[panels > 1][late][zero][count - 1];
    }
    s.scale(&w, 0, w.rows);
}

#define ADD_OF(name, panels, tall, zero)                                                           \
    AMX_INT8 static void name##_##zero(const Groups *of, long row, long rows, float *sums,         \
                                       Ahead *ahead) {                                             \
        add_groups(of, row, rows, sums, ahead, panels, tall, zero);                                \
    }
#define ADDS_OF(zero)                                                                              \
    ADD_OF(add_3_tall, 3, 1, zero)                                                                 \
    ADD_OF(add_3, 3, 0, zero)                                                                      \
    ADD_OF(add_1_tall, 1, 1, zero)                                                                 \
    ADD_OF(add_1, 1, 0, zero)
ADDS_OF(0)
ADDS_OF(1)
/* [whether codes have a zero][whether of PANELS panels][whether of 32 rows] */
static void (*const add_some[2][2][2])(const Groups *of, long row, long rows, float *sums,
                                       Ahead *ahead) = {
    {{add_1_0, add_1_tall_0}, {add_3_0, add_3_tall_0}},
    {{add_1_1, add_1_tall_1}, {add_3_1, add_3_tall_1}}};
#undef ADD_OF
#undef ADDS_OF

/* As CODES(panels) of codes.h. */
AMX_INT8 static void panels_codes_amx_int8(const Linear *l, long row, long rows, long first,
                                           long panels, const char *next, float *sums) {
    const Quantized *q = &l->quantized;
    const long panel = panel_bytes(q), some = MOST_UNPACKED / q->group;
    const long step = tile_codes(q);
    int8_t unpacked[PANELS * MOST_UNPACKED * LANES] __attribute__((aligned(64)));
    /* Of few rows unpacking would cost most; of levels it is the same work either way. */
    if (rows <= (q->bits == 8 || q->ratios != NULL ? 4 : 8) || q->group > MOST_UNPACKED) {
        panels_codes_avx512_vnni(l, row, rows, first, panels, next, sums);
        return;
    }
    const long all = panels * panel / 64, blocks = (rows + 2 * TILE - 1) / (2 * TILE),
               steps = q->groups * (q->group / step) * blocks;
    const int in_place = q->bits == 8;
    Ahead ahead = {next, next == NULL ? 0 : all};
    long shaped = 0;
    for (long g = 0; g < q->groups; g += some) {
        const long end = g + some < q->groups ? g + some : q->groups,
                   codes = (end - g) * q->group;
        const char *from =
            (const char *)l->weights + first * panel + g * q->group * LANES * q->bits / 8;
        const Groups of = {l,
                           in_place ? (const int8_t *)from : unpacked,
                           in_place ? panel : codes * LANES,
                           step,
                           g,
                           end,
                           (all + steps - 1) / steps,
                           first,
                           in_place};
        for (long b = 0; b < panels && !in_place; b++, from += panel)
            if (q->ratios != NULL)
                unpack_levels(q, from, first + b, g, codes, unpacked + b * codes * LANES, &ahead);
            else
                unpack_codes(q, from, codes, unpacked + b * codes * LANES, &ahead);
        for (long r = 0; r < rows;) {
            const long left = rows - r, there = left < TILE ? left : TILE;
            const int tall = left >= 2 * TILE;
            if (there != shaped) shape_codes(shaped = there, step);
            for (long b = 0; b < panels; b += panels == PANELS ? PANELS : 1) {
                Groups some_panels = of;
                some_panels.weights += b * of.panel;
                some_panels.first_panel += b;
                add_some[in_place][panels == PANELS][tall](
                    &some_panels, row + r, there, sums + (r * PANELS + b) * LANES, &ahead);
            }
            r += tall ? 2 * TILE : there;
        }
    }
    _tile_release();
}
