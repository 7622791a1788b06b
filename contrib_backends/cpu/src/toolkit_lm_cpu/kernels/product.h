/* What a linear layer asks, and the activations that it may end with. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include "lanes.h"
#include "team.h"

#define PANELS 3
/* rows of an item: with a tile's weights they stay in the second-level cache */
#define BLOCK 64
/* lanes of a panel that are multiplied with all rows of an item, before the next */
#define CHUNK 1024
#define MOST_COLUMNS 24 /* panels of an item */
#define AMX_INPUTS 32   /* what the length of a sum by the tiles of AMX is a multiple of */
#define FEW 32768       /* multiplications that are not worth other threads */

/* module.c exports their numbers. */
#define ACTIVATIONS(A) A(PLAIN) A(RELU) A(SILU) A(GELU) A(GELU_TANH) A(QUICK_GELU)
#define NUMBER(name) name,
enum { ACTIVATIONS(NUMBER) };
#undef NUMBER

typedef struct {
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
    long columns; /* panels of an item */
    int failed;   /* there was no memory */
} Linear;

typedef struct {
    const void *weight; /* [outputs, inputs] */
    void *to;
    long inputs, outputs;
} Pack;

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
    l->row_blocks = (l->rows + BLOCK - 1) / BLOCK;
    const long share = panels * l->row_blocks / (4 * atomic_load(&team.threads)) / PANELS * PANELS;
    l->columns = share < PANELS ? PANELS : share > MOST_COLUMNS ? MOST_COLUMNS : share;
    l->column_blocks = (panels + l->columns - 1) / l->columns;
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
