/*
 * Products of quantized weights by the tiles of AMX, as of codes.h. The bits are the same: the
 * arithmetic after a group's sums is.
 *
 * Tiles 0 to 2 hold sums of up to 16 rows by PANELS panels. Tile 6 holds codes of x, 7 of weights.
 */

/* `step`: codes of x in a row of a tile. */
AMX_INT8 static void shape_codes(long rows, long step) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape __attribute__((aligned(64))) = {
        .palette = 1, .bytes = {64, 64, 64}, .rows = {(uint8_t)rows, (uint8_t)rows, (uint8_t)rows}};
    shape.bytes[6] = (uint16_t)step;
    shape.rows[6] = (uint8_t)rows;
    shape.bytes[7] = 64;
    shape.rows[7] = (uint8_t)(step / 4);
    TILES_READ(&shape);
    _tile_loadconfig(&shape);
}

/* Codes of 4 bits of a group and panel, or their values, as codes of 8 bits: [group / 4][16][4]. */
AMX_INT8 static void unpack_group(const Quantized *q, const char *from, uint8_t *to) {
    const Words fifteen = splat_word(0x0f0f0f0f),
                values = q->values != NULL ? bytes_16(q->values) : fifteen;
    for (long k = 0; k < q->group; k += 8, from += 64, to += 128) {
        const Words codes = load_32(from);
        Words low = and_words(codes, fifteen), high = and_words(right_4(codes), fifteen);
        if (q->values != NULL) low = look_up(values, low), high = look_up(values, high);
        store_32(to, low);
        store_32(to + 64, high);
    }
}

/* Sums of a group: c [PANELS][16][16] of up to 16 rows, `weights` of a panel each. */
AMX_INT8 static void add_group(const Quantized *q, const int8_t *x, const char *const *weights,
                               long panels, long step, int32_t *c) {
    const long width = q->groups * q->group;
    TILES_READ(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (long k = 0; k < q->group; k += step) {
        _tile_loadd(6, x + k, width);
        _tile_loadd(7, weights[0] + k * LANES, 64);
        _tile_dpbsud(0, 6, 7);
        if (panels > 1) _tile_loadd(7, weights[1] + k * LANES, 64);
        if (panels > 1) _tile_dpbsud(1, 6, 7);
        if (panels > 2) _tile_loadd(7, weights[2] + k * LANES, 64);
        if (panels > 2) _tile_dpbsud(2, 6, 7);
    }
    _tile_stored(0, c, 64);
    if (panels > 1) _tile_stored(1, c + LANES * LANES, 64);
    if (panels > 2) _tile_stored(2, c + 2 * LANES * LANES, 64);
    TILES_READ(c);
}

/* sums [rows][PANELS][16] += the sums of a group and panel, as of codes.h. */
AMX_INT8 static void scale_group(const Quantized *q, const Codes *x, long row, long rows, long g,
                                 long panel, const int32_t *c, float *sums) {
    const long at = (panel * q->scaled + (q->scaled > 1 ? g : 0)) * LANES;
    const Floats scales = scales_at(q, at);
    const int zero = q->bits == 8 || q->values != NULL ? 128 : 8;
    for (long r = 0; r < rows; r++, c += LANES, sums += PANELS * LANES) {
        const long of = (row + r) * q->groups + g;
        const Words exact = add_words(load_32(c), splat_word(-zero * x->sums[of]));
        Floats f = fma_lanes(floats_of(exact), mul_lanes(scales, splat(x->scales[of])),
                             floats_f32(sums));
        if (q->offsets != NULL)
            f = fnma_lanes(floats_f32(q->offsets + at),
                           splat(x->scales[of] * (float)x->sums[of]), f);
        store_f32(sums, f);
    }
}

/* As CODES(panels) of codes.h. */
AMX_INT8 static void panels_codes_amx_int8(const Linear *l, long row, long rows, long first,
                                           long panels, const char *next, float *sums) {
    const Quantized *q = &l->quantized;
    const Codes x = codes_of(l);
    const long width = q->groups * q->group, panel = panel_bytes(q);
    const long step = q->group % 64 == 0 ? 64 : q->group % 32 == 0 ? 32 : LANES;
    int32_t c[PANELS * LANES * LANES] __attribute__((aligned(64)));
    uint8_t unpacked[PANELS][MOST_UNPACKED * LANES] __attribute__((aligned(64)));
    /* Of few rows unpacking would cost most. */
    if (q->bits == 4 && (rows <= 8 || q->group > MOST_UNPACKED)) {
        panels_codes_avx512_vnni(l, row, rows, first, panels, next, sums);
        return;
    }
    memset(sums, 0, (size_t)(rows * PANELS * LANES) * sizeof *sums);
    const long lines = next == NULL ? 0 : panels * panel / 64 / q->groups;
    long shaped = 0;
    for (long g = 0; g < q->groups; g++) {
        const char *weights[PANELS];
        for (long i = 0; i < lines; i++) _mm_prefetch(next + (g * lines + i) * 64, _MM_HINT_T1);
        for (long b = 0; b < panels; b++) {
            weights[b] = (const char *)l->weights + (first + b) * panel +
                         g * q->group * LANES * q->bits / 8;
            if (q->bits == 8) continue;
            unpack_group(q, weights[b], unpacked[b]);
            weights[b] = (const char *)unpacked[b];
        }
        for (long r = 0; r < rows; r += TILE) {
            const long there = rows - r < TILE ? rows - r : TILE;
            if (there != shaped) shape_codes(shaped = there, step);
            add_group(q, x.codes + (row + r) * width + g * q->group, weights, panels, step, c);
            for (long b = 0; b < panels; b++)
                scale_group(q, &x, row + r, there, g, first + b, c + b * LANES * LANES,
                            sums + (r * PANELS + b) * LANES);
        }
    }
    _tile_release();
}
