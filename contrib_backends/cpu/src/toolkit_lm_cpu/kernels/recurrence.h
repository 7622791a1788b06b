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
    const float *decay; /* of the state, or of each of its lines */
    const float *q, *k, *next; /* what the next token's k sees of the state */
} ISA(Turn);

/*
 * Some columns of a state, sixteen each: decay S + k d. The sums are those of q S, and of S and the
 * next k.
 */
BASE INLINE void ISA(turn)(const ISA(Turn) * t, long keys, const Floats *d, Floats *sums,
                           Floats *seen, const int columns, const int has_next,
                           const int per_key) {
    Floats kept = splat(*t->decay);
    for (int n = 0; n < columns; n++) sums[n] = seen[n] = splat(0);
    for (long i = 0; i < keys; i++) {
        const float *from = t->from + i * t->from_stride;
        float *to = t->to + i * t->to_stride;
        const Floats k = splat(t->k[i]), q = splat(t->q[i]);
        if (per_key) kept = splat(t->decay[i]);
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
    float *own = memory, *q = own + size * SOME_COLUMNS, *k = q + size, *next = k + size,
          *faded = next + size;
    const float *decay = r->decays +
                         (r->tokens[row * r->length] * r->heads + head) * (r->per_key ? size : 1);
    ISA(Turn) turn = {own, own, SOME_COLUMNS, SOME_COLUMNS, decay, q, k, NULL};
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
        const Floats seeing = splat(r->per_key ? k[i] * decay[i] : k[i]);
        for (int n = 0; n < columns; n++)
            seen[n] = fma_lanes(seeing, floats_f32(from + n * LANES), seen[n]);
    }
    for (long t = 0; t < r->length; t++) {
        const long line = row * r->length + t,
                   token = r->tokens[row * r->length] + t;
        const float factor = r->factors[token * r->heads + head];
        const float *values = r->v + line * r->stride + head * r->values + column;
        const int has_next = t + 1 < r->length;
        for (int n = 0; n < columns; n++) {
            d[n] = floats_f32(values + n * LANES);
            if (r->is_delta) d[n] = fnma_lanes(splat(r->per_key ? 1 : *decay), seen[n], d[n]);
            d[n] = mul_lanes(d[n], splat(factor));
        }
        ISA(scale_to)(r->q + line * r->stride + group * size, q, size, r->scale, r->eps);
        if (has_next) ISA(scale_to)(keys + (t + 1) * r->stride, next, size, 1, r->eps);
        turn.decay = decay, turn.next = next;
        decay += r->heads * (r->per_key ? size : 1);
        if (r->per_key && r->is_delta && has_next) {
            for (long i = 0; i < size; i++) faded[i] = next[i] * decay[i];
            turn.next = faded;
        }
        turn.to = own, turn.to_stride = SOME_COLUMNS;
        if (t >= r->length - r->places)
            turn.to = STATE_OF(r, row, start + t, all) + at, turn.to_stride = r->values;
        turn.k = k;
        if (r->per_key)
            ISA(turn)(&turn, size, d, sums, seen, columns, r->is_delta && has_next, 1);
        else if (r->is_delta && has_next)
            ISA(turn)(&turn, size, d, sums, seen, columns, 1, 0);
        else
            ISA(turn)(&turn, size, d, sums, seen, columns, 0, 0);
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
    float *memory = own_memory((size_t)(r->keys * (SOME_COLUMNS + 4)) * sizeof *memory);
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

/* Some channels of a row of a selective scan: S = exp(time rates) S + into x. */
BASE static void ISA(scan)(void *job, long item) {
    Scan *s = job;
    const long blocks = (s->channels + SOME_COLUMNS - 1) / SOME_COLUMNS, row = item / blocks,
               first = item % blocks * SOME_COLUMNS, start = s->starts[row],
               left = s->channels - first, all = s->size * s->channels,
               width = left < SOME_COLUMNS ? left : SOME_COLUMNS;
    float *own = own_memory((size_t)(2 * s->size * SOME_COLUMNS) * sizeof *own),
          *rates = own + s->size * SOME_COLUMNS;
    if (own == NULL) {
        s->failed = 1;
        return;
    }
    const Floats log2_of_e = splat(1.44269504f);
    for (long i = 0; i < s->size; i++)
        for (long c = 0; c < width; c += LANES) {
            const float *from = start == 0
                                    ? NULL
                                    : STATE_OF(s, row, start - 1, all) + i * s->channels + first;
            store_f32(own + i * SOME_COLUMNS + c, from == NULL ? splat(0) : floats_f32(from + c));
            store_f32(rates + i * SOME_COLUMNS + c,
                      mul_lanes(log2_of_e, floats_f32(s->rates + i * s->channels + first + c)));
        }
    for (long t = 0; t < s->length; t++) {
        const long token = s->tokens[row * s->length] + t, at = token * s->channels + first;
        const float *into = s->into + token * s->into_stride,
                    *out_of = s->out_of + token * s->out_of_stride;
        for (long c = 0; c < width; c += LANES) {
            const Floats time = floats_f32(s->time + at + c), x = floats_f32(s->x + at + c);
            Floats sum = splat(0);
            for (long i = 0; i < s->size; i++) {
                float *of = own + i * SOME_COLUMNS + c;
                const Floats rate = floats_f32(rates + i * SOME_COLUMNS + c);
                Floats state = mul_lanes(exp2_lanes(mul_lanes(time, rate), 7), floats_f32(of));
                state = fma_lanes(splat(into[i]), x, state);
                store_f32(of, state);
                sum = fma_lanes(splat(out_of[i]), state, sum);
            }
            store_f32(s->out + at + c, sum);
        }
        if (t < s->length - s->places) continue;
        float *to = STATE_OF(s, row, start + t, all) + first;
        for (long i = 0; i < s->size; i++)
            memcpy(to + i * s->channels, own + i * SOME_COLUMNS, (size_t)width * sizeof *to);
    }
}

#undef STATE_OF
