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
#define FEW 32768       /* multiplications that are not worth other threads */

enum { PLAIN, RELU, SILU, GELU, GELU_TANH, QUICK_GELU };

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
    const void *from; /* [outputs, inputs] */
    void *to;
    long inputs, outputs;
} Pack;

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
