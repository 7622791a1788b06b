/*
 * Linear layers: activation(x W^T + bias) + residual, of x [rows, K] and W [N, K].
 * Gated: W has two halves, and the result is activation(gate) * up.
 * A factor multiplies what was rounded, as a layer after this one would.
 *
 * Included once for each kind of element, with the words of types.h.
 *
 * W lies in panels of 16 outputs, [N / 16][K / PAIR][16] lanes: a lane is an output; past N, zeros.
 * One layout serves all numbers of rows. A work item has at most BLOCK rows by MOST_COLUMNS panels.
 * A tile's computation prefetches the weights of the next tile: from some rows on, reading and
 * arithmetic take equally long.
 * Each result is one sum over K in a fixed order, independent of the rest of the batch.
 */

/* Fetches up to so many lines of what lies beside a product. */
TARGET static void NAME(fetch_beside)(Beside *b, long lines) {
    for (; b->segment < b->count && lines > 0; b->segment++) {
        const Segment *s = b->segments + b->segment;
        for (; b->at < s->bytes && lines > 0; b->at += 64, lines--)
            _mm_prefetch(s->from + b->at, _MM_HINT_T1);
        if (b->at < s->bytes) return;
        b->at = 0;
    }
}

#if !AMX

/*
 * sums [rows][PANELS][16] += x [rows, lanes] by panels of weights.
 * Each lane prefetches `fetched` cache lines from `ahead` on, `step` bytes apart.
 */
TARGET INLINE void NAME(tile)(const int32_t *x, long x_stride, const LANE *weights, long panel,
                              long lanes, float *sums, const char *ahead, long step, const int rows,
                              const int panels, const int fetched) {
    Floats c[8][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < panels; b++) c[r][b] = floats_f32(sums + (r * PANELS + b) * LANES);
    for (long k = 0; k < lanes; k++) {
        Words w[PANELS];
#pragma GCC unroll 4
        for (int b = 0; b < panels; b++) w[b] = LOAD(weights + b * panel + k * LANES);
#pragma GCC unroll 4
        for (int p = 0; p < fetched; p++) _mm_prefetch(ahead + p * step, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const Words one = splat_word(x[r * x_stride + k]);
#pragma GCC unroll 4
            for (int b = 0; b < panels; b++) c[r][b] = DOT(c[r][b], one, w[b]);
        }
        ahead += fetched * step;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int b = 0; b < panels; b++) store_f32(sums + (r * PANELS + b) * LANES, c[r][b]);
}

typedef void (*NAME(Tile))(const int32_t *x, long x_stride, const LANE *weights, long panel,
                           long lanes, float *sums, const char *ahead, long step);

#define TILE_OF(rows, panels, fetched)                                                             \
    TARGET static void NAME(tile_##rows##_##panels##_##fetched)(                                   \
        const int32_t *x, long x_stride, const LANE *weights, long panel, long lanes, float *sums, \
        const char *ahead, long step) {                                                            \
        if (rows * panels <= SUMS)                                                                 \
            NAME(tile)(x, x_stride, weights, panel, lanes, sums, ahead, step, rows, panels,        \
                       fetched);                                                                   \
    }
