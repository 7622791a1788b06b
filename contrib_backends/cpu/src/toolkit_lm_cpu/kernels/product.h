/* Arguments of a linear layer, and its activations. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include <limits.h>

#include "lanes.h"
#include "team.h"

#define PANELS 3
/* rows of an item: with a tile's weights they stay in the second-level cache */
#define BLOCK 64
/* lanes of a panel that are multiplied with all rows of an item, before the next */
#define CHUNK 1024
#define MOST_COLUMNS 24 /* panels of an item */
#define CODE_ROWS 4     /* of a tile of codes.h, at most */
#define MANY_ROWS 256   /* of an item whose weights are decoded, or unpacked for the tiles of AMX */
#define MOST_UNPACKED 2048 /* codes of a panel that are unpacked at once; a group is one of them */
#define AMX_INPUTS 32   /* what the length of a sum by the tiles of AMX is a multiple of */
#define TILE_ROWS 16    /* of x, which the tiles of AMX multiply at a time */
#define FEW 32768       /* multiplications that are not worth other threads */

#define PIECE 64        /* lanes that a tile multiplies between two fetches of what lies beside */
#define DECODED 512     /* inputs of float8 that are decoded at a time */

/* Whether weights are codes, or floats of 8 bits. */
enum { CODED, E4M3, E5M2 };

/* module.c exports their numbers. */
#define ACTIVATIONS(A) A(PLAIN) A(RELU) A(SILU) A(GELU) A(GELU_TANH) A(QUICK_GELU) A(CLAMPED_SWIGLU)
#define NUMBER(name) name,
enum { ACTIVATIONS(NUMBER) };
#undef NUMBER

/*
 * How the weights of a product are quantized. A weight is its code, or the value of its code, times
 * its group's scale, less its group's offset.
 */
typedef struct {
    /*
     * [N / 16][scaled groups][16], where all or one are scaled: float16 if is_half, else float;
     * NULL: weights are elements
     */
    const void *scales;
    const float *offsets; /* as scales, or NULL: all are 0 */
    const uint8_t *values; /* [16]: of codes of 4 bits, plus 128; or NULL */
    /*
     * Of 4 bits, where groups of codes have levels: codes of 8 bits of the output's scale.
     * [N / 16][groups of codes][4][4] ratios; else NULL
     */
    const int8_t *ratios;
    const int16_t *levels; /* [16]: less a zero, times a ratio, divided by 2^15, is a level */
    const int16_t *zeros;  /* as ratios, or NULL: all are 0 */
    const int32_t *order; /* [inputs]: the place in x of each input, or NULL: the same */
    long scaled;         /* groups that have a scale of their own; 1: an output has one */
    long groups, group;   /* groups of a row of x, and codes of a group */
    long part;            /* codes that have levels in common */
    int bits;             /* that a code has in memory: 4 or 8 */
    int is_half;
    int kernel;           /* its number in CODE_KERNELS of module.c */
    int float8;           /* E4M3 or E5M2: of float8.h, which has no codes of x; or CODED */
} Quantized;

/* B of an adapter, of some panels of a product; `last` 0: there is none. */
typedef struct {
    const void *high; /* panels: [last - first][rank / PAIR][16] lanes */
    long first, last; /* panels of the product */
    long at, rank;    /* which outputs of A it takes: multiples of 16 */
} LowRankPart;

/* A and B of an adapter, for one product. */
typedef struct {
    int type;        /* number in KERNELS of module.c of A's product */
    const void *low; /* panels of A */
    long inputs;
    long rank; /* outputs of A: a multiple of 16 */
    LowRankPart first, second, third;
} LowRank;

/* By group of rows; NULL: its adapter changes nothing here. */
typedef struct LowRanks LowRanks;
struct LowRanks {
    const LowRanks *next; /* of the model's next product, whose A is fetched ahead; or NULL */
    long count;
    const LowRank *of[];
};

/* The rows of a step that have an adapter. */
typedef struct {
    const int64_t *rows; /* [count], ascending */
    long count;
    float scale;
    void *low; /* memory for A x times the scale: [count, rank], of the greatest rank */
} RowGroup;

typedef struct {
    long count;
    RowGroup of[];
} RowGroups;

/* What is fetched while a product computes. */
typedef struct {
    const char *from;
    long bytes;
} Segment;

typedef struct {
    Segment *segments;
    long count;
    long segment, at; /* the next line's, in bytes */
    long lines;       /* at a time: all are fetched when the product ends */
} Beside;

typedef struct Linear Linear;
/* CODES(panels) of codes.h */
typedef void (*CodePanels)(const Linear *l, long row, long rows, long first, long panels,
                           const char *next, float *sums);

