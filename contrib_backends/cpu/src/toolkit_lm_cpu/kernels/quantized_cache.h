/*
 * The quantized KV cache: keys and values in codes of 8 bits, and their scales.
 *
 * Included once for each kind of element, with the words of types.h.
 *
 * Tiles lie as those of attention.h do, with bytes in pairs whatever the elements are:
 *   keys   [D / 2][16][2]
 *   values [16 / 2][D][2]
 * A code is exact in every kind of element, so tiles are decoded without their scales. Those of
 * keys multiply scores, and those of values multiply weights.
 */

/* Sixteen codes, in the low bytes of lanes that are zero elsewhere, as floats. */
TARGET INLINE Floats NAME(decode)(int code, Words bytes) {
    if (code == AS_INT8)
        /* 2^23 and more has no bits after the point: the code is the last bits. */
        return sub_lanes(as_floats(or_words(bytes, splat_word(0x4b000000))),
                         splat(8388608.0f + INT8_ZERO));
    /* 2^120 makes the exponent of e4m3 one of a float, and subnormal numbers right. */
    const Words magnitude = left_20(and_words(bytes, splat_word(0x7f)));
    const Floats x = mul_lanes(as_floats(magnitude), splat(0x1p120f));
    const Floats valid = select_lanes(less(splat(MOST_E4M3), x), splat(NAN), x);
    return as_floats(or_words(as_words(valid), left_24(and_words(bytes, splat_word(0x80)))));
}

#if !AMX
/* Sixteen pairs of codes: lanes of both, or the firsts' lanes and `apart` from them the others'. */
TARGET INLINE void NAME(decode_pairs)(int code, const uint8_t *from, LANE *to, long apart) {
    const Words pairs = load_u16(from);
    const Floats first = NAME(decode)(code, and_words(pairs, splat_word(0xff))),
                 second = NAME(decode)(code, right_8(pairs));
#if PAIR == 2
    const Words high = splat_word((int32_t)0xffff0000u);
    (void)apart;
    store_32(to, or_words(right_16(as_words(first)), and_words(as_words(second), high)));
#else
    STORE((ELEMENT *)to, first);
    STORE((ELEMENT *)to + apart, second);
#endif
}

TARGET static void NAME(decode_keys)(int code, const uint8_t *from, long size, LANE *to) {
    for (long d = 0; d < size / 2; d++)
        NAME(decode_pairs)(code, from + d * 2 * TILE, to + d * 2 / PAIR * TILE, TILE);
}

TARGET static void NAME(decode_values)(int code, const uint8_t *from, long size, LANE *to) {
    for (long t = 0; t < TILE / 2; t++)
        for (long d = 0; d < size; d += LANES)
            NAME(decode_pairs)(code, from + (t * size + d) * 2, to + t * 2 / PAIR * size + d, size);
}

#else
/* The bytes of the numbers from 0 on that codes stand for: the lower ones, and then the higher. */
TARGET static void NAME(make_table)(int code, uint8_t table[2][128]) {
    for (int first = 0; first < 128; first += LANES) {
        uint32_t of[LANES];
        for (int i = 0; i < LANES; i++)
            of[i] = (uint32_t)(first + i + (code == AS_INT8 ? INT8_ZERO : 0));
        store_32(of, as_words(NAME(decode)(code, load_32(of))));
        for (int i = 0; i < LANES; i++) {
            table[0][first + i] = (uint8_t)(of[i] >> 16);
            table[1][first + i] = (uint8_t)(of[i] >> 24);
        }
    }
}

/* As decode_keys and decode_values, which lie alike: `count` codes by their table, 64 at once. */
TARGET static void NAME(look_up_codes)(int code, uint8_t table[2][128], const uint8_t *from,
                                       long count, LANE *to) {
    const Words low[2] = {load_32(table[0]), load_32(table[0] + 64)},
                high[2] = {load_32(table[1]), load_32(table[1] + 64)},
                /* The first 32 codes go to the low half of each 128 bits. */
                apart = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                sign = splat_word((int32_t)0x80808080u),
                zero = code == AS_INT8 ? sign : splat_word(0);
    for (long i = 0; i < count; i += 64, to += 2 * LANES) {
        const Words codes = xor_words(_mm512_permutexvar_epi64(apart, load_32(from + i)), zero);
        const Words at = code == AS_INT8 ? _mm512_abs_epi8(codes) : codes;
        const Words lows = _mm512_permutex2var_epi8(low[0], at, low[1]),
                    highs = or_words(_mm512_permutex2var_epi8(high[0], at, high[1]),
                                     and_words(codes, sign));
        store_32(to, _mm512_unpacklo_epi8(lows, highs));
        store_32(to + LANES, _mm512_unpackhi_epi8(lows, highs));
    }
}
#endif

