/*
 * The names of lanes.h by AVX2, FMA and F16C: two vectors of 8 lanes.
 * There are 16 registers, half as many as with AVX-512.
 */

#undef ISA
#undef BASE
#undef BASE_ROWS
#undef BASE_SUMS
#define ISA(x) x##_avx2
#define BASE AVX2
#define BASE_ROWS 4
#define BASE_SUMS 4

typedef struct {
    __m256 low, high;
} Floats;
typedef struct {
    __m256i low, high;
} Words;
typedef Floats Mask; /* all bits of its lanes */

BASE INLINE Words as_words(Floats x) {
    return (Words){_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
BASE INLINE Floats as_floats(Words x) {
    return (Floats){_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}

BASE INLINE Floats floats_f32(const void *from) {
    return (Floats){_mm256_loadu_ps(from), _mm256_loadu_ps((const float *)from + 8)};
}
BASE INLINE Floats floats_f16(const void *from) {
    return (Floats){_mm256_cvtph_ps(_mm_loadu_si128(from)),
                    _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + 1))};
}
BASE INLINE Floats floats_masked(Mask mask, const void *from) {
    const Words there = as_words(mask);
    return (Floats){_mm256_maskload_ps(from, there.low),
                    _mm256_maskload_ps((const float *)from + 8, there.high)};
}
BASE INLINE void store_f32(void *to, Floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps((float *)to + 8, x.high);
}
BASE INLINE void store_f16(void *to, Floats x) {
    _mm_storeu_si128(to, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)to + 1,
                     _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
BASE INLINE Words load_32(const void *from) {
    return (Words){_mm256_loadu_si256(from), _mm256_loadu_si256((const __m256i *)from + 1)};
}
BASE INLINE Words load_f16(const void *from) { return as_words(floats_f16(from)); }
BASE INLINE Words load_u16(const void *from) {
    return (Words){_mm256_cvtepu16_epi32(_mm_loadu_si128(from)),
                   _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from + 1))};
}
BASE INLINE void store_32(void *to, Words x) {
    _mm256_storeu_si256(to, x.low);
    _mm256_storeu_si256((__m256i *)to + 1, x.high);
}
BASE INLINE void store_u16(void *to, Words x) {
    _mm256_storeu_si256(to, _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xd8));
}
BASE INLINE void store_halves(void *to, const void *from, int odd) {
    for (int i = 0; i < LANES; i++) ((uint16_t *)to)[2 * i + odd] = ((const uint16_t *)from)[i];
}

BASE INLINE __m256i pairs_float8_8(const void *from, const int format) {
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i normal = _mm256_add_epi16(
        _mm256_and_si256(format == E5M2 ? _mm256_slli_epi16(x, 5) : _mm256_slli_epi16(x, 4),
                         _mm256_set1_epi16(format == E5M2 ? (short)0x8fe0 : (short)0x87f0)),
        _mm256_set1_epi16(format == E5M2 ? 112 << 7 : 120 << 7));
    const __m256i is_small = _mm256_cmpeq_epi16(
        _mm256_and_si256(x, _mm256_set1_epi16(format == E5M2 ? 0x7c : 0x78)),
        _mm256_setzero_si256());
    /* Both bytes of a number that is looked up. */
    const __m256i at = _mm256_add_epi16(
        _mm256_mullo_epi16(_mm256_and_si256(x, _mm256_set1_epi16(7)), _mm256_set1_epi16(0x202)),
        _mm256_set1_epi16(0x100));
    const __m256i small =
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(SMALL_FLOAT8(format)), at);
    return _mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small),
                           _mm256_and_si256(x, _mm256_set1_epi16((short)0x8000)));
}
BASE INLINE Words pairs_float8(const void *from, const int format) {
    return (Words){pairs_float8_8(from, format), pairs_float8_8((const char *)from + 16, format)};
}

