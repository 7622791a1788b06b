/*
 * A decoder layer of a known kind in one call: norm, queries, keys and values, norms of heads,
 * rotation, cache, attention, output; norm, gated feed-forward. What attention and the feed-forward
 * give may have a factor and a norm before it is added. The residual travels beside. Each part is
 * what it is alone. Where there is no feed-forward, the call ends with what it would take. Where
 * the sum has a factor, the call ends with the sum, to which a gated embedding may be added first.
 */

#ifndef LAYER_H
#define LAYER_H

#include "ops.h"
#include "product.h"
#include "step.h"

typedef struct {
    const void *weight; /* NULL: there is no norm */
    long size;
    float eps;
    int is_wide;
} NormPart;

typedef struct {
    const void *weights, *bias; /* weights NULL: there is no such product */
    Quantized quantized;
} LinearPart;

typedef struct {
    int type, attention_type; /* their numbers in KERNELS of module.c */
    long element;             /* bytes */
    long hidden, inner, heads, kv_heads, head_size;
    /* of qkv: queries, keys and values; or without values, which are the keys as they come; or
     * queries alone, of keys that another layer writes */
    long projected;
    int activation;
    float factor;                        /* of what `out` and `down` give; 0: none */
    NormPart input, post, queries, keys; /* queries and keys: of each head, or of all together */
    NormPart values;                     /* of each head */
    NormPart attended, fed;              /* of what `out` and `down` give */
    LinearPart qkv, out, gate_up, down;
    const void *scalar; /* factor of the sum with what `down` gives; NULL: it is not summed yet */
    /* To the sum comes the norm `gated` of what `projection` gives of activation(gate(sum)) times
     * the embedding; weights NULL: nothing does. */
    LinearPart gate, projection;
    NormPart gated;
    long embedding_size;
    void *key_pages, *value_pages; /* the cache, as of Write and Step */
    long key_page, value_page, block_tiles;
    int code;
    void *key_scales, *value_scales;
    long scale_page;
    float scale, soft_cap;
    long window;
    const float *sinks; /* as of Step */
} Layer;

typedef struct {
    void *x;        /* [tokens, hidden]: in, and unless `y` is another, out */
    void *residual; /* in and out; where nothing is added yet, x */
    void *y;
    int adds; /* x is to be added to the residual */
    long tokens;
    /*
     * [tokens][2 hidden + 2 heads + 2 kv_heads + the larger of inner and the embedding], elements
     * of each; and then the memory for codes of a product, the largest of all
     */
    void *workspace;
    const void *cos, *sin;
    long angle_stride, angle_size;
    const int64_t *slots; /* as of Write */
    const void *embedding; /* [tokens, embedding_size] */
    long embedding_stride;
    const RowGroups *groups; /* rows with adapters, or NULL: there are none */
    const LowRanks *qkv, *out, *gate_up, *down, *gate, *projection; /* NULL: none changes it */
} LayerStep;

#endif
