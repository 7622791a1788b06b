/* The attention of a step, and its division into work items for threads. */

#ifndef STEP_H
#define STEP_H

#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "team.h"

#define TILE 16
#define SPAN 256      /* keys; whole tiles */
#define FEWEST 64     /* of MANY rows, those that a work item has where there are few of them */
#define FETCHED_TILES 4 /* tiles of a quantized cache that are prefetched before they are decoded */
#define FEW_BLOCKS 4  /* times 16 elements of values, that few rows are multiplied by at a time */
#define SEGMENT 128   /* tokens that one thread writes at a time */
#define MOST_SIZE 512 /* of a head */
#define LONG 65536    /* multiplications, and more, that are worth other threads */
#define LOG2_E 1.44269504f

enum { SEE_ALL, SEE_PAST, SEE_AROUND };

/* What a cache holds: elements, or codes of 8 bits. */
enum { AS_ELEMENTS, AS_INT8, AS_E4M3 };
#define INT8_ZERO 128 /* the code of 0 */
#define MOST_INT8 127.0f
#define MOST_E4M3 448.0f

typedef struct {
    /* queries [T, heads, D]; keys and values of the cache, or [T, kv_heads, D] */
    const void *queries, *keys, *values;
    void *out;                     /* [T, heads, D] */
    long query_stride, out_stride; /* elements from token to token */
    long key_stride, value_stride; /* from block to block, or from token to token */
    const int32_t *starts;         /* [rows + 1]: the tokens of each sequence */
    const int32_t *seen;           /* [rows]: its keys */
    const int64_t *first;          /* [rows]: position of its first token in this step */
    const int32_t *origins;        /* [rows]: the token of its first key, where nothing is cached */
    long rows, heads, kv_heads, size;
    /* of a head's elements, those in memory, where nothing is cached; zeros fill it up to `size` */
    long real;
    long group;           /* heads that share a KV head */
    const int32_t *table; /* [rows, table_stride] blocks; NULL: nothing is cached */
    long table_stride, block_tiles;
    float scale, soft_cap; /* soft_cap 0: none */
    int sight;             /* SEE_ALL, SEE_PAST, or SEE_AROUND, which a window alone bounds */
    long window;           /* 0: none */
    const float *sinks;    /* [heads] or NULL */
    /*
     * [heads, T, bias_keys], or [heads, bias_keys] by the offset of a key from its query,
     * or NULL
     */
    const float *bias;
    long bias_keys;
    long bias_center; /* where offset 0 stands; below 0: it is not by offset */
    /* [T, 2]: begin and end of each token's span, whose keys SEE_PAST sees too; or NULL */
    const int32_t *spans;
    int code; /* AS_ELEMENTS, or what the cache holds; its strides are then bytes */
    /* from block to block [kv_heads, block], `scale_page` floats apart; 0: one for all */
    const float *key_scales, *value_scales;
    long scale_page;
} Step;

/* Softmax state of a row over some of its keys. The weighted sum of values is kept apart. */
typedef struct {
    float top, total; /* the greatest score, times log2(e), and the sum of the weights */
} Sum;

/*
 * Values of two neighbouring tiles of a span: for 16 elements each a tile of AMX, whose rows are
 * `bytes` apart, and `next` lanes after it the tile of the next 16.
 */
typedef struct {
    const uint32_t *at;
    long bytes, next;
} Pair;

static const Sum EMPTY = {-INFINITY, 0};

typedef struct {
    const void *keys, *values; /* [T, kv_heads, D] */
    void *to_keys, *to_values; /* the cache */
    long key_stride, value_stride, key_page, value_page;
    const int64_t *slots; /* [T]; below 0: not stored */
    long tokens, kv_heads, size, block_size;
    int code; /* and the scales, as of Step */
    float *key_scales, *value_scales;
    long scale_page;
} Write;

/*
 * A work item: tokens of one sequence by the query heads of one KV head,
 * over all keys of the sequence, or over one span if spans are shared out.
 */
typedef struct {
    long row, kv_head, token, tokens;
    long span; /* -1: all */
} Work;

typedef struct {
    Work *work;
    long count;
    /* spans of each work, which are neighbours in `work`; 0: spans are not shared out */
    long most_spans;
    long most_rows; /* of a work */
    long longest;   /* most keys of a sequence */
    int is_long;
} Plan;

/* State of a step's attention while threads compute it. */
typedef struct {
    const Step *step;
    Plan plan;
    Sum *all;    /* [works][most_rows] where spans are shared out, and their weighted sums */
    float *sums; /* [works][most_rows][D] */
    int failed;
} Attention;

/* The range of keys that a token sees. Neither end decreases from token to token. */
static inline void visible(const Step *step, long row, long token, long *from, long *to) {
    const long position = step->first[row] + token;
    const long past =
        step->spans == NULL ? position + 1 : step->spans[2 * (step->starts[row] + token) + 1];
    *from = 0, *to = step->seen[row];
    if (step->sight == SEE_PAST && past < *to) *to = past;
    if (step->sight == SEE_AROUND && step->window && position + step->window < *to)
        *to = position + step->window;
    if (step->sight != SEE_ALL && step->window && position - step->window + 1 > 0)
        *from = position - step->window + 1;
    if (*from > *to) *from = *to;
}

/* `many`: rows of a work item at most. They are fewer where there are too few items for threads. */
static Plan make_plan(const Step *step, long many) {
    const long group = step->group, enough = 4 * atomic_load(&team.threads);
    long longest = 1, most_tokens, count, products = 0;
    Plan plan = {0};
    for (long row = 0; row < step->rows; row++) {
        const long tokens = step->starts[row + 1] - step->starts[row];
        if (step->table == NULL && tokens > longest) longest = tokens;
        if (step->seen[row] > plan.longest) plan.longest = step->seen[row];
        products += tokens * step->seen[row] * step->heads * step->size;
    }
    for (;; many /= 2) {
        most_tokens = many / group > longest ? many / group : longest;
        count = 0;
        for (long row = 0; row < step->rows; row++)
            count +=
                (step->starts[row + 1] - step->starts[row] + most_tokens - 1) / most_tokens *
                step->kv_heads;
        if (count >= enough || many <= FEWEST) break;
    }
    plan.is_long = products > LONG;
    plan.most_rows = most_tokens * group;
    if (step->table != NULL && plan.is_long && plan.longest > SPAN &&
        count < enough)
        plan.most_spans = (plan.longest + SPAN - 1) / SPAN;
    const long spans = plan.most_spans ? plan.most_spans : 1;
    plan.work = malloc(sizeof *plan.work * (size_t)(count * spans + 1));
    if (plan.work == NULL) return plan;
    for (long row = 0; row < step->rows; row++) {
        const long tokens = step->starts[row + 1] - step->starts[row];
        for (long token = 0; token < tokens; token += most_tokens)
            for (long kv_head = 0; kv_head < step->kv_heads; kv_head++)
                for (long span = 0; span < spans; span++)
                    plan.work[plan.count++] =
                        (Work){row, kv_head, token,
                               tokens - token < most_tokens ? tokens - token : most_tokens,
                               plan.most_spans ? span : -1};
    }
    return plan;
}

#endif
