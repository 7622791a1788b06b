/* Recurrent states: what a step reads and writes. Rings are [blocks, places, ...] floats. */

#ifndef STATES_H
#define STATES_H

#include "ops.h"

#define MOST_TAPS 16     /* inputs of a convolution's kernel */
#define SOME_CHANNELS 256 /* that a thread takes at a time */
#define SOME_COLUMNS 64
#define SOME_HEADS 8 /* that read a latent together */

/*
 * Rows of a step, and a ring of their states. The states after token t of a sequence are in place
 * t % places of its block.
 */
#define STATES                                                                                     \
    const int64_t *tokens; /* [rows, length]: neighbours in the flat batch */                      \
    const int64_t *blocks; /* [rows] */                                                            \
    const int64_t *starts; /* [rows]: tokens computed before; 0: there is no state yet */          \
    long rows, length;                                                                             \
    float *ring;                                                                                   \
    long places, page /* floats from block to block */

typedef struct {
    STATES;              /* of [size - 1, channels] */
    const void *x;       /* [tokens, channels] */
    const float *weight; /* [size, channels] */
    const float *bias;   /* [channels], or NULL */
    float *out;          /* [rows, length, channels] */
    long x_stride, channels, size;
    int width; /* bytes of an element of x */
    int is_bfloat16, activation;
} Convolution;

typedef struct {
    STATES;                          /* of [heads, keys, values] */
    const float *q, *k, *v;          /* [rows, length, groups or heads, keys or values] */
    const float *decays;             /* [tokens, heads], or [tokens, heads, keys] if per_key */
    const float *factors;            /* [tokens, heads] */
    float *out;                      /* [tokens, heads, values] */
    long stride;                     /* of q, k and v: floats from token to token */
    long heads, groups, keys, values;
    float scale, eps; /* of q; eps of the norms of q and k, if not negative */
    int is_delta;     /* what the state says of k is subtracted from v */
    int per_key;
    int failed; /* there was no memory */
} Recurrence;

typedef struct {
    STATES;                      /* of [size, channels] */
    const float *x, *time;       /* [tokens, channels] */
    const float *rates;          /* [size, channels] */
    const float *into, *out_of;  /* [tokens, size] */
    float *out;                  /* [tokens, channels] */
    long into_stride, out_of_stride, channels, size;
    int failed; /* there was no memory */
} Scan;

typedef struct {
    const void *latents;    /* [places, size] */
    const int64_t *places;  /* [rows, stride]: of the keys of each row */
    const int64_t *lengths; /* [rows]: keys, at least one */
    const float *q;         /* [rows, heads, size] */
    float *out;             /* [rows, heads, rank] */
    long stride, rows, heads, size, rank;
    int width, is_bfloat16; /* of latents */
    float scale;
    int failed; /* there was no memory */
} Latent;

#endif
