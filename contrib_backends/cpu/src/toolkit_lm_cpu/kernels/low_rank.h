/*
 * B A x of adapters, added to the sums of a product before they are rounded, for the rows that have
 * an adapter. Included by linear.h for each kind of element.
 *
 * A x comes first, by `multiply_low`: four sums, each over a quarter of the inputs, since of few
 * rows a single one is bound by the time from a term to the next. Their sum is rounded as x is.
 * Items of the product compute their own sums before they wait for A x. Meanwhile they fetch B, and
 * A of the model's next product: products of many rows compute longer than they read. B's sums go
 * on from those of the product. So what a row gets depends on the row and its adapters alone, and
 * other rows are not touched.
 */

/*
 * sums [rows][PANELS][16], of which each is `apart` floats after the one before, += x [rows, lanes]
 * by up to PANELS panels, from `at` on, of which each is `panel` lanes after the one before.
 * `shaped`: how tiles were shaped last; 0: they were not.
 */
#if AMX
TARGET static void NAME(add_panels)(const LANE *at, long panel, long lanes, const int32_t *x,
                                    long x_stride, long rows, long panels, float *sums, long apart,
                                    int *shaped) {
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
TARGET static void NAME(add_panels)(const LANE *at, long panel, long lanes, const int32_t *x,
                                    long x_stride, long rows, long panels, float *sums, long apart,
                                    int *shaped) {
    const long count = (rows + ROWS - 1) / ROWS;
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

#if !AMX
/* sums [rows][PANELS][16] = x [rows, lanes] by a panel, a sum of quarters. */
TARGET INLINE void NAME(low_tile)(const int32_t *x, long x_stride, const LANE *weights, long lanes,
                                  float *sums, const int rows) {
    const long quarter = lanes / 4;
    Floats c[4][2];
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++)
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) c[q][r] = splat(0);
    for (long k = 0; k < quarter; k++)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
            const Words w = LOAD(weights + (q * quarter + k) * LANES);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++)
                c[q][r] = DOT(c[q][r], splat_word(x[r * x_stride + q * quarter + k]), w);
        }
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
        const Floats first = add_lanes(c[0][r], c[1][r]);
        store_f32(sums + r * PANELS * LANES, add_lanes(add_lanes(first, c[2][r]), c[3][r]));
    }
}

/* The same of all rows and up to PANELS panels. `part`: memory as `sums`. */
TARGET static void NAME(low_sums)(const LANE *at, long lanes, const int32_t *x, long x_stride,
                                  long rows, long panels, float *sums, float *part) {
    /* Few inputs have one sum. */
    const long quarters = lanes % 4 == 0 && lanes >= 64 ? 4 : 1, some = lanes / quarters,
               panel = lanes * LANES, size = rows * PANELS * LANES;
    if (quarters == 4 && rows <= 2 && 4 * rows <= SUMS) {
        for (long b = 0; b < panels; b++)
            if (rows == 1)
                NAME(low_tile)(x, x_stride, at + b * panel, lanes, sums + b * LANES, 1);
            else
                NAME(low_tile)(x, x_stride, at + b * panel, lanes, sums + b * LANES, 2);
        return;
    }
    for (long q = 0; q < quarters; q++) {
        float *to = q == 0 ? sums : part;
        memset(to, 0, (size_t)size * sizeof *to);
        NAME(add_panels)(at + q * some * LANES, panel, some, x + q * some, x_stride, rows, panels,
                         to, PANELS * LANES, NULL);
        for (long i = 0; i < size && q > 0; i += LANES)
            store_f32(sums + i, add_lanes(floats_f32(sums + i), floats_f32(part + i)));
    }
}
#endif