struct Linear {
    const void *x;        /* [rows, inputs] */
    const void *weights;  /* panels */
    const void *bias;     /* [outputs], where it is gated twice that; or NULL */
    const void *residual; /* [rows, outputs] or NULL */
    /* [rows, outputs]; NULL: of each row, and of the outputs of an item, the greatest is wanted */
    void *out;
    void *best;       /* these, [rows, column blocks] */
    int64_t *indices; /* and where they are */
    long x_stride, residual_stride, out_stride;
    long rows, inputs, outputs;
    int activation, is_gated;
    float factor; /* of the result as it is stored, where there is no residual; 0: none */
    long row_blocks, column_blocks;
    long block, columns; /* rows, 0: those of cut_linear, and panels of an item, at most */
    int failed;   /* there was no memory */
    Quantized quantized;
    void *codes; /* memory for the codes of x, as `codes_of` has it; or NULL */
    long tiled;  /* rows of x, from the first on, whose codes lie as tiles of AMX load them */
    CodePanels add_codes;
    /*
     * panels of the product after this one, which threads prefetch with the last of this one, and
     * bytes from where a thread begins there to where the next one does; or NULL
     */
    const char *after;
    long after_item;
    const RowGroups *groups; /* rows with adapters, or NULL: there are none */
    const LowRanks *low_ranks;
    Item multiply_low, multiply; /* of A x, and of the product with B A x */
    long lows;                   /* items of A x, which come before the others */
    long low_width;              /* panels of such an item */
    _Atomic long lows_done;
};

/* Of grouped.h: rows of several weights, those of each together. */
typedef struct {
    const int32_t *ends; /* [count]: where the rows of each weight end, ascending */
    const void *biases;  /* [count, outputs], where it is gated twice that; or NULL */
    long bias_bytes;     /* from one weight's to the next's */
    long element;        /* bytes of an element */
    const void *x;       /* [rows, inputs] */
    void *out;           /* [rows, outputs] */
    void *codes;         /* memory for the codes of all rows, or NULL */
    long code_bytes;     /* of the codes of a row */
    long x_stride, inputs, outputs;
    int activation, is_gated;
} GroupedRows;

/* Of experts.h: tokens, and the experts that each goes to. */
typedef struct {
    const void *x;         /* [tokens, hidden] */
    const int64_t *chosen; /* [tokens, top]: the numbers of experts */
    const float *weights;  /* [tokens, top] */
    void *out;             /* [tokens, hidden] */
    long x_stride, tokens, top;
    long first; /* the number of the first expert that is held */
    long hidden, inner, element;
    const void *up_biases, *down_biases; /* as of GroupedRows, and the next two */
    long up_bias_bytes, down_bias_bytes;
    void *rows, *between; /* memory for [tokens * top, hidden] and [tokens * top, inner] */
    void *codes;          /* memory for the codes of either, or NULL */
    long up_code_bytes, down_code_bytes;
    int activation, is_gated;
    const long *places; /* [tokens, top]: in `rows`, or ELSEWHERE */
} Experts;

/* Items of A x of a group. */
static inline long low_items(const Linear *l, long g) {
    const LowRank *a = l->low_ranks->of[g];
    if (a == NULL) return 0;
    return (l->groups->of[g].count + BLOCK - 1) / BLOCK *
           ((a->rank / LANES + l->low_width - 1) / l->low_width);
}

/* Items of A x of all groups. */
static inline long count_lows(Linear *l) {
    long items = 0;
    for (long g = 0; g < l->groups->count; g++) items += low_items(l, g);
    return items;
}

/*
 * An item of a product with adapters. Threads claim items in order: who awaits A x has no item of
 * it, and other threads have begun all of them.
 */
static void multiply_adapted(void *job, long item) {
    Linear *l = job;
    if (item >= l->lows) {
        l->multiply(l, item - l->lows);
        return;
    }
    l->multiply_low(l, item);
    atomic_fetch_add(&l->lows_done, 1);
}

static void await_lows(Linear *l) {
    while (!SPIN_UNTIL(atomic_load(&l->lows_done) == l->lows)) sched_yield();
}

