/*
 * B A x of adapters, added to the sums of a product before they are rounded, for the rows that have
 * an adapter. Included by linear.h for each kind of element.
 *
 * A x comes first, by `multiply_low`: one sum over all inputs, rounded as x is. B's sums go on from
 * those of the product. So what a row gets depends on the row and its adapters alone, and other
 * rows are not touched.
 */

/* Items of A: up to BLOCK rows by PANELS panels; of few rows by one, so that threads share them. */
TARGET static void NAME(multiply_low)(void *job, long item) {
    Linear *l = job;
    long g = 0;
    for (long count; item >= (count = low_items(l, g)); g++) item -= count;
    const RowGroup *group = l->groups->of + g;
    const LowRank *a = l->low_ranks->of[g];
    const long wide = low_width(group), blocks = (a->rank / LANES + wide - 1) / wide,
               first = item % blocks * wide, begin = item / blocks * BLOCK,
               lanes = l->inputs / PAIR;
    const long left = a->rank / LANES - first, panels = left < wide ? left : wide;
    const long rows = group->count - begin < BLOCK ? group->count - begin : BLOCK;
    const int64_t *at = group->rows + begin;
    const int is_copied = CONVERTS || at[rows - 1] - at[0] != rows - 1;
    const size_t size = (size_t)(rows * PANELS * LANES);
    float *sums = own_memory((size + (is_copied ? (size_t)(rows * lanes) : 0)) * sizeof *sums);
    if (sums == NULL) {
        l->failed = 1;
        return;
    }
    const int32_t *x = (const int32_t *)((const ELEMENT *)l->x + at[0] * l->x_stride);
    if (is_copied) {
        for (long r = 0; r < rows; r++) {
            const ELEMENT *from = (const ELEMENT *)l->x + at[r] * l->x_stride;
            float *to = sums + size + r * lanes;
#if CONVERTS
            for (long k = 0; k < l->inputs; k += LANES) store_f32(to + k, FLOATS(from + k));
#else
            memcpy(to, from, (size_t)l->inputs * sizeof *from);
#endif
        }
        x = (const int32_t *)(sums + size);
    }
    NAME(panels)((const LANE *)a->low + first * lanes * LANES, lanes, x,
                 is_copied ? lanes : l->x_stride / PAIR, rows, panels, NULL, sums);
    WEIGHT *out = (WEIGHT *)group->low + begin * a->rank + first * LANES;
    const Floats scale = splat(group->scale);
    for (long r = 0; r < rows; r++)
        for (long b = 0; b < panels; b++)
            STORE_WEIGHTS(out + r * a->rank + b * LANES,
                          mul_lanes(floats_f32(sums + (r * PANELS + b) * LANES), scale));
}

/*
 * sums [rows][PANELS][16], of which each is `apart` floats after the one before, += x [rows, lanes]
 * by up to PANELS panels, from `at` on. `shaped`: how tiles were shaped last; 0: they were not.
 */
#if AMX
TARGET static void NAME(add_panels)(const LANE *at, long lanes, const int32_t *x, long x_stride,
                                    long rows, long panels, float *sums, long apart, int *shaped) {
    const long panel = lanes * LANES;
    const int step = lanes % LANES ? LANES / 2 : LANES;
    for (long row = 0; row < rows; row += TILE) {
        const int there = rows - row < TILE ? (int)(rows - row) : TILE;
        const int32_t *from = x + row * x_stride;
        float *to = sums + row * apart;
        if (*shaped != there + step * 64) {
            struct {
                uint8_t palette, start, reserved[14];
                uint16_t bytes[16];
                uint8_t rows[16];
            } shape __attribute__((aligned(64))) = {
                .palette = 1, .bytes = {64, 64, 64, 0, 0, 0, (uint16_t)(4 * step), 64}};
            shape.rows[0] = shape.rows[1] = shape.rows[2] = shape.rows[6] = (uint8_t)there;
            shape.rows[7] = (uint8_t)step;
            TILES_READ(&shape);
            _tile_loadconfig(&shape);
            *shaped = there + step * 64;
        }
        TILES_READ(x);
        _tile_loadd(0, to, apart * 4);
        if (panels > 1) _tile_loadd(1, to + LANES, apart * 4);
        if (panels > 2) _tile_loadd(2, to + 2 * LANES, apart * 4);
        for (long k = 0; k < lanes; k += step) {
            _tile_loadd(6, from + k, x_stride * 4);
            _tile_loadd(7, at + k * LANES, 64);
            _tile_dpbf16ps(0, 6, 7);
            if (panels > 1) _tile_loadd(7, at + panel + k * LANES, 64);
            if (panels > 1) _tile_dpbf16ps(1, 6, 7);
            if (panels > 2) _tile_loadd(7, at + 2 * panel + k * LANES, 64);
            if (panels > 2) _tile_dpbf16ps(2, 6, 7);
        }
        _tile_stored(0, to, apart * 4);
        if (panels > 1) _tile_stored(1, to + LANES, apart * 4);
        if (panels > 2) _tile_stored(2, to + 2 * LANES, apart * 4);
    }
}
#else
TARGET static void NAME(add_panels)(const LANE *at, long lanes, const int32_t *x, long x_stride,
                                    long rows, long panels, float *sums, long apart, int *shaped) {
    const long count = (rows + ROWS - 1) / ROWS, panel = lanes * LANES;
    (void)apart, (void)shaped;
    for (long i = 0, row = 0; i < count; i++) {
        const long end = rows * (i + 1) / count;
        const int n = (int)(end - row), at_once = n * PANELS <= SUMS && panels == PANELS;
        for (long b = 0; b < panels; b += at_once ? PANELS : 1)
            NAME(tiles)[at_once][0][n](x + row * x_stride, x_stride, at + b * panel, panel, lanes,
                                       sums + (row * PANELS + b) * LANES, NULL, 0);
        row = end;
    }
}
#endif