BASE INLINE Floats splat(float x) { return (Floats){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BASE INLINE Words splat_word(int32_t x) {
    return (Words){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}

BASE INLINE Words splat_64(int64_t x) {
    return (Words){_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)};
}

BASE INLINE Floats add_lanes(Floats x, Floats y) {
    return (Floats){_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)};
}
BASE INLINE Floats sub_lanes(Floats x, Floats y) {
    return (Floats){_mm256_sub_ps(x.low, y.low), _mm256_sub_ps(x.high, y.high)};
}
BASE INLINE Floats mul_lanes(Floats x, Floats y) {
    return (Floats){_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)};
}
BASE INLINE Floats div_lanes(Floats x, Floats y) {
    return (Floats){_mm256_div_ps(x.low, y.low), _mm256_div_ps(x.high, y.high)};
}
BASE INLINE Floats min_lanes(Floats x, Floats y) {
    return (Floats){_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high)};
}
BASE INLINE Floats max_lanes(Floats x, Floats y) {
    return (Floats){_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)};
}
BASE INLINE Floats fma_lanes(Floats x, Floats y, Floats z) {
    return (Floats){_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
}
BASE INLINE Floats fnma_lanes(Floats x, Floats y, Floats z) {
    return (Floats){_mm256_fnmadd_ps(x.low, y.low, z.low),
                    _mm256_fnmadd_ps(x.high, y.high, z.high)};
}
BASE INLINE Floats abs_lanes(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (Floats){_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
BASE INLINE Floats rounded(Floats x) {
    __asm__("" : "+x"(x.low), "+x"(x.high));
    return x;
}
BASE INLINE Floats round_lanes(Floats x) {
    return (Floats){_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                    _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/* From n = 128 on 2^n is infinite; NaN stays. */
BASE INLINE __m256 ldexp_8(__m256 mask, __m256 x, __m256 n) {
    const __m256i exponent = _mm256_add_epi32(
        _mm256_cvtps_epi32(_mm256_min_ps(n, _mm256_set1_ps(128))), _mm256_set1_epi32(127));
    return _mm256_and_ps(mask,
                         _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))));
}
BASE INLINE Floats ldexp_lanes(Mask mask, Floats x, Floats n) {
    return (Floats){ldexp_8(mask.low, x.low, n.low), ldexp_8(mask.high, x.high, n.high)};
}
BASE INLINE Words or_words(Words x, Words y) {
    return (Words){_mm256_or_si256(x.low, y.low), _mm256_or_si256(x.high, y.high)};
}
BASE INLINE Words and_words(Words x, Words y) {
    return (Words){_mm256_and_si256(x.low, y.low), _mm256_and_si256(x.high, y.high)};
}
BASE INLINE Words xor_words(Words x, Words y) {
    return (Words){_mm256_xor_si256(x.low, y.low), _mm256_xor_si256(x.high, y.high)};
}
BASE INLINE Words add_words(Words x, Words y) {
    return (Words){_mm256_add_epi32(x.low, y.low), _mm256_add_epi32(x.high, y.high)};
}
BASE INLINE Words max_words(Words x, Words y) {
    return (Words){_mm256_max_epi32(x.low, y.low), _mm256_max_epi32(x.high, y.high)};
}
BASE INLINE Words left_16(Words x) {
    return (Words){_mm256_slli_epi32(x.low, 16), _mm256_slli_epi32(x.high, 16)};
}
BASE INLINE Words bytes_16(const void *from) {
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(from));
    return (Words){bytes, bytes};
}
BASE INLINE Words look_up(Words bytes, Words x) {
    return (Words){_mm256_shuffle_epi8(bytes.low, x.low), _mm256_shuffle_epi8(bytes.high, x.high)};
}
BASE INLINE Words right_4(Words x) {
    return (Words){_mm256_srli_epi32(x.low, 4), _mm256_srli_epi32(x.high, 4)};
}
BASE INLINE Words sub_halves(Words x, Words y) {
    return (Words){_mm256_subs_epi16(x.low, y.low), _mm256_subs_epi16(x.high, y.high)};
}
BASE INLINE Words mul_high_halves(Words x, Words y) {
    return (Words){_mm256_mulhrs_epi16(x.low, y.low), _mm256_mulhrs_epi16(x.high, y.high)};
}
BASE INLINE Words right_8_halves(Words x) {
    return (Words){_mm256_srai_epi16(x.low, 8), _mm256_srai_epi16(x.high, 8)};
}
BASE INLINE Words pack_halves(Words x, Words y) {
    return (Words){_mm256_packs_epi16(x.low, y.low), _mm256_packs_epi16(x.high, y.high)};
}
BASE INLINE Words low_32(Words x, Words y) {
    return (Words){_mm256_unpacklo_epi32(x.low, y.low), _mm256_unpacklo_epi32(x.high, y.high)};
}
BASE INLINE Words high_32(Words x, Words y) {
    return (Words){_mm256_unpackhi_epi32(x.low, y.low), _mm256_unpackhi_epi32(x.high, y.high)};
}
BASE INLINE Words low_64(Words x, Words y) {
    return (Words){_mm256_unpacklo_epi64(x.low, y.low), _mm256_unpacklo_epi64(x.high, y.high)};
}
BASE INLINE Words high_64(Words x, Words y) {
    return (Words){_mm256_unpackhi_epi64(x.low, y.low), _mm256_unpackhi_epi64(x.high, y.high)};
}
BASE INLINE Words left_20(Words x) {
    return (Words){_mm256_slli_epi32(x.low, 20), _mm256_slli_epi32(x.high, 20)};
}
BASE INLINE Words left_24(Words x) {
    return (Words){_mm256_slli_epi32(x.low, 24), _mm256_slli_epi32(x.high, 24)};
}
BASE INLINE Words right_8(Words x) {
    return (Words){_mm256_srli_epi32(x.low, 8), _mm256_srli_epi32(x.high, 8)};
}
BASE INLINE Words right_16(Words x) {
    return (Words){_mm256_srli_epi32(x.low, 16), _mm256_srli_epi32(x.high, 16)};
}

BASE INLINE Floats floats_of(Words x) {
    return (Floats){_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
BASE INLINE Words words_of(Floats x) {
    return (Words){_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
}
BASE INLINE void store_codes(void *to, Words x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    _mm_storeu_si128(
        to, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

BASE INLINE Mask less(Floats x, Floats y) {
    return (Mask){_mm256_cmp_ps(x.low, y.low, _CMP_LT_OQ),
                  _mm256_cmp_ps(x.high, y.high, _CMP_LT_OQ)};
}
BASE INLINE Mask not_less(Floats x, Floats y) {
    return (Mask){_mm256_cmp_ps(x.low, y.low, _CMP_NLT_UQ),
                  _mm256_cmp_ps(x.high, y.high, _CMP_NLT_UQ)};
}
BASE INLINE Mask equal(Floats x, Floats y) {
    return (Mask){_mm256_cmp_ps(x.low, y.low, _CMP_EQ_OQ),
                  _mm256_cmp_ps(x.high, y.high, _CMP_EQ_OQ)};
}
BASE INLINE Mask unordered(Floats x) {
    return (Mask){_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q),
                  _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q)};
}
BASE INLINE Floats select_lanes(Mask mask, Floats x, Floats y) {
    return (Floats){_mm256_blendv_ps(y.low, x.low, mask.low),
                    _mm256_blendv_ps(y.high, x.high, mask.high)};
}
BASE INLINE unsigned mask_bits(Mask mask) {
    return (unsigned)(_mm256_movemask_ps(mask.low) | _mm256_movemask_ps(mask.high) << 8);
}
BASE INLINE Mask lanes_between(long from, long to) {
    from = from < 0 ? 0 : from > LANES ? LANES : from;
    to = to < from ? from : to > LANES ? LANES : to;
    const __m256i first = _mm256_set1_epi32((int)from), end = _mm256_set1_epi32((int)to);
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                  high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    return as_floats((Words){
        _mm256_andnot_si256(_mm256_cmpgt_epi32(first, low), _mm256_cmpgt_epi32(end, low)),
        _mm256_andnot_si256(_mm256_cmpgt_epi32(first, high), _mm256_cmpgt_epi32(end, high))});
}

/* In the order of AVX-512. */
BASE INLINE float reduce_add(Floats x) {
    const __m256 eight = _mm256_add_ps(x.high, x.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
BASE INLINE float reduce_max(Floats x) {
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
BASE INLINE float first_lane(Floats x) { return _mm256_cvtss_f32(x.low); }

/* Pairs of products fit into 16 bits: 2 x 128 x 127 at most, and of codes of 4 bits less. */
BASE INLINE __m256i add_pairs(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi32(
        sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
BASE INLINE Words dot_4_avx2(Words sum, Words w, Words x) {
    return (Words){add_pairs(sum.low, w.low, x.low), add_pairs(sum.high, w.high, x.high)};
}
BASE INLINE __m256i dot_8_half(__m256i sum, __m256i w, __m256i x) {
    w = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    return add_pairs(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
BASE INLINE Words dot_8_avx2(Words sum, Words w, Words x) {
    return (Words){dot_8_half(sum.low, w.low, x.low), dot_8_half(sum.high, w.high, x.high)};
}
AVX_VNNI INLINE Words dot_avx_vnni(Words sum, Words w, Words x) {
    return (Words){_mm256_dpbusd_avx_epi32(sum.low, w.low, x.low),
                   _mm256_dpbusd_avx_epi32(sum.high, w.high, x.high)};
}

/* 8 x 8 lanes at most; past `rows`, zeros. */
BASE INLINE void transpose_8(const char *from, long from_bytes, int rows, uint32_t *to,
                             long to_stride, int columns) {
    const __m256i there = as_words(lanes_between(0, columns)).low;
    __m256i a[8], b[8];
    for (int r = 0; r < 8; r++)
        a[r] = r < rows ? _mm256_maskload_epi32((const int *)(from + r * from_bytes), there)
                        : _mm256_setzero_si256();
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 8; r += 4)
        for (int i = 0; i < 2; i++) {
            a[r + 2 * i] = _mm256_unpacklo_epi64(b[r + i], b[r + 2 + i]);
            a[r + 2 * i + 1] = _mm256_unpackhi_epi64(b[r + i], b[r + 2 + i]);
        }
    /* a[4 g + c] holds columns c and 4 + c of rows 4 g to 4 g + 3, 128 bits each. */
    for (int c = 0; c < 4; c++) {
        b[c] = _mm256_permute2x128_si256(a[c], a[4 + c], 0x20);
        b[4 + c] = _mm256_permute2x128_si256(a[c], a[4 + c], 0x31);
    }
    for (int c = 0; c < 8 && c < columns; c++)
        _mm256_storeu_si256((__m256i *)(to + c * to_stride), b[c]);
}

BASE INLINE void transpose(const void *from, long from_bytes, int rows, uint32_t *to,
                           long to_stride, int columns) {
    for (int c = 0; c < columns; c += 8)
        for (int r = 0; r < LANES; r += 8)
            transpose_8((const char *)from + r * from_bytes + c * 4, from_bytes, rows - r,
                        to + c * to_stride + r, to_stride, columns - c);
}