/* The place of the first row of a group that is not before `row`. */
static inline long place_in(const RowGroup *group, long row) {
    long low = 0, high = group->count;
    while (low < high) {
        const long middle = (low + high) / 2;
        if (group->rows[middle] < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The rows of a group among some rows, from `row` on: their places in it. */
typedef struct {
    long begin, count;
} Places;

static inline Places rows_in(const RowGroup *group, long row, long rows) {
    if (group->count == 0) return (Places){0, 0};
    /* All mostly are. */
    if (group->rows[0] >= row && group->rows[group->count - 1] < row + rows)
        return (Places){0, group->count};
    const long begin = place_in(group, row);
    return (Places){begin, place_in(group, row + rows) - begin};
}

/*
 * Rows of x as codes: x is about its code times its group's scale. Those of `tiled` rows, a
 * multiple of 16, are [rows / 16][groups * group / tile_codes][16][tile_codes].
 */
typedef struct {
    int8_t *codes;  /* [rows][groups][group], from -127 to 127; past the last input, 0 */
    float *scales;  /* [rows][groups] */
    int32_t *sums;  /* [rows][groups], of codes */
} Codes;

static inline Codes codes_of(const Linear *l) {
    const long groups = l->rows * l->quantized.groups, codes = groups * l->quantized.group;
    Codes c = {l->codes, (float *)((char *)l->codes + codes), NULL};
    c.sums = (int32_t *)(c.scales + groups);
    return c;
}

/* Codes of x in a row of a tile of AMX. */
static inline long tile_codes(const Quantized *q) {
    return q->group % 64 == 0 ? 64 : q->group % 32 == 0 ? 32 : LANES;
}

/* Ratios of a panel. */
static inline long panel_ratios(const Quantized *q) {
    return q->groups * q->group / q->part * LANES;
}

static inline long panel_bytes(const Quantized *q) {
    return q->groups * q->group * LANES * q->bits / 8;
}

/* What a tile of codes.h is made of. */
typedef struct {
    const Quantized *weight;
    const int8_t *codes;          /* of x, [rows][groups][group] */
    const float *x_scales;        /* [rows][groups] */
    const int32_t *sums;          /* likewise */
    const char *panels;           /* one after the other */
    long first;                   /* the number of the first scale, and offset, of theirs */
    long first_ratio, ratio_ahead;
    const char *ahead;            /* to prefetch */
    long first_ahead;             /* likewise: of the panels that follow */
    float *out;                   /* [rows][PANELS][16] */
} Tile;
typedef void (*TileProduct)(const Tile *t);


typedef struct {
    const void *weight; /* [outputs, inputs] */
    void *to;
    long inputs, outputs;
} Pack;

typedef struct {
    const uint8_t *codes; /* [outputs, inputs] */
    const int32_t *order; /* [inputs], or NULL */
    uint32_t *to;
    long outputs, inputs, width; /* width: codes of a row of a panel */
    int bits, added;             /* bits of a code in memory, and what is added to it */
    int has_levels;
    int failed;                  /* there was no memory */
} PackCodes;

/*
 * What is fetched of the next PANELS panels with each lane of a tile: so many lines, which begin so
 * many bytes apart. A lane of PANELS panels has 192 bytes, and all groups of rows that a block is
 * multiplied in fetch them together, each as much: of many groups each fetches a line in part that
 * another fetches too. Where panels are taken one at a time, each fetches a third of its group's.
 */
typedef struct {
    int lines, apart;
} Fetch;

#define FETCH(groups, lines) {lines, PANELS * 64 / (groups) / (lines)}
#define FETCH_MANY(panels)                                                                         \
    FETCH(3 * panels, 1), FETCH(4 * panels, 1), FETCH(5 * panels, 1), FETCH(6 * panels, 1),        \
        FETCH(7 * panels, 1), FETCH(8 * panels, 1), FETCH(9 * panels, 1), FETCH(10 * panels, 1),   \
        FETCH(11 * panels, 1), FETCH(12 * panels, 1), FETCH(13 * panels, 1),                       \
        FETCH(14 * panels, 1), FETCH(15 * panels, 1), FETCH(16 * panels, 1)
/* [whether PANELS panels are taken at once][groups of rows: BLOCK rows by 4 at least] */
static const Fetch FETCHES[2][BLOCK / 4 + 1] = {
    {{0, 0}, FETCH(PANELS, 1), FETCH(2 * PANELS, 1), FETCH_MANY(PANELS)},
    {{0, 0}, FETCH(1, 3), FETCH(2, 2), FETCH_MANY(1)},
};

/* Items small enough for all threads to have some, and as large as that allows. */
static void cut_linear(Linear *l) {
    const long panels = (l->outputs + LANES - 1) / LANES;
    if (l->quantized.float8 != CODED)
        l->block = MANY_ROWS;
    else if (l->block == 0)
        l->block = BLOCK;
    l->row_blocks = (l->rows + l->block - 1) / l->block;
    const long share = panels * l->row_blocks / (4 * atomic_load(&team.threads)) / PANELS * PANELS;
    l->columns = share < PANELS ? PANELS : share > MOST_COLUMNS ? MOST_COLUMNS : share;
    l->column_blocks = (panels + l->columns - 1) / l->columns;
}

/* Has a product prefetch where the next one begins, whose weights are elements of that size. */
static void fetch_after(Linear *l, Linear *next, long element) {
    cut_linear(next);
    l->after = next->weights;
    l->after_item = next->columns * LANES * next->inputs * element;
}

/* One that is cut. */
static void share_out_items(Linear *l, Item multiply) {
    if (l->rows > 0)
        share_out_if(l->rows * l->inputs * l->outputs > FEW, l->row_blocks * l->column_blocks,
                     multiply, l);
}

static void share_out_linear(Linear *l, Item multiply) {
    cut_linear(l);
    share_out_items(l, multiply);
}

#endif