/* Prefetches B of some panels, from `first` on, of adapters of any rows. */
TARGET static void NAME(fetch_adapters)(const Linear *l, long first, long panels) {
    for (long g = 0; g < l->groups->count; g++) {
        const LowRank *a = l->low_ranks->of[g];
        if (a == NULL) continue;
        const LowRankPart *parts[] = {&a->first, &a->second, &a->third};
        for (int i = 0; i < 3; i++) {
            const LowRankPart *part = parts[i];
            const long from = first > part->first ? first : part->first,
                       end = first + panels < part->last ? first + panels : part->last,
                       size = part->rank / PAIR * LANES * (long)sizeof(LANE);
            const char *at = (const char *)part->high + (from - part->first) * size;
            for (long k = 0; k < (end - from) * size; k += 64) _mm_prefetch(at + k, _MM_HINT_T1);
        }
    }
}

/* The distance of rows that are equally far apart. 0: they are not. */
TARGET INLINE long NAME(distance)(const int64_t *at, long count) {
    const long apart = count > 1 ? at[1] - at[0] : 1;
    if (at[count - 1] - at[0] != apart * (count - 1)) return 0;
    for (long i = 2; i < count && apart != 1; i++)
        if (at[i] - at[i - 1] != apart) return 0;
    return apart;
}

/* Copies `panels` of the PANELS panels of sums, of the rows `at`, or back to them. */
TARGET INLINE void NAME(move_rows)(float *sums, float *own, const int64_t *at, long row, long rows,
                                   long panels, const int back) {
    for (long r = 0; r < rows; r++) {
        float *there = sums + (at[r] - row) * PANELS * LANES, *here = own + r * PANELS * LANES;
        for (long b = 0; b < panels * LANES; b += LANES)
            store_f32((back ? there : here) + b, floats_f32((back ? here : there) + b));
    }
}

/*
 * sums [rows][PANELS][16] of some panels, from `first` on, and rows from `row` on: what adapters
 * add. `own`: memory as `sums`.
 */
TARGET static void NAME(add_adapters)(const Linear *l, long row, long rows, long first, long panels,
                                      float *sums, float *own) {
    int shaped = 0;
    for (long g = 0; g < l->groups->count; g++) {
        const RowGroup *group = l->groups->of + g;
        const LowRank *a = l->low_ranks->of[g];
        if (a == NULL) continue;
        const long begin = place_in(group, row), count = place_in(group, row + rows) - begin;
        if (count == 0) continue;
        const int64_t *at = group->rows + begin;
        const long apart = NAME(distance)(at, count);
        const int in_place = AMX ? apart != 0 : apart == 1;
        const LowRankPart *parts[] = {&a->first, &a->second, &a->third};
        for (int i = 0; i < 3; i++) {
            const LowRankPart *part = parts[i];
            const long from = first > part->first ? first : part->first,
                       end = first + panels < part->last ? first + panels : part->last,
                       lanes = part->rank / PAIR;
            if (from >= end) continue;
            const WEIGHT *x = (const WEIGHT *)group->low + begin * a->rank + part->at;
            float *base = sums + (from - first) * LANES;
            if (!in_place) NAME(move_rows)(base, own, at, row, count, end - from, 0);
            NAME(add_panels)((const LANE *)part->high + (from - part->first) * lanes * LANES,
                             lanes, (const int32_t *)x, a->rank * (long)sizeof *x / 4, count,
                             end - from, in_place ? base + (at[0] - row) * PANELS * LANES : own,
                             (in_place ? apart : 1) * PANELS * LANES, &shaped);
            if (!in_place) NAME(move_rows)(base, own, at, row, count, end - from, 1);
        }
    }
#if AMX
    if (shaped) _tile_release();
#endif
}
