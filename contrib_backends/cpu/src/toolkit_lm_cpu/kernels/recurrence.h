/*
 * Recurrent layers in float, one token after the other: a token's state does not depend on how
 * steps cut its sequence, nor on other rows. Included once for each set of instructions.
 */

/* Of a step's row, the place for the states after token `token`: `size` floats. */
#define STATE_OF(s, row, token, size)                                                              \
    ((s)->ring + (s)->blocks[row] * (s)->page + (token) % (s)->places * (size))

BASE INLINE Floats ISA(input_of)(const Convolution *c, long at) {
    const char *x = (const char *)c->x + at * c->width;
    return c->width == 4 ? floats_f32(x) : c->is_bfloat16 ? floats_bf16(x) : floats_f16(x);
}

/* Some channels of a row of a causal depthwise convolution. */
BASE static void ISA(convolve)(void *job, long item) {
    const Convolution *c = job;
    const long blocks = (c->channels + SOME_CHANNELS - 1) / SOME_CHANNELS, row = item / blocks,
               first = item % blocks * SOME_CHANNELS, before = c->size - 1, start = c->starts[row],
               end = first + SOME_CHANNELS < c->channels ? first + SOME_CHANNELS : c->channels;
    const long from = c->tokens[row * c->length], size = before * c->channels;
    for (long at = first; at < end; at += LANES) {
        Floats window[MOST_TAPS];
        for (long i = 0; i < before; i++)
            window[i] = start == 0 ? splat(0)
                                   : floats_f32(STATE_OF(c, row, start - 1, size) +
                                                i * c->channels + at);
        for (long t = 0; t < c->length; t++) {
            Floats sum = c->bias == NULL ? splat(0) : floats_f32(c->bias + at);
            window[before] = ISA(input_of)(c, (from + t) * c->x_stride + at);
            for (long i = 0; i < c->size; i++)
                sum = fma_lanes(floats_f32(c->weight + i * c->channels + at), window[i], sum);
            store_f32(c->out + (row * c->length + t) * c->channels + at,
                      activate(c->activation, sum));
            for (long i = 0; i < before; i++) window[i] = window[i + 1];
            if (t < c->length - c->places) continue;
            float *to = STATE_OF(c, row, start + t, size) + at;
            for (long i = 0; i < before; i++) store_f32(to + i * c->channels, window[i]);
        }
    }
}

/* x * scale, divided by its length where there is an eps. */
BASE INLINE void ISA(scale_to)(const float *x, float *to, long size, float scale, float eps) {
    if (eps >= 0) {
        Floats sum = splat(0);
        for (long i = 0; i < size; i += LANES)
            sum = fma_lanes(floats_f32(x + i), floats_f32(x + i), sum);
        scale /= __builtin_sqrtf(reduce_add(sum) + eps);
    }
    for (long i = 0; i < size; i += LANES)
        store_f32(to + i, mul_lanes(floats_f32(x + i), splat(scale)));
}

typedef struct {
    const float *from; /* the state: lines of columns */
    float *to;
    long from_stride, to_stride;
    const float *q, *k, *next; /* the next token's k, or NULL */
} ISA(Turn);

/*
 * Some columns of a state, sixteen each: decay S + k d. The sums are those of q S, and of S and the
 * next k.
 */
BASE INLINE void ISA(turn)(const ISA(Turn) * t, long keys, float decay, const Floats *d,
                           Floats *sums, Floats *seen, const int columns, const int has_next) {
    const Floats kept = splat(decay);
    for (int n = 0; n < columns; n++) sums[n] = seen[n] = splat(0);
    for (long i = 0; i < keys; i++) {
        const float *from = t->from + i * t->from_stride;
        float *to = t->to + i * t->to_stride;
        const Floats k = splat(t->k[i]), q = splat(t->q[i]);
        for (int n = 0; n < columns; n++) {
            Floats state = mul_lanes(kept, floats_f32(from + n * LANES));
            state = fma_lanes(k, d[n], state);
            store_f32(to + n * LANES, state);
            sums[n] = fma_lanes(q, state, sums[n]);
            if (has_next) seen[n] = fma_lanes(splat(t->next[i]), state, seen[n]);
        }
    }
}

