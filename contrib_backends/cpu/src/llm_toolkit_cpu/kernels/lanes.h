/* Arithmetic on vectors of 16 lanes, 32 bits each. A lane holds one float, or a pair of bfloat16 that are multiplied and added together. */

#ifndef LANES_H
#define LANES_H

#include <immintrin.h>
#include <stdint.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16")))

/* 2^x, to float precision; 0 below the smallest normal number. The coefficients are log(2)^n / n!, for n from 7. */
AVX512 INLINE __m512 exp2_lanes(__m512 x) {
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    static const float coefficients[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    __m512 y = _mm512_set1_ps(1.5252734e-5f);
    for (int i = 0; i < 7; i++) y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(coefficients[i]));
    return _mm512_maskz_scalef_ps(normal | nan, y, whole);
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
