/* What a layer does between products: norms and rotations. */

#ifndef OPS_H
#define OPS_H

#include <string.h>

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
    const void *factor;    /* of the sum; or NULL */
    int is_wide;           /* the weight is float */
    const Linear *product; /* of quantized weights, whose x is `out`; or NULL */
} Norm;

typedef struct {
    void *x;               /* [tokens, heads, head size] */
    const void *cos, *sin; /* [tokens, size]; sin is negative where the other half is subtracted */
    long x_stride, head_stride, angle_stride;
    long tokens, heads, size;
} Rotate;

typedef struct {
    void *x;        /* [rows, size] */
    const void *by; /* [rows, size] */
    long x_stride, by_stride, rows, size;
} Times;

typedef struct {
    const void *scores; /* [rows, size] */
    void *best;         /* [rows] */
    int64_t *indices;   /* [rows] */
    long stride, size;
} Likeliest;

typedef struct {
    void *x; /* [rows, size] */
    long stride, size;
    float cap;
} SoftCap;

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

/* Packs one panel of codes for codes.h. Codes of no output and no input are zeros. */
static void pack_panel_of_codes(void *job, long panel) {
    PackCodes *p = job;
    const long inputs = p->inputs, each = p->bits == 8 ? 1 : 2, lanes = p->width / 4 / each;
    const uint32_t ones = 0x01010101, more = (uint32_t)p->added * ones;
    uint8_t *row = own_memory((size_t)p->width);
    uint32_t *to = p->to + panel * lanes * LANES;
    if (row == NULL) {
        p->failed = 1;
        return;
    }
    for (long n = 0; n < LANES; n++) {
        const long output = panel * LANES + n;
        memset(row, (p->bits == 8 ? 128 : 8) - p->added, (size_t)p->width);
        if (output < p->outputs) {
            const uint8_t *from = p->codes + output * inputs;
            if (p->order == NULL)
                memcpy(row, from, (size_t)inputs);
            else
                for (long k = 0; k < inputs; k++) row[k] = from[p->order[k]];
        }
        if (p->has_levels) {
            const uint8_t added = (uint8_t)p->added;
            uint8_t *bytes = (uint8_t *)to + (n % 4 * 4 + n / 4) * 16;
            for (long k = 0; k < p->width; k += 32, bytes += 4 * 64)
                for (long i = 0; i < 16; i++)
                    bytes[i] = (uint8_t)((row[k + i] + added) | (row[k + 16 + i] + added) << 4);
            continue;
        }
        for (long k = 0; k < lanes; k++) {
            uint32_t codes[2] = {0, 0};
            memcpy(codes, row + k * 4 * each, (size_t)(4 * each));
            to[k * LANES + n] = codes[0] + more;
            if (each == 2) to[k * LANES + n] |= (codes[1] + more) << 4;
        }
    }
}

static void share_out_rows(long elements, long rows, Item item, void *job) {
    share_out_if(elements > 4 * FEW, (rows + SOME_ROWS - 1) / SOME_ROWS, item, job);
}

#endif