/* `columns` times sixteen columns of a head's state, token after token. */
BASE INLINE void ISA(recur_columns)(const Recurrence *r, long row, long head, long column,
                                    float *memory, const int columns) {
    const long group = head / (r->heads / r->groups), start = r->starts[row], size = r->keys,
               all = r->heads * size * r->values, at = head * size * r->values + column;
    float *own = memory, *q = own + size * SOME_COLUMNS, *k = q + size, *next = k + size;
    ISA(Turn) turn = {own, own, SOME_COLUMNS, SOME_COLUMNS, q, k, next};
    Floats sums[4], seen[4], d[4];
    if (start == 0)
        memset(own, 0, (size_t)(size * SOME_COLUMNS) * sizeof *own);
    else
        turn.from = STATE_OF(r, row, start - 1, all) + at, turn.from_stride = r->values;
    const float *keys = r->k + row * r->length * r->stride + group * size;
    ISA(scale_to)(keys, k, size, 1, r->eps);
    for (int n = 0; n < columns; n++) seen[n] = splat(0);
    for (long i = 0; r->is_delta && i < size; i++) {
        const float *from = turn.from + i * turn.from_stride;
        for (int n = 0; n < columns; n++)
            seen[n] = fma_lanes(splat(k[i]), floats_f32(from + n * LANES), seen[n]);
    }
    for (long t = 0; t < r->length; t++) {
        const long line = row * r->length + t,
                   token = r->tokens[row * r->length] + t;
        const float decay = r->decays[token * r->heads + head],
                    factor = r->factors[token * r->heads + head];
        const float *values = r->v + line * r->stride + head * r->values + column;
        const int has_next = t + 1 < r->length;
        for (int n = 0; n < columns; n++) {
            d[n] = floats_f32(values + n * LANES);
            if (r->is_delta) d[n] = fnma_lanes(splat(decay), seen[n], d[n]);
            d[n] = mul_lanes(d[n], splat(factor));
        }
        ISA(scale_to)(r->q + line * r->stride + group * size, q, size, r->scale, r->eps);
        if (has_next) ISA(scale_to)(keys + (t + 1) * r->stride, next, size, 1, r->eps);
        turn.to = own, turn.to_stride = SOME_COLUMNS;
        if (t >= r->length - r->places)
            turn.to = STATE_OF(r, row, start + t, all) + at, turn.to_stride = r->values;
        turn.k = k, turn.next = next;
        if (r->is_delta && has_next)
            ISA(turn)(&turn, size, decay, d, sums, seen, columns, 1);
        else
            ISA(turn)(&turn, size, decay, d, sums, seen, columns, 0);
        for (int n = 0; n < columns; n++)
            store_f32(r->out + (token * r->heads + head) * r->values + column + n * LANES, sums[n]);
        turn.from = turn.to, turn.from_stride = turn.to_stride;
        float *last = k;
        k = next, next = last;
    }
}

/* Some columns of the state of a row's head. */
BASE static void ISA(recur)(void *job, long item) {
    Recurrence *r = job;
    const long blocks = (r->values + SOME_COLUMNS - 1) / SOME_COLUMNS,
               column = item % blocks * SOME_COLUMNS, head = item / blocks % r->heads,
               row = item / blocks / r->heads, left = (r->values - column) / LANES;
    float *memory = own_memory((size_t)(r->keys * (SOME_COLUMNS + 3)) * sizeof *memory);
    if (memory == NULL) {
        r->failed = 1;
        return;
    }
    switch (left) {
        case 1: ISA(recur_columns)(r, row, head, column, memory, 1); break;
        case 2: ISA(recur_columns)(r, row, head, column, memory, 2); break;
        case 3: ISA(recur_columns)(r, row, head, column, memory, 3); break;
        default: ISA(recur_columns)(r, row, head, column, memory, 4);
    }
}

#undef STATE_OF