#define TILES_OF(panels, fetched)                                                                  \
    TILE_OF(1, panels, fetched)                                                                    \
    TILE_OF(2, panels, fetched)                                                                    \
    TILE_OF(3, panels, fetched)                                                                    \
    TILE_OF(4, panels, fetched)                                                                    \
    TILE_OF(5, panels, fetched)                                                                    \
    TILE_OF(6, panels, fetched)                                                                    \
    TILE_OF(7, panels, fetched)                                                                    \
    TILE_OF(8, panels, fetched)                                                                    \
    static const NAME(Tile) NAME(tiles_##panels##_##fetched)[] = {                                 \
        NULL,                                                                                      \
        NAME(tile_1_##panels##_##fetched),                                                         \
        NAME(tile_2_##panels##_##fetched),                                                         \
        NAME(tile_3_##panels##_##fetched),                                                         \
        NAME(tile_4_##panels##_##fetched),                                                         \
        NAME(tile_5_##panels##_##fetched),                                                         \
        NAME(tile_6_##panels##_##fetched),                                                         \
        NAME(tile_7_##panels##_##fetched),                                                         \
        NAME(tile_8_##panels##_##fetched),                                                         \
    };

TILES_OF(1, 0)
TILES_OF(1, 1)
TILES_OF(3, 0)
TILES_OF(3, 1)
TILES_OF(3, 2)
TILES_OF(3, 3)

#undef TILE_OF
#undef TILES_OF

/* [whether a tile has PANELS panels, not 1][cache lines that each lane prefetches][rows] */
static const NAME(Tile) *const NAME(tiles)[2][4] = {
    {NAME(tiles_1_0), NAME(tiles_1_1)},
    {NAME(tiles_3_0), NAME(tiles_3_1), NAME(tiles_3_2), NAME(tiles_3_3)},
};

/*
 * sums [rows][PANELS][16] of up to PANELS panels, from `at` on, and rows of x.
 * `next`: the panels to prefetch, or NULL.
 *
 * Rows are split into groups of up to ROWS. A group is multiplied in one of six ways:
 *
 *   panels per tile  lines per lane
 *   3                3, 2 or 1      FETCHES has the number, by the number of groups
 *   3                0              there is no `next`
 *   1                1              sums of the group's rows by 3 panels do not fit in registers,
 *                                   or fewer than 3 panels are left, W's last
 *   1                0              the same without `next`
 *
 * `beside`: what is fetched piece by piece between tiles, or NULL.
 */
TARGET static void NAME(panels)(const LANE *at, long lanes, const int32_t *x, long x_stride,
                                long rows, long panels, const LANE *next, Beside *beside,
                                float *sums) {
    const long count = (rows + ROWS - 1) / ROWS, panel = lanes * LANES;
    memset(sums, 0, (size_t)(rows * PANELS * LANES) * sizeof *sums);
    for (long begin = 0; begin < lanes; begin += CHUNK) {
        const long some = lanes - begin < CHUNK ? lanes - begin : CHUNK;
        /*
         * The address to prefetch: `next` if all lanes are in one chunk,
         * else the rest of the first panel, which is better than nothing.
         */
        const char *ahead = (const char *)(some == lanes ? next : at + (begin + some) * LANES);
        for (long i = 0, row = 0; i < count; i++) {
            const long end = rows * (i + 1) / count;
            const int n = (int)(end - row);
            const int at_once = n * PANELS <= SUMS && panels == PANELS;
            const long passes = at_once ? 1 : PANELS;
            const Fetch fetch = next == NULL ? (Fetch){0, 0} : FETCHES[at_once][count];
            const NAME(Tile) tile = NAME(tiles)[at_once][fetch.lines][n];
            for (long b = 0; b < panels; b += at_once ? PANELS : 1)
                for (long k = 0, piece; k < some; k += piece) {
                    piece = beside == NULL || some - k < PIECE ? some - k : PIECE;
                    if (beside != NULL) NAME(fetch_beside)(beside, beside->lines);
                    tile(x + row * x_stride + begin + k, x_stride,
                         at + b * panel + (begin + k) * LANES, panel, piece,
                         sums + (row * PANELS + b) * LANES,
                         ahead + ((i * passes + b) * some + k) * fetch.lines * fetch.apart,
                         fetch.apart);
                }
            row = end;
        }
    }
}

#else

/*
 * Tiles 0 to 5 hold sums of up to 32 rows by PANELS panels. Tile 6 holds rows of x, 7 weights.
 */
TARGET INLINE void NAME(shape_product)(int rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape __attribute__((aligned(64))) = {.palette = 1,
                                            .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                            .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    shape.rows[0] = shape.rows[1] = shape.rows[2] = shape.rows[6] = (uint8_t)rows;
    TILES_READ(&shape);
    _tile_loadconfig(&shape);
}

/* MOVE_SUMS loads tiles A, B and C, or zeroes them at first. KEEP_SUMS stores them. */
#define MOVE_SUMS(A, B, C, at)                                                                     \
    do {                                                                                           \
        if (is_first) {                                                                            \
            _tile_zero(A);                                                                         \
            _tile_zero(B);                                                                         \
            _tile_zero(C);                                                                         \
        } else {                                                                                   \
            _tile_loadd(A, at, PANELS * 64);                                                       \
            if (panels > 1) _tile_loadd(B, (at) + LANES, PANELS * 64);                             \
            if (panels > 2) _tile_loadd(C, (at) + 2 * LANES, PANELS * 64);                         \
        }                                                                                          \
    } while (0)
#define KEEP_SUMS(A, B, C, at)                                                                     \
    do {                                                                                           \
        _tile_stored(A, at, PANELS * 64);                                                          \
        if (panels > 1) _tile_stored(B, (at) + LANES, PANELS * 64);                                \
        if (panels > 2) _tile_stored(C, (at) + 2 * LANES, PANELS * 64);                            \
    } while (0)
#define ADD_PANELS(A, B, C, from)                                                                  \
    do {                                                                                           \
        _tile_loadd(6, (from) + k, x_stride * 4);                                                  \
        _tile_loadd(7, weights + k * LANES, 64);                                                   \
        _tile_dpbf16ps(A, 6, 7);                                                                   \
        if (panels > 1) _tile_loadd(7, weights + panel + k * LANES, 64);                           \
        if (panels > 1) _tile_dpbf16ps(B, 6, 7);                                                   \
        if (panels > 2) _tile_loadd(7, weights + 2 * panel + k * LANES, 64);                       \
        if (panels > 2) _tile_dpbf16ps(C, 6, 7);                                                   \
    } while (0)

/* The tile product by AMX: up to 16 rows, or 32 if `tall`. */
TARGET INLINE void NAME(tile)(const int32_t *x, long x_stride, const LANE *weights, long panel,
                              long lanes, float *sums, int is_first, const char *ahead, long lines,
                              const int panels, const int tall) {
    TILES_READ(x);
    MOVE_SUMS(0, 1, 2, sums);
    if (tall) MOVE_SUMS(3, 4, 5, sums + TILE * PANELS * LANES);
    for (long k = 0; k < lanes; k += LANES) {
        for (long i = 0; i < lines; i++) _mm_prefetch(ahead + i * 64, _MM_HINT_T1);
        ahead += lines * 64;
        ADD_PANELS(0, 1, 2, x);
        if (tall) ADD_PANELS(3, 4, 5, x + TILE * x_stride);
    }
    KEEP_SUMS(0, 1, 2, sums);
    if (tall) KEEP_SUMS(3, 4, 5, sums + TILE * PANELS * LANES);
}

/*
 * sums [rows][PANELS][16] of up to PANELS panels, from `at` on, and rows of x.
 * `next`: the panels to prefetch, or NULL. `beside`: what is fetched piece by piece, or NULL.
 */
TARGET static void NAME(panels)(const LANE *at, long lanes, const int32_t *x, long x_stride,
                                long rows, long panels, const LANE *next, Beside *beside,
                                float *sums) {
    const long panel = lanes * LANES, groups = (rows + 2 * TILE - 1) / (2 * TILE);
    for (long begin = 0; begin < lanes; begin += CHUNK) {
        const long some = lanes - begin < CHUNK ? lanes - begin : CHUNK;
        const char *ahead = (const char *)(some == lanes ? next : at + (begin + some) * LANES);
        const long lines = next != NULL ? PANELS * LANES / groups : 0;
        int shaped = 0;
        for (long row = 0; row < rows;) {
            const long left = rows - row;
            const int tall = left >= 2 * TILE, there = left < TILE ? (int)left : TILE;
            const int32_t *from = x + row * x_stride + begin;
            const LANE *weights = at + begin * LANES;
            float *to = sums + row * PANELS * LANES;
            if (there != shaped) NAME(shape_product)(shaped = there);
            if (beside != NULL) NAME(fetch_beside)(beside, beside->lines);
            if (panels == 3 && tall)
                NAME(tile)(from, x_stride, weights, panel, some, to, begin == 0, ahead, lines, 3,
                           1);
            else if (panels == 3)
                NAME(tile)(from, x_stride, weights, panel, some, to, begin == 0, ahead, lines, 3,
                           0);
            else
                for (long b = 0; b < panels; b++) {
                    NAME(tile)(from, x_stride, weights + b * panel, panel, some, to + b * LANES,
                               begin == 0, ahead, 0, 1, 0);
                    if (tall)
                        NAME(tile)(from + TILE * x_stride, x_stride, weights + b * panel, panel,
                                   some, to + (TILE * PANELS + b) * LANES, begin == 0, ahead, 0, 1,
                                   0);
                }
            row += tall ? 2 * TILE : there;
            ahead += some / LANES * lines * 64;
        }
    }
    _tile_release();
}

#undef MOVE_SUMS
#undef KEEP_SUMS
#undef ADD_PANELS
#endif

/* Writes outputs [first, first + 16) of all rows, without those past the last, from their sums. */
TARGET static void NAME(put)(const Linear *l, long row, long rows, long first, const float *sums,
                             const float *up, ELEMENT *out, long out_stride) {
    const long there = l->outputs - first < LANES ? l->outputs - first : LANES;
    ELEMENT edge[LANES], edge_up[LANES];
    Floats bias = splat(0), up_bias = bias;
    if (l->bias != NULL) {
        const ELEMENT *from = (const ELEMENT *)l->bias + first;
        memcpy(edge, from, (size_t)there * sizeof *edge);
        bias = FLOATS(edge);
        if (l->is_gated) {
            memcpy(edge_up, from + l->outputs, (size_t)there * sizeof *edge);
            up_bias = FLOATS(edge_up);
        }
    }
    for (long r = 0; r < rows; r++) {
        Floats y = add_lanes(floats_f32(sums + r * PANELS * LANES), bias);
        if (l->is_gated && l->activation == CLAMPED_SWIGLU)
            y = clamped_swiglu(y, add_lanes(floats_f32(up + r * PANELS * LANES), up_bias));
        else
            y = activate(l->activation, y);
        if (l->is_gated && l->activation != CLAMPED_SWIGLU)
            y = mul_lanes(y, add_lanes(floats_f32(up + r * PANELS * LANES), up_bias));
        if (l->residual != NULL) {
            const ELEMENT *from =
                (const ELEMENT *)l->residual + (row + r) * l->residual_stride + first;
            if (there < LANES) memcpy(edge, from, (size_t)there * sizeof *edge), from = edge;
            y = add_lanes(y, FLOATS(from));
        }
        ELEMENT *to = there == LANES ? out + r * out_stride : edge;
        STORE(to, y);
        if (l->factor != 0) STORE(to, mul_lanes(FLOATS(to), splat(l->factor)));
        if (to == edge) memcpy(out + r * out_stride, edge, (size_t)there * sizeof *edge);
    }
}

#include "float8.h"
#include "low_rank.h"

/* sums [rows][PANELS][16] of some panels, from `first` on, each of `panel` bytes. */
TARGET INLINE void NAME(add_up)(const Linear *l, const int32_t *x, long x_stride, long row,
                                long rows, long first, long panels, long panel, const char *next,
                                Beside *beside, float *sums) {
    const int is_plain = l->weights != NULL && l->codes == NULL && l->quantized.float8 == CODED;
    if (beside != NULL && !is_plain) NAME(fetch_beside)(beside, LONG_MAX);
    if (l->weights == NULL)
        memset(sums, 0, (size_t)(rows * PANELS * LANES) * sizeof *sums);
    else if (l->codes != NULL)
        l->add_codes(l, row, rows, first, panels, next, sums);
    else if (l->quantized.float8 != CODED)
        NAME(panels_float8)(l, x, x_stride, rows, first, panels, next, sums);
    else
        NAME(panels)((const LANE *)((const char *)l->weights + first * panel), l->inputs / PAIR, x,
                     x_stride, rows, panels, (const LANE *)next, beside, sums);
}

/* One work item: up to l->block rows by l->columns panels. */
TARGET static void NAME(multiply)(void *job, long item) {
    Linear *l = job;
    const long lanes = l->inputs / PAIR, panels = (l->outputs + LANES - 1) / LANES;
    const long row = item % l->row_blocks * l->block,
               rows = l->rows - row < l->block ? l->rows - row : l->block;
    const long first = item / l->row_blocks * l->columns,
               last = first + l->columns < panels ? first + l->columns : panels;
    /* What to prefetch: this thread's next item starts there if threads alternate. */
    const long later = item + atomic_load_explicit(&team.threads, memory_order_relaxed),
               follows = later / l->row_blocks * l->columns,
               left = l->row_blocks * l->column_blocks - later;
    const char *after = l->after == NULL || left > 0 ? NULL : l->after - left * l->after_item;
    const size_t size = (size_t)(rows * PANELS * LANES);
#if CONVERTS
    const size_t converted = l->codes == NULL ? (size_t)(rows * l->inputs) : 0;
#else
    const size_t converted = 0;
#endif
    const size_t kept = l->out == NULL ? (size_t)(rows * l->columns * LANES) : 0;
    const size_t gathered = l->groups == NULL ? 0 : size;
    /* B of three parts, of gate and up, and A, for each group */
    const size_t listed = l->groups == NULL ? 0 : 7 * (size_t)l->groups->count * sizeof(Segment);
    float *sums = own_memory((2 * size + gathered + converted) * sizeof *sums + listed +
                             kept * sizeof(ELEMENT));
    float *up = sums + size, *own = up + size;
    const int32_t *x;
    long x_stride;
    if (sums == NULL) {
        l->failed = 1;
        return;
    }
#if CONVERTS
    float *floats = own + gathered;
    for (long r = 0; r < rows && converted; r++)
        for (long k = 0; k < l->inputs; k += LANES)
            store_f32(floats + r * l->inputs + k,
                      FLOATS((const ELEMENT *)l->x + (row + r) * l->x_stride + k));
    x = (const int32_t *)floats, x_stride = l->inputs;
#else
    x = (const int32_t *)((const ELEMENT *)l->x + row * l->x_stride), x_stride = l->x_stride / PAIR;
#endif
    const long panel = l->quantized.scales == NULL ? lanes * LANES * (long)sizeof(LANE)
                                                   : panel_bytes(&l->quantized);
    const char *weights = l->weights;
    const long out_stride = kept ? l->columns * LANES : l->out_stride;
    Segment *segments = (Segment *)(own + gathered + converted);
    ELEMENT *out = kept ? (ELEMENT *)((char *)segments + listed)
                        : (ELEMENT *)l->out + row * out_stride + first * LANES;
    for (long p = first; p < last; p += PANELS) {
        const long some = last - p < PANELS ? last - p : PANELS;
        const long then = p + PANELS < last ? p + PANELS : follows;
        const char *next = then + PANELS <= panels ? weights + then * panel
                           : p + PANELS < last     ? NULL
                                                   : after;
        Beside lines, *beside = NULL;
        if (l->groups != NULL)
            lines = NAME(beside)(l, row, rows, p, some, panels, segments), beside = &lines;
        NAME(add_up)(l, x, x_stride, row, rows, p, some, panel, next, beside, sums);
        if (l->is_gated) {
            const char *next_up =
                next == NULL ? NULL : next + (next == after ? PANELS : panels) * panel;
            NAME(add_up)(l, x, x_stride, row, rows, panels + p, some, panel, next_up, beside, up);
        }
        if (l->groups != NULL && p == first) await_lows(l);
        if (l->groups != NULL) NAME(add_adapters)(l, row, rows, p, some, sums, own);
        if (l->groups != NULL && l->is_gated)
            NAME(add_adapters)(l, row, rows, panels + p, some, up, own);
        /* All panels of some rows at once: they share cache lines of the result. */
        for (long r = 0; r < rows; r += TILE)
            for (long b = 0; b < some; b++) {
                const long at = (r * PANELS + b) * LANES;
                NAME(put)(l, row + r, rows - r < TILE ? rows - r : TILE, (p + b) * LANES,
                          sums + at, up + at, out + r * out_stride + (p + b - first) * LANES,
                          out_stride);
            }
    }
    if (!kept) return;
    const long block = item / l->row_blocks,
               end = last * LANES < l->outputs ? last * LANES : l->outputs;
    for (long r = 0; r < rows; r++) {
        const long at = (row + r) * l->column_blocks + block;
        Likeliest of = {out + r * out_stride, (ELEMENT *)l->best + at, l->indices + at, 0,
                        end - first * LANES};
        NAME(likeliest)(&of, 0);
        l->indices[at] += first * LANES;
    }
}

/* Packs one panel of W [N, K] for `multiply`. */
TARGET static void NAME(pack)(void *job, long panel) {
    const Pack *p = job;
    const long lanes = p->inputs / PAIR, first = panel * LANES;
    const int there = p->outputs - first < LANES ? (int)(p->outputs - first) : LANES;
    const ELEMENT *from = (const ELEMENT *)p->weight + first * p->inputs;
    LANE *to = (LANE *)p->to + panel * lanes * LANES;
#if CONVERTS
    for (long k = 0; k < lanes; k++)
        for (int n = 0; n < LANES; n++) to[k * LANES + n] = n < there ? from[n * p->inputs + k] : 0;
#else
    for (long k = 0; k < lanes; k += LANES) {
        const int columns = lanes - k < LANES ? (int)(lanes - k) : LANES;
        transpose(from + k * PAIR, p->inputs * (long)sizeof *from, there,
                  (uint32_t *)to + k * LANES, LANES, columns);
    }
#endif
}
