/* What is made of the instructions of lanes.h; included once for each of them. */

BASE INLINE Floats floats_bf16(const void *from) { return as_floats(left_16(load_u16(from))); }

/*
 * sum + x y: of floats; and of pairs of bfloat16, whose halves are multiplied one after the other.
 */
BASE INLINE Floats dot_f32(Floats sum, Words x, Words y) {
    return fma_lanes(as_floats(x), as_floats(y), sum);
}

BASE INLINE Floats dot_split(Floats sum, Words x, Words y) {
    const Words high = splat_word((int32_t)0xffff0000u);
    sum = dot_f32(sum, left_16(x), left_16(y));
    return dot_f32(sum, and_words(x, high), and_words(y, high));
}

/* Scales of sixteen outputs of a quantized weight, from its scale `at` on. */
BASE INLINE Floats scales_at(const Quantized *q, long at) {
    return q->is_half ? floats_f16((const uint16_t *)q->scales + at)
                      : floats_f32((const float *)q->scales + at);
}

/* What levels of a weight's groups are made of. */
typedef struct {
    Words low, high; /* levels, 16 bits each: the first and the last eight, in each 128 bits */
    Words spread, spread_16; /* which bytes of a quad's ratios and zeros go to its 128 bits */
} Levels;

BASE INLINE Levels levels_of(const Quantized *q) {
    static const uint8_t spread[2][64] = {
#define RATIO(o) 128, o, 128, o, 128, o, 128, o, 128, o, 128, o, 128, o, 128, o
#define ZERO(o)                                                                                    \
    2 * o, 2 * o + 1, 2 * o, 2 * o + 1, 2 * o, 2 * o + 1, 2 * o, 2 * o + 1, 2 * o, 2 * o + 1,      \
        2 * o, 2 * o + 1, 2 * o, 2 * o + 1, 2 * o, 2 * o + 1
        {RATIO(0), RATIO(1), RATIO(2), RATIO(3)},
        {ZERO(0), ZERO(1), ZERO(2), ZERO(3)}};
#undef RATIO
#undef ZERO
    return (Levels){bytes_16(q->levels), bytes_16(q->levels + 8), load_32(spread[0]),
                    load_32(spread[1])};
}

/*
 * Levels of a group of codes as signed codes of 8 bits, of quad `quad` of a panel: those of output
 * 4 o + quad are in the 128 bits o. `at`: of the panel's first ratio of the group.
 */
BASE INLINE Words levels_at(const Quantized *q, const Levels *l, long at, int quad) {
    int32_t ratios;
    memcpy(&ratios, q->ratios + at + quad * 4, sizeof ratios);
    const Words ratio = right_8_halves(look_up(splat_word(ratios), l->spread));
    Words low = l->low, high = l->high;
    if (q->zeros != NULL) {
        int64_t zeros;
        memcpy(&zeros, q->zeros + at + quad * 4, sizeof zeros);
        const Words zero = look_up(splat_64(zeros), l->spread_16);
        low = sub_halves(low, zero), high = sub_halves(high, zero);
    }
    return pack_halves(mul_high_halves(low, ratio), mul_high_halves(high, ratio));
}

/* Of each 128 bits of four quads, what 32 bits are at place i of theirs: to x[i]. */
BASE INLINE void transpose_quads(Words x[4]) {
    const Words a = low_32(x[0], x[1]), b = high_32(x[0], x[1]), c = low_32(x[2], x[3]),
                d = high_32(x[2], x[3]);
    x[0] = low_64(a, c), x[1] = high_64(a, c), x[2] = low_64(b, d), x[3] = high_64(b, d);
}

/* Sums of each output, from those of 128 bits of four quads. */
BASE INLINE Words sum_quads(Words x[4]) {
    transpose_quads(x);
    return add_words(add_words(x[0], x[1]), add_words(x[2], x[3]));
}

/* Sixteen finite float8, in the low bytes of lanes that are zero elsewhere. */
BASE INLINE Floats floats_float8(Words bytes, const int format) {
    Words magnitude = and_words(bytes, splat_word(0x7f));
    const Floats whole = floats_of(magnitude);
    if (format == E5M2) magnitude = add_words(magnitude, magnitude);
    const Floats normal = as_floats(
        add_words(left_20(magnitude), splat_word((format == E5M2 ? 112 : 120) << 23)));
    const Floats small = mul_lanes(whole, splat(format == E5M2 ? 0x1p-16f : 0x1p-9f));
    const Floats x = select_lanes(less(whole, splat(format == E5M2 ? 4 : 8)), small, normal);
    return as_floats(or_words(as_words(x), left_24(and_words(bytes, splat_word(0x80)))));
}

