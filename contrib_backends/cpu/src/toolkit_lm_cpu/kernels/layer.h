/*
 * A decoder layer of the usual kind in one call: norm, queries, keys and values, norms of heads, rotation, cache, attention, output; norm,
 * gated feed-forward. The residual travels beside. Each part is what it is alone.
 */

#ifndef LAYER_H
#define LAYER_H

#include "ops.h"
#include "product.h"
#include "step.h"

typedef struct {
    const void *weight;
    float eps;
    int is_wide;
} NormPart;

typedef struct {
    const void *weights, *bias;
} LinearPart;

typedef struct {
    int type, attention_type; /* their numbers in module.c */
    long element;             /* bytes */
    long hidden, inner, heads, kv_heads, head_size;
    int activation;
    NormPart input, post, queries, keys; /* weight NULL: there is none */
    LinearPart qkv, out, gate_up, down;
} Layer;

typedef struct {
    void *x;        /* [tokens, hidden]: in, and unless `y` is another, out */
    void *residual; /* in and out; where nothing is added yet, x */
    void *y;
    int adds; /* x is to be added to the residual */
    long tokens;
    void *workspace; /* [tokens][2 hidden + 2 heads + 2 kv_heads + inner], elements of each */
    const void *cos, *sin;
    long angle_stride, angle_size;
} LayerStep;

#endif
