/* The intrinsics for tiles of AMX in plain C, for processors without them: `cc -include` this. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static __thread struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tiles_shape;
static __thread union {
    int8_t codes[16][64];
    int32_t words[16][16];
    float floats[16][16];
} tiles[8];

static inline void emulated_load(int tile, const void *from, long stride) {
    memset(tiles + tile, 0, sizeof *tiles);
    for (int r = 0; r < tiles_shape.rows[tile]; r++)
        memcpy(tiles[tile].codes[r], (const char *)from + r * stride, tiles_shape.bytes[tile]);
}

static inline void emulated_store(int tile, void *to, long stride) {
    for (int r = 0; r < tiles_shape.rows[tile]; r++)
        memcpy((char *)to + r * stride, tiles[tile].codes[r], tiles_shape.bytes[tile]);
}

/* Sums of signed codes, by fours, with signed ones or with those from 0 to 255. */
static inline void emulated_codes(int sums, int a, int b, int is_signed) {
    for (int m = 0; m < tiles_shape.rows[sums]; m++)
        for (int n = 0; n < tiles_shape.bytes[sums] / 4; n++)
            for (int k = 0; k < tiles_shape.bytes[a]; k++)
                tiles[sums].words[m][n] +=
                    tiles[a].codes[m][k] * (tiles[b].codes[k / 4][4 * n + k % 4] &
                                            (is_signed ? -1 : 255));
}

static inline float emulated_half(int32_t pair, int high) {
    const int32_t bits = high ? pair & (int32_t)0xffff0000u : (int32_t)((uint32_t)pair << 16);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Sums of pairs of bfloat16. */
static inline void emulated_pairs(int sums, int a, int b) {
    for (int m = 0; m < tiles_shape.rows[sums]; m++)
        for (int k = 0; k < tiles_shape.bytes[a] / 4; k++)
            for (int n = 0; n < tiles_shape.bytes[sums] / 4; n++)
                for (int high = 0; high < 2; high++)
                    tiles[sums].floats[m][n] += emulated_half(tiles[a].words[m][k], high) *
                                                emulated_half(tiles[b].words[k][n], high);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(shape) memcpy(&tiles_shape, shape, sizeof tiles_shape)
#define _tile_release() ((void)0)
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_zero(tile) memset(tiles + (tile), 0, sizeof *tiles)
#define _tile_dpbssd(sums, a, b) emulated_codes(sums, a, b, 1)
#define _tile_dpbsud(sums, a, b) emulated_codes(sums, a, b, 0)
#define _tile_dpbf16ps(sums, a, b) emulated_pairs(sums, a, b)
