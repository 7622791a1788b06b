/* What a layer does between products: norms and rotations. */

#ifndef OPS_H
#define OPS_H

#include "product.h"

#define SOME_ROWS 16 /* that a thread takes at a time */

typedef struct {
    const void *x;        /* [tokens, heads, size]; where there are no heads, one */
    const void *residual; /* as x, or NULL */
    void *sum;            /* as the residual, and maybe it: x + residual, where there is one */
    void *out;            /* [tokens, heads, size]; maybe x */
    /* [size]; a bias makes it a norm of x less its mean; without a weight there is but the sum */
    const void *weight, *bias;
    long x_stride, head_stride, residual_stride;
    long out_stride; /* from token to token; heads follow each other */
    long tokens, heads, size;
    float eps;
    int is_wide; /* the weight is float */
} Norm;

typedef struct {
    void *x;               /* [tokens, heads, head size] */
    const void *cos, *sin; /* [tokens, size]; sin is negative where the other half is subtracted */
    long x_stride, head_stride, angle_stride;
    long tokens, heads, size;
} Rotate;

typedef struct {
    const void *scores; /* [rows, size] */
    void *best;         /* [rows] */
    int64_t *indices;   /* [rows] */
    long stride, size;
} Likeliest;

typedef struct {
    const void *weights; /* panels */
    const int64_t *ids;  /* [tokens] */
    void *out;           /* [tokens, lanes] */
    long tokens, lanes;  /* of a panel */
    long width;          /* bytes of a lane: 2 or 4 */
} Embed;

/* Some tokens: a row of W each, out of its panel. */
static void embed_rows(void *job, long item) {
    const Embed *e = job;
    const long end = (item + 1) * SOME_ROWS < e->tokens ? (item + 1) * SOME_ROWS : e->tokens;
    for (long token = item * SOME_ROWS; token < end; token++) {
        const long at = e->ids[token] / LANES * e->lanes * LANES + e->ids[token] % LANES,
                   to = token * e->lanes;
        if (e->width == 4)
            for (long i = 0; i < e->lanes; i++)
                ((uint32_t *)e->out)[to + i] = ((const uint32_t *)e->weights)[at + i * LANES];
        else
            for (long i = 0; i < e->lanes; i++)
                ((uint16_t *)e->out)[to + i] = ((const uint16_t *)e->weights)[at + i * LANES];
    }
}

static void share_out_rows(long elements, long rows, Item item, void *job) {
    share_out_if(elements > 4 * FEW, (rows + SOME_ROWS - 1) / SOME_ROWS, item, job);
}

#endif