/* Items of A: up to BLOCK rows by PANELS panels; of few rows by one, so that threads share them. */
TARGET static void NAME(multiply_low)(void *job, long item) {
    Linear *l = job;
    long g = 0;
    for (long count; item >= (count = low_items(l, g)); g++) item -= count;
    const RowGroup *group = l->groups->of + g;
    const LowRank *a = l->low_ranks->of[g];
    const long wide = l->low_width, blocks = (a->rank / LANES + wide - 1) / wide,
               first = item % blocks * wide, begin = item / blocks * BLOCK,
               lanes = l->inputs / PAIR;
    const long left = a->rank / LANES - first, panels = left < wide ? left : wide;
    const long rows = group->count - begin < BLOCK ? group->count - begin : BLOCK;
    const int64_t *at = group->rows + begin;
    const int is_copied = CONVERTS || at[rows - 1] - at[0] != rows - 1;
    const size_t size = (size_t)(rows * PANELS * LANES);
    float *sums = own_memory((2 * size + (is_copied ? (size_t)(rows * lanes) : 0)) * sizeof *sums);
    float *part = sums + size, *copy = part + size;
    if (sums == NULL) {
        l->failed = 1;
        return;
    }
    const int32_t *x = (const int32_t *)((const ELEMENT *)l->x + at[0] * l->x_stride);
    if (is_copied) {
        for (long r = 0; r < rows; r++) {
            const ELEMENT *from = (const ELEMENT *)l->x + at[r] * l->x_stride;
            float *to = copy + r * lanes;
#if CONVERTS
            for (long k = 0; k < l->inputs; k += LANES) store_f32(to + k, FLOATS(from + k));
#else
            memcpy(to, from, (size_t)l->inputs * sizeof *from);
#endif
        }
        x = (const int32_t *)copy;
    }
    const LANE *low = (const LANE *)a->low + first * lanes * LANES;
    const long x_stride = is_copied ? lanes : l->x_stride / PAIR;
#if AMX
    (void)part;
    NAME(panels)(low, lanes, x, x_stride, rows, panels, NULL, NULL, sums);
#else
    NAME(low_sums)(low, lanes, x, x_stride, rows, panels, sums, part);
#endif
    WEIGHT *out = (WEIGHT *)group->low + begin * a->rank + first * LANES;
    const Floats scale = splat(group->scale);
    for (long r = 0; r < rows; r++)
        for (long b = 0; b < panels; b++)
            STORE_WEIGHTS(out + r * a->rank + b * LANES,
                          mul_lanes(floats_f32(sums + (r * PANELS + b) * LANES), scale));
}

/* Lists B of some panels, from `first` on, of an adapter. Returns the number of segments. */
TARGET static long NAME(list_high)(const LowRank *a, long first, long panels, Segment *to) {
    const LowRankPart *parts[] = {&a->first, &a->second, &a->third};
    long count = 0;
    for (int i = 0; i < 3; i++) {
        const LowRankPart *part = parts[i];
        const long from = first > part->first ? first : part->first,
                   end = first + panels < part->last ? first + panels : part->last,
                   size = part->rank * LANES * (long)sizeof(ELEMENT);
        if (from < end)
            to[count++] = (Segment){(const char *)part->high + (from - part->first) * size,
                                    (end - from) * size};
    }
    return count;
}

/*
 * What to fetch beside the product of some rows, from `row` on, with some of `all` panels: B for
 * these rows; and of the next product's A, as large a part as they are of this product.
 */
TARGET static Beside NAME(beside)(const Linear *l, long row, long rows, long first, long panels,
                                  long all, Segment *segments) {
    Beside b = {.segments = segments};
    for (long g = 0; g < l->groups->count; g++) {
        const RowGroup *group = l->groups->of + g;
        const LowRank *a = l->low_ranks->of[g];
        if (a == NULL || rows_in(group, row, rows).count == 0) continue;
        b.count += NAME(list_high)(a, first, panels, segments + b.count);
        if (l->is_gated) b.count += NAME(list_high)(a, all + first, panels, segments + b.count);
    }
    for (long g = 0; g < l->groups->count && l->low_ranks->next != NULL && row == 0; g++) {
        const LowRank *a = l->low_ranks->next->of[g];
        if (a == NULL || l->groups->of[g].count == 0) continue;
        const long lines = a->rank * a->inputs * (long)sizeof(ELEMENT) / 64,
                   from = lines * first / all, end = lines * (first + panels) / all;
        if (from < end)
            segments[b.count++] = (Segment){(const char *)a->low + from * 64, (end - from) * 64};
    }
    long lines = 0;
    for (long i = 0; i < b.count; i++) lines += (segments[i].bytes + 63) / 64;
    const long tall = AMX ? 2 * TILE : ROWS, lanes = l->inputs / PAIR,
               times = (rows + tall - 1) / tall * (1 + l->is_gated) *
                       (AMX ? (lanes + CHUNK - 1) / CHUNK : (lanes + PIECE - 1) / PIECE);
    b.lines = (lines + times - 1) / times;
    return b;
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
        const Places places = rows_in(group, row, rows);
        const long begin = places.begin, count = places.count;
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
                             lanes * LANES, lanes, (const int32_t *)x,
                             a->rank * (long)sizeof *x / 4, count, end - from,
                             in_place ? base + (at[0] - row) * PANELS * LANES : own,
                             (in_place ? apart : 1) * PANELS * LANES, &shaped);
            if (!in_place) NAME(move_rows)(base, own, at, row, count, end - from, 1);
        }
    }
#if AMX
    if (shaped) _tile_release();
#endif
}