/* As bfloat16; to nearest, ties to even. */
BASE INLINE void store_split(void *to, Floats x) {
    const Words bits = as_words(x), odd = and_words(right_16(bits), splat_word(1));
    const Words rounded = add_words(bits, add_words(odd, splat_word(0x7fff)));
    const Words quiet = or_words(bits, splat_word(0x400000));
    store_u16(to,
              right_16(as_words(select_lanes(unordered(x), as_floats(quiet), as_floats(rounded)))));
}

/*
 * 2^x; 0 below the smallest normal number.
 * 7 terms give float precision, 5 more than bfloat16's. The coefficients are log(2)^n / n!.
 */
BASE INLINE Floats exp2_lanes(Floats x, const int terms) {
    const Floats whole = round_lanes(x), part = sub_lanes(x, whole);
    static const float coefficients[] = {1.0f,          6.9314718e-1f, 2.4022651e-1f,
                                         5.5504109e-2f, 9.6181291e-3f, 1.3333558e-3f,
                                         1.5403530e-4f, 1.5252734e-5f};
    Floats y = splat(coefficients[terms]);
    for (int n = terms - 1; n >= 0; n--) y = fma_lanes(y, part, splat(coefficients[n]));
    return ldexp_lanes(not_less(x, splat(-126.0f)), y, whole);
}

/* tanh(x) = 1 - 2 / (e^2x + 1); where that cancels, by its series. */
BASE INLINE Floats tanh_lanes(Floats x) {
    const Floats one = splat(1.0f), square = mul_lanes(x, x);
    const Floats power = exp2_lanes(min_lanes(mul_lanes(x, splat(2.88539008f)), splat(126.0f)), 7);
    const Floats far = sub_lanes(one, div_lanes(splat(2.0f), add_lanes(power, one)));
    Floats near = fma_lanes(square, splat(-17.0f / 315), splat(2.0f / 15));
    near = fma_lanes(near, square, splat(-1.0f / 3));
    near = fma_lanes(mul_lanes(near, square), x, x);
    return select_lanes(unordered(x), x, select_lanes(less(square, splat(0.04f)), near, far));
}

/* erf by Abramowitz and Stegun 7.1.26; its error is below 2e-7. */
BASE INLINE Floats erf_lanes(Floats x) {
    static const float coefficients[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f,
                                         0.254829592f};
    const Floats one = splat(1.0f), zero = splat(0.0f);
    const Floats t = div_lanes(one, fma_lanes(abs_lanes(x), splat(0.3275911f), one));
    Floats y = splat(coefficients[0]);
    for (int i = 1; i < 5; i++) y = fma_lanes(y, t, splat(coefficients[i]));
    const Floats power = exp2_lanes(mul_lanes(mul_lanes(x, x), splat(-1.44269504f)), 7);
    y = fnma_lanes(mul_lanes(y, t), power, one);
    return select_lanes(less(x, zero), sub_lanes(zero, y), y);
}

BASE INLINE Floats activate(int activation, Floats x) {
    const Floats one = splat(1.0f), half = mul_lanes(x, splat(0.5f));
    switch (activation) {
        case RELU:
            /* In this order NaN stays. */
            return max_lanes(splat(0.0f), x);
        case SILU:
        case QUICK_GELU: {
            /* 2^200 is infinite, and what is divided by that 0. */
            const float factor = activation == SILU ? -1.44269504f : -1.702f * 1.44269504f;
            const Floats exponent = min_lanes(mul_lanes(x, splat(factor)), splat(200.0f));
            return div_lanes(x, add_lanes(one, exp2_lanes(exponent, 7)));
        }
        case GELU:
            return fma_lanes(half, erf_lanes(mul_lanes(x, splat(0.70710678f))), half);
        case GELU_TANH: {
            const Floats cube = mul_lanes(mul_lanes(x, x), mul_lanes(x, splat(0.044715f)));
            return fma_lanes(half, tanh_lanes(mul_lanes(add_lanes(x, cube), splat(0.79788456f))),
                             half);
        }
        default:
            return x;
    }
}

/* (up + 1) * gate * sigmoid(1.702 gate): both at most 7, and up at least -7. NaN stays. */
BASE INLINE Floats clamped_swiglu(Floats gate, Floats up) {
    const Floats limit = splat(7.0f);
    up = min_lanes(limit, max_lanes(splat(-7.0f), up));
    return mul_lanes(add_lanes(up, splat(1.0f)), activate(QUICK_GELU, min_lanes(limit, gate)));
}
