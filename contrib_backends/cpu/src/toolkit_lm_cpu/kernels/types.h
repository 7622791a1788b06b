/*
 * The kinds of elements that kernels are compiled for, one column each, and the words that
 * layer_ops.h, linear.h and attention.h say for them. module.c includes kernels.h once for each
 * column, and the first three columns once for AVX2 and once for AVX-512.
 *
 *   FLOAT32, FLOAT16
 *   SPLIT           bfloat16 without instructions for it: the halves of a pair, one after the
 *                   other, as floats
 *   BF16            bfloat16 by AVX512-BF16
 *   TILES           bfloat16 by the tiles of AMX
 *
 *   ELEMENT         the type
 *   LANE, PAIR      what a lane of keys, values and panels is in memory, and its number of
 *                   elements: 1, or 2 that are multiplied and added together
 *   WEIGHT          the type of attention's weights before they meet values: as wide as a lane's
 *                   elements are in registers
 *   NAME(x)         x with the column's suffix
 *   TARGET          the instructions that may be used
 *   LOAD, DOT       sixteen lanes from memory, and their products with others, as in lanes.h
 *   FLOATS          sixteen elements from memory, as floats
 *   STORE, STORE_WEIGHTS
 *   TERMS           precision of attention's weights, as of exp2_lanes
 *   ROWS            rows of a product, at most. Where the sums of its rows by PANELS panels do not
 *                   fit into registers, a product has one panel
 *   MANY            rows of attention that share what is read of a span
 *   SUMS            sums, of sixteen lanes each, that fit into registers
 *   CONVERTS        whether x meets weights as floats, and holds none. A lane is then half as wide
 *                   in memory
 *   AMX             whether products are made by tiles; K is then a multiple of AMX_INPUTS
 */

#ifndef TYPES_H
#define TYPES_H

/* Of the columns, the one that TYPE names. */
#define OF(...) COLUMN(TYPE, __VA_ARGS__)
#define COLUMN(type, ...) COLUMN_OF(type, __VA_ARGS__)
#define COLUMN_OF(type, ...) COLUMN_##type(__VA_ARGS__)
#define COLUMN_FLOAT32(a, b, c, d, e) a
#define COLUMN_FLOAT16(a, b, c, d, e) b
#define COLUMN_SPLIT(a, b, c, d, e) c
#define COLUMN_BF16(a, b, c, d, e) d
#define COLUMN_TILES(a, b, c, d, e) e

#define NAME(x) OF(ISA(x##_f32), ISA(x##_f16), ISA(x##_split), x##_bf16, x##_amx)
/*                       FLOAT32     FLOAT16     SPLIT        BF16         TILES */
#define TARGET        OF(BASE,       BASE,       BASE,        AVX512_BF16, AVX512_AMX)
#define ELEMENT       OF(float,      uint16_t,   uint16_t,    uint16_t,    uint16_t)
#define LANE          OF(float,      uint16_t,   uint32_t,    uint32_t,    uint32_t)
#define PAIR          OF(1,          1,          2,           2,           2)
#define WEIGHT        OF(float,      float,      uint16_t,    uint16_t,    uint16_t)
#define LOAD          OF(load_32,    load_f16,   load_32,     load_32,     load_32)
#define DOT           OF(dot_f32,    dot_f32,    dot_split,   dot_bf16,    dot_bf16)
#define FLOATS        OF(floats_f32, floats_f16, floats_bf16, floats_bf16, floats_bf16)
#define STORE         OF(store_f32,  store_f16,  store_split, store_bf16,  store_bf16)
#define STORE_WEIGHTS OF(store_f32,  store_f32,  store_split, store_bf16,  store_bf16)
#define TERMS         OF(7,          7,          5,           5,           5)
#define ROWS          OF(BASE_ROWS,  BASE_ROWS,  BASE_ROWS,   BASE_ROWS,   32)
#define MANY          OF(64,         64,         64,         64,          256)
#define SUMS          OF(BASE_SUMS,  BASE_SUMS,  BASE_SUMS,   BASE_SUMS,   0)
#define CONVERTS      OF(0,          1,          0,           0,           0)
#define AMX           OF(0,          0,          0,           0,           1)

#endif
