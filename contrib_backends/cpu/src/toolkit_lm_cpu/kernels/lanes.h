/* Arithmetic on vectors of 16 lanes, 32 bits each. A lane holds one float, or a pair of bfloat16 that are multiplied and added together. */

#ifndef LANES_H
#define LANES_H

#include <immintrin.h>
#include <stdint.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16")))

/* 2^x; 0 below the smallest normal number. 7 terms give float precision, 5 more than bfloat16's. The coefficients are log(2)^n / n!. */
AVX512 INLINE __m512 exp2_lanes(__m512 x, const int terms) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    static const float coefficients[] = {1.0f,          6.9314718e-1f, 2.4022651e-1f, 5.5504109e-2f,
                                         9.6181291e-3f, 1.3333558e-3f, 1.5403530e-4f, 1.5252734e-5f};
    __m512 y = _mm512_set1_ps(coefficients[terms]);
    for (int n = terms - 1; n >= 0; n--) y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(coefficients[n]));
    return _mm512_maskz_scalef_ps(normal | nan, y, whole);
}

/* rows x columns lanes, 16 x 16 at most, from_bytes from row to row, to columns x 16, to_stride lanes from row to row; past `rows`, zeros. */
AVX512 INLINE void transpose(const void *from, long from_bytes, int rows, uint32_t *to, long to_stride, int columns) {
    const __mmask16 there = (__mmask16)(0xffffu >> (LANES - columns));
    __m512i a[LANES], b[LANES];
    for (int r = 0; r < LANES; r++)
        a[r] = r < rows ? _mm512_maskz_loadu_epi32(there, (const char *)from + r * from_bytes) : _mm512_setzero_si512();
    for (int r = 0; r < LANES; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < LANES; r += 4)
        for (int i = 0; i < 2; i++) {
            a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + 2 + i]);
            a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + 2 + i]);
        }
    /* a[4 g + c] holds columns c, 4 + c, 8 + c and 12 + c of rows 4 g to 4 g + 3, 128 bits each. */
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        b[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
        b[8 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        b[4 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    for (int c = 0; c < columns; c++) _mm512_storeu_si512(to + c * to_stride, b[c]);
}

/* Sixteen elements as lanes, and back. */

AVX512 INLINE __m512i load_f32(const void *from) { return _mm512_loadu_si512(from); }

AVX512 INLINE __m512 dot_f32(__m512 sum, __m512i x, __m512i y) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), sum);
}

AVX512 INLINE void store_f32(void *to, __m512 x) { _mm512_storeu_ps(to, x); }

AVX512_BF16 INLINE __m512 dot_bf16(__m512 sum, __m512i x, __m512i y) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }

AVX512_BF16 INLINE void store_bf16(void *to, __m512 x) { _mm256_storeu_si256(to, (__m256i)_mm512_cvtneps_pbh(x)); }

#endif
