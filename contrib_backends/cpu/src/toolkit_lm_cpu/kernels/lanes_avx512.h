/* The names of lanes.h by AVX-512; and what AVX512-BF16 adds. */

#undef ISA
#undef BASE
#undef BASE_ROWS
#undef BASE_SUMS
#define ISA(x) x##_avx512
#define BASE AVX512
#define BASE_ROWS 8
#define BASE_SUMS 24

typedef __m512 Floats;
typedef __m512i Words;
typedef __mmask16 Mask;

BASE INLINE Floats floats_f32(const void *from) { return _mm512_loadu_ps(from); }
BASE INLINE Floats floats_f16(const void *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
BASE INLINE Floats floats_masked(Mask mask, const void *from) {
    return _mm512_maskz_loadu_ps(mask, from);
}
BASE INLINE void store_f32(void *to, Floats x) { _mm512_storeu_ps(to, x); }
BASE INLINE void store_f16(void *to, Floats x) {
    _mm256_storeu_si256(to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
BASE INLINE Words load_32(const void *from) { return _mm512_loadu_si512(from); }
BASE INLINE Words load_f16(const void *from) { return _mm512_castps_si512(floats_f16(from)); }
BASE INLINE Words load_u16(const void *from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}
BASE INLINE void store_32(void *to, Words x) { _mm512_storeu_si512(to, x); }
BASE INLINE void store_u16(void *to, Words x) { _mm256_storeu_si256(to, _mm512_cvtepi32_epi16(x)); }
BASE INLINE void store_halves(void *to, const void *from, int odd) {
    const Words x = load_u16(from);
    _mm512_mask_storeu_epi16(to, odd ? 0xaaaaaaaau : 0x55555555u,
                             _mm512_or_si512(x, _mm512_slli_epi32(x, 16)));
}

BASE INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
BASE INLINE Words splat_word(int32_t x) { return _mm512_set1_epi32(x); }

BASE INLINE Words splat_64(int64_t x) { return _mm512_set1_epi64(x); }

BASE INLINE Floats add_lanes(Floats x, Floats y) { return _mm512_add_ps(x, y); }
BASE INLINE Floats sub_lanes(Floats x, Floats y) { return _mm512_sub_ps(x, y); }
BASE INLINE Floats mul_lanes(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
BASE INLINE Floats div_lanes(Floats x, Floats y) { return _mm512_div_ps(x, y); }
BASE INLINE Floats min_lanes(Floats x, Floats y) { return _mm512_min_ps(x, y); }
BASE INLINE Floats max_lanes(Floats x, Floats y) { return _mm512_max_ps(x, y); }
BASE INLINE Floats fma_lanes(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
BASE INLINE Floats fnma_lanes(Floats x, Floats y, Floats z) { return _mm512_fnmadd_ps(x, y, z); }
BASE INLINE Floats abs_lanes(Floats x) { return _mm512_abs_ps(x); }
BASE INLINE Floats rounded(Floats x) {
    __asm__("" : "+v"(x));
    return x;
}
BASE INLINE Floats round_lanes(Floats x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
BASE INLINE Floats ldexp_lanes(Mask mask, Floats x, Floats n) {
    return _mm512_maskz_scalef_ps(mask, x, n);
}
BASE INLINE Words or_words(Words x, Words y) { return _mm512_or_si512(x, y); }
BASE INLINE Words and_words(Words x, Words y) { return _mm512_and_si512(x, y); }
BASE INLINE Words xor_words(Words x, Words y) { return _mm512_xor_si512(x, y); }
BASE INLINE Words add_words(Words x, Words y) { return _mm512_add_epi32(x, y); }
BASE INLINE Words max_words(Words x, Words y) { return _mm512_max_epi32(x, y); }
BASE INLINE Words left_16(Words x) { return _mm512_slli_epi32(x, 16); }
BASE INLINE Words left_20(Words x) { return _mm512_slli_epi32(x, 20); }
BASE INLINE Words left_24(Words x) { return _mm512_slli_epi32(x, 24); }
BASE INLINE Words right_8(Words x) { return _mm512_srli_epi32(x, 8); }
BASE INLINE Words right_16(Words x) { return _mm512_srli_epi32(x, 16); }
BASE INLINE Words bytes_16(const void *from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(from));
}
BASE INLINE Words look_up(Words bytes, Words x) { return _mm512_shuffle_epi8(bytes, x); }
BASE INLINE Words right_4(Words x) { return _mm512_srli_epi32(x, 4); }
BASE INLINE Words sub_halves(Words x, Words y) { return _mm512_subs_epi16(x, y); }
BASE INLINE Words mul_high_halves(Words x, Words y) { return _mm512_mulhrs_epi16(x, y); }
BASE INLINE Words right_8_halves(Words x) { return _mm512_srai_epi16(x, 8); }
BASE INLINE Words pack_halves(Words x, Words y) { return _mm512_packs_epi16(x, y); }
BASE INLINE Words low_32(Words x, Words y) { return _mm512_unpacklo_epi32(x, y); }
BASE INLINE Words high_32(Words x, Words y) { return _mm512_unpackhi_epi32(x, y); }
BASE INLINE Words low_64(Words x, Words y) { return _mm512_unpacklo_epi64(x, y); }
BASE INLINE Words high_64(Words x, Words y) { return _mm512_unpackhi_epi64(x, y); }
BASE INLINE Words pairs_float8(const void *from, const int format) {
    const Words x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from));
    const Words small = _mm512_castsi128_si512(SMALL_FLOAT8(format));
    const Words normal = _mm512_add_epi16(
        _mm512_and_si512(format == E5M2 ? _mm512_slli_epi16(x, 5) : _mm512_slli_epi16(x, 4),
                         _mm512_set1_epi16(format == E5M2 ? (short)0x8fe0 : (short)0x87f0)),
        _mm512_set1_epi16(format == E5M2 ? 112 << 7 : 120 << 7));
    const __mmask32 is_small =
        _mm512_testn_epi16_mask(x, _mm512_set1_epi16(format == E5M2 ? 0x7c : 0x78));
    return _mm512_or_si512(_mm512_mask_permutexvar_epi16(normal, is_small, x, small),
                           _mm512_and_si512(x, _mm512_set1_epi16((short)0x8000)));
}
BASE INLINE Words as_words(Floats x) { return _mm512_castps_si512(x); }
BASE INLINE Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }

BASE INLINE Floats floats_of(Words x) { return _mm512_cvtepi32_ps(x); }
BASE INLINE Words words_of(Floats x) { return _mm512_cvtps_epi32(x); }
BASE INLINE void store_codes(void *to, Words x) { _mm_storeu_si128(to, _mm512_cvtepi32_epi8(x)); }

BASE INLINE Mask less(Floats x, Floats y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ); }
BASE INLINE Mask not_less(Floats x, Floats y) { return _mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ); }
BASE INLINE Mask equal(Floats x, Floats y) { return _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ); }
BASE INLINE Mask unordered(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
BASE INLINE Floats select_lanes(Mask mask, Floats x, Floats y) {
    return _mm512_mask_mov_ps(y, mask, x);
}
BASE INLINE unsigned mask_bits(Mask mask) { return mask; }
BASE INLINE Mask lanes_between(long from, long to) {
    from = from < 0 ? 0 : from > LANES ? LANES : from;
    to = to < from ? from : to > LANES ? LANES : to;
    return (Mask)((1u << to) - (1u << from));
}

BASE INLINE float reduce_add(Floats x) { return _mm512_reduce_add_ps(x); }
BASE INLINE float reduce_max(Floats x) { return _mm512_reduce_max_ps(x); }
BASE INLINE float first_lane(Floats x) { return _mm512_cvtss_f32(x); }

AVX512_BF16 INLINE Floats dot_bf16(Floats sum, Words x, Words y) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}
AVX512_BF16 INLINE void store_bf16(void *to, Floats x) {
    _mm256_storeu_si256(to, (__m256i)_mm512_cvtneps_pbh(x));
}

AVX512_VNNI INLINE Words dot_avx512_vnni(Words sum, Words w, Words x) {
    /* Of the intrinsic GCC 12 copies the sums, and keeps copies in memory. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}

/*
 * rows x columns lanes, 16 x 16 at most, from_bytes from row to row,
 * to columns x 16, to_stride lanes from row to row; past `rows`, zeros.
 */
BASE INLINE void transpose(const void *from, long from_bytes, int rows, uint32_t *to,
                           long to_stride, int columns) {
    const __mmask16 there = (__mmask16)(0xffffu >> (LANES - columns));
    __m512i a[LANES], b[LANES];
    for (int r = 0; r < LANES; r++)
        a[r] = r < rows ? _mm512_maskz_loadu_epi32(there, (const char *)from + r * from_bytes)
                        : _mm512_setzero_si512();
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
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88),
                      high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88),
                      high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        b[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
        b[8 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        b[4 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    for (int c = 0; c < columns; c++) _mm512_storeu_si512(to + c * to_stride, b[c]);
}