/* A scale for `size` elements: their greatest becomes the greatest code. */
TARGET static float NAME(scale_of)(const ELEMENT *x, long size, float greatest) {
    Floats most = splat(0), sum = splat(0);
    for (long d = 0; d < size; d += LANES) {
        const Floats part = abs_lanes(FLOATS(x + d));
        most = max_lanes(most, part);
        sum = add_lanes(sum, part);
    }
    const float total = reduce_add(sum), top = reduce_max(most);
    return total != total ? NAN : top == 0 ? 1.0f : top / greatest;
}

/*
 * The codes of sixteen numbers that are divided by their scale: the nearest, of two the even one.
 * A number is at most the greatest code's, or NaN: in e4m3 a code of its own, while in int8 the
 * scale is NaN then.
 */
TARGET INLINE Words NAME(encode)(int code, Floats x) {
    const Words bits = as_words(x), byte = splat_word(0xff);
    /* The last bits of a float from 2^23 on are a whole number. */
    const Floats whole = splat(8388608.0f), zero = splat(INT8_ZERO);
    if (code == AS_INT8) {
        const Floats some = select_lanes(unordered(x), zero, add_lanes(round_lanes(x), zero));
        return and_words(as_words(add_lanes(some, whole)), byte);
    }
    const Floats magnitude = abs_lanes(x);
    const Words of = as_words(magnitude), odd = and_words(right_16(right_4(of)), splat_word(1));
    const Words rounded = add_words(of, add_words(odd, splat_word(0x7ffff)));
    const Words normal = add_words(right_16(right_4(rounded)), splat_word(-(120 << 3)));
    /* Below 2^-6 they are multiples of 2^-9. */
    const Floats multiple = add_lanes(round_lanes(mul_lanes(magnitude, splat(512))), whole);
    Floats found = select_lanes(less(magnitude, splat(0x1p-6f)),
                                as_floats(and_words(as_words(multiple), byte)), as_floats(normal));
    found = select_lanes(unordered(x), as_floats(splat_word(0x7f)), found);
    return or_words(as_words(found), and_words(right_16(right_8(bits)), splat_word(0x80)));
}

/* Codes of a token's key or value, divided by `scale`, into its place in a tile. */
TARGET static void NAME(write_codes)(const Write *w, const ELEMENT *x, float scale, uint8_t *to,
                                     long within, int is_value) {
    const float greatest = w->code == AS_INT8 ? MOST_INT8 : MOST_E4M3;
    for (long d = 0; d < w->size; d += LANES) {
        uint32_t codes[LANES];
        const Floats exact = div_lanes(FLOATS(x + d), splat(scale));
        const Floats cut = max_lanes(min_lanes(exact, splat(greatest)), splat(-greatest));
        store_32(codes, NAME(encode)(w->code, select_lanes(unordered(exact), exact, cut)));
        if (is_value) {
            /* Another thread may be writing the bytes between. */
            uint8_t *bytes = to + (within / 2 * w->size + d) * 2 + within % 2;
            for (int i = 0; i < LANES; i++) bytes[i * 2] = (uint8_t)codes[i];
        } else {
            uint8_t *bytes = to + d * TILE + within * 2;
            for (int i = 0; i < LANES; i += 2) {
                const uint16_t pair = (uint16_t)(codes[i] | codes[i + 1] << 8);
                memcpy(bytes + i * TILE, &pair, sizeof pair);
            }
        }
    }
}

/* Writes token i of the step, of one KV head, to the cache. */
TARGET static void NAME(write_quantized)(const Write *w, long i, long head) {
    const long slot = w->slots[i], block = slot / w->block_size, within = slot % w->block_size;
    const long tile = (head * w->block_size + within) / TILE * TILE * w->size;
    const float greatest = w->code == AS_INT8 ? MOST_INT8 : MOST_E4M3;
    for (int is_value = 0; is_value < 2; is_value++) {
        const ELEMENT *x = is_value
                               ? (const ELEMENT *)w->values + i * w->value_stride + head * w->size
                               : (const ELEMENT *)w->keys + i * w->key_stride + head * w->size;
        float *scale = is_value ? w->value_scales : w->key_scales;
        if (w->scale_page) {
            scale += block * w->scale_page + head * w->block_size + within;
            *scale = NAME(scale_of)(x, w->size, greatest);
        }
        uint8_t *to = (uint8_t *)(is_value ? w->to_values : w->to_keys) +
                      block * (is_value ? w->value_page : w->key_page) + tile;
        NAME(write_codes)(w, x, *scale, to, within % TILE, is_value);
    }
}
