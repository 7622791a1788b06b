/*
 * Arithmetic on vectors of 16 lanes, 32 bits each.
 * A lane holds one float, or a pair of bfloat16 that are multiplied and added together.
 *
 * All instructions have the same names. What is compiled means those of the header
 * that was included last, lanes_avx2.h or lanes_avx512.h, which also define
 *   ISA(x)          x with the suffix of the instructions
 *   BASE            the instructions that may be used
 *   BASE_ROWS, BASE_SUMS
 *                   ROWS and SUMS, as of types.h, of kinds that need no other instructions
 */

#ifndef LANES_H
#define LANES_H

#include <immintrin.h>
#include <stdint.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define AVX_VNNI __attribute__((target("avx2,fma,f16c,avxvnni")))
#define AVX512_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16")))
#define AVX512_AMX                                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16,avx512vbmi,amx-tile," \
                          "amx-bf16")))
#define AMX_INT8                                                                                   \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni,amx-tile,amx-int8")))
/*
 * GCC is not told what the instructions for tiles read. What was written to memory before is there
 * from here on: all that others may reach, and what `from` points to, of which a local variable
 * would else be left out.
 */
#define TILES_READ(from) __asm__ volatile("" ::"r"(from) : "memory")

/* The numbers of float8 below the least normal one, in bfloat16. */
#define SMALL_FLOAT8(format)                                                                       \
    ((format) == E5M2 ? _mm_setr_epi16(0, 0x3780, 0x3800, 0x3840, 0, 0, 0, 0)                      \
                      : _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60))

#define Floats ISA(Floats) /* sixteen floats */
#define Words ISA(Words)   /* sixteen times 32 bits */
#define Mask ISA(Mask)     /* some of sixteen lanes */

/* From memory, and to it. */
#define floats_f32 ISA(floats_f32)
#define floats_f16 ISA(floats_f16)
#define floats_masked ISA(floats_masked) /* (mask, from); elsewhere zeros, and nothing is read */
#define store_f32 ISA(store_f32)
#define store_f16 ISA(store_f16)
#define load_32 ISA(load_32)
#define load_f16 ISA(load_f16) /* as floats */
#define load_u16 ISA(load_u16) /* with zeros above */
#define store_32 ISA(store_32)
#define store_u16 ISA(store_u16) /* words below 2^16 */
/* (to, from, odd): sixteen elements of 16 bits to the high or the low halves of lanes */
#define store_halves ISA(store_halves)
/* (from, format): sixteen pairs of finite float8 as pairs of bfloat16, which is exact */
#define pairs_float8 ISA(pairs_float8)
#define bytes_16 ISA(bytes_16) /* four lanes, again and again */
#define store_codes ISA(store_codes) /* words from -128 to 127, in 8 bits */
#define transpose ISA(transpose)

/* The same in all lanes. */
#define splat ISA(splat)
#define splat_word ISA(splat_word)
#define splat_64 ISA(splat_64)

/* Lane by lane. */
#define add_lanes ISA(add_lanes)
#define sub_lanes ISA(sub_lanes)
#define mul_lanes ISA(mul_lanes)
#define div_lanes ISA(div_lanes)
#define min_lanes ISA(min_lanes)   /* where one is NaN, the second */
#define max_lanes ISA(max_lanes)   /* likewise */
#define fma_lanes ISA(fma_lanes)   /* x y + z */
#define fnma_lanes ISA(fnma_lanes) /* z - x y */
#define abs_lanes ISA(abs_lanes)
#define rounded ISA(rounded) /* the same; a product is not made one with what is added to it */
#define round_lanes ISA(round_lanes) /* to nearest, ties to even */
#define ldexp_lanes ISA(ldexp_lanes) /* (mask, x, n): x 2^n, for n from -126 on; elsewhere zeros */
#define or_words ISA(or_words)
#define and_words ISA(and_words)
#define xor_words ISA(xor_words)
#define add_words ISA(add_words)
#define max_words ISA(max_words) /* of numbers with a sign */
#define left_16 ISA(left_16) /* shifted */
#define look_up ISA(look_up) /* (bytes_16, words): bytes by indices below 16 */
#define right_4 ISA(right_4)
/* Halves of lanes, 16 bits each, signed. */
#define sub_halves ISA(sub_halves)           /* the nearest there is */
#define mul_high_halves ISA(mul_high_halves) /* (x y + 2^14) >> 15 */
#define right_8_halves ISA(right_8_halves)
/* Four times 128 bits, each by itself. */
#define pack_halves ISA(pack_halves) /* those of x and y as 8 bits, the nearest there is */
#define low_32 ISA(low_32)           /* x0 y0 x1 y1, of 32 bits */
#define high_32 ISA(high_32)         /* x2 y2 x3 y3 */
#define low_64 ISA(low_64)           /* x0 y0, of 64 bits */
#define high_64 ISA(high_64)
#define left_20 ISA(left_20)
#define left_24 ISA(left_24)
#define right_8 ISA(right_8)
#define right_16 ISA(right_16)
#define as_words ISA(as_words) /* the same bits */
#define as_floats ISA(as_floats)
#define floats_of ISA(floats_of) /* the same numbers, to nearest */
#define words_of ISA(words_of)   /* likewise; ties to even */

/* Comparisons. */
#define less ISA(less)
#define not_less ISA(not_less) /* NaN is not */
#define equal ISA(equal)
#define unordered ISA(unordered)       /* NaN */
#define select_lanes ISA(select_lanes) /* (mask, x, y): x, elsewhere y */
#define mask_bits ISA(mask_bits)
#define lanes_between ISA(lanes_between) /* from..to - 1, as far as there are any */

/* Across lanes. */
#define reduce_add ISA(reduce_add)
#define reduce_max ISA(reduce_max)
#define first_lane ISA(first_lane)

/* functions.h */
#define floats_bf16 ISA(floats_bf16)
#define store_split ISA(store_split)
#define dot_f32 ISA(dot_f32)
#define dot_split ISA(dot_split)
#define exp2_lanes ISA(exp2_lanes)
#define tanh_lanes ISA(tanh_lanes)
#define erf_lanes ISA(erf_lanes)
#define floats_float8 ISA(floats_float8)
#define activate ISA(activate)
#define clamped_swiglu ISA(clamped_swiglu)
#define scales_at ISA(scales_at)
#define Levels ISA(Levels)
#define levels_of ISA(levels_of)
#define levels_at ISA(levels_at)
#define transpose_quads ISA(transpose_quads)
#define sum_quads ISA(sum_quads)

#endif
