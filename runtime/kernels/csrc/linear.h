/* Packed linear layers. An element of the output is one chain over K, whatever the number of rows: a step's first
 * thought is the memory of the weights, which are read once for all rows of a block of up to ROW_BLOCK. */
enum { VECTORS = TILE / VL, ROW_BLOCK = 192, K_BLOCK = 2048 };
enum { LINEAR_ROOM = ROW_BLOCK * 2 * TILE }; /* floats of a thread */
/* Few rows wait for the memory of the weights, which is asked for AHEAD bytes early, into the second cache: more can be
 * on its way there. Where a pass takes one tile of a pair, half as early into the first (measured: bench/LOG.md). */
enum { AHEAD = 2048 };
/* Rows that one pass over the weights takes, with both tiles of a pair and with one: what the registers hold. */
#if VL == 16
enum { ROWS_PAIR = 12, ROWS_ONE = 0 };
#elif VL == 8
enum { ROWS_PAIR = 2, ROWS_ONE = 6 };
#else
enum { ROWS_PAIR = 1, ROWS_ONE = 3 };
#endif
enum { ROWS_MOST = ROWS_PAIR > ROWS_ONE ? ROWS_PAIR : ROWS_ONE, COLUMNS_MOST = 2 * VECTORS };

/* Where there are products of pairs, bfloat16 weights meet inputs that are rounded to bfloat16 too, once for a layer:
 * such a row is k / 2 lanes, which pass for floats here. */
enum { KIND_PAIRS = 4 };
#if defined(PAIRS_OF_BF16)
INLINE int NAME(met_as)(int kind) { return kind == KIND_BF16 ? KIND_PAIRS : kind; }
#else
INLINE int NAME(met_as)(int kind) { return kind; }
#endif

/* The two products of each lane, the second first, added to its sum. Denormals may count as 0. */
INLINE vf NAME(pairs_of)(vf sums, vu weights, vu inputs) {
#if VL == 16 && defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)inputs);
#else
    sums += (vf)(weights & 0xffff0000u) * (vf)(inputs & 0xffff0000u);
    return sums + (vf)(weights << 16) * (vf)(inputs << 16);
#endif
}

static void NAME(pair_row)(const float *x, int k, uint16_t *pairs) {
    for (int i = 0; i < k; i += VL) {
        float some[VL] = {0};
        size_t count = (size_t)(k - i < VL ? k - i : VL);
        memcpy(some, x + i, count * sizeof(float));
        vh rounded = to_bf16(load(some));
        memcpy(pairs + i, &rounded, count * sizeof(uint16_t));
    }
}

/* A line of a tile is a 32-bit lane for each column with so many inputs, the first in the lowest bits. */
INLINE int NAME(inputs_of_line)(int kind) { return kind == KIND_F32 ? 1 : 2; }

static inline int64_t NAME(tile_bytes)(int kind, int64_t k) { return k / NAME(inputs_of_line)(kind) * TILE * 4; }
#define tile_bytes NAME(tile_bytes)

/* Input `i` of a line. */
INLINE vf NAME(weight_in)(int kind, vu lanes, int i) {
    if (kind == KIND_F32) return (vf)lanes;
    return (vf)(i ? lanes & 0xffff0000u : lanes << 16);
}

INLINE void NAME(add_pairs)(int rows, int columns, const float *x, int64_t ldx, const vu *lanes,
                            vf (*acc)[COLUMNS_MOST]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        uint32_t two;
        memcpy(&two, x + r * ldx, sizeof two);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) acc[r][c] = NAME(pairs_of)(acc[r][c], lanes[c], (vu){0} + two);
    }
}

INLINE void NAME(add_products)(int rows, int columns, const float *x, int64_t ldx, const vf *weight,
                               vf (*acc)[COLUMNS_MOST]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vf value = splat(x[r * ldx]);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) acc[r][c] += value * weight[c];
    }
}

/* out[r][c] += sum over k of x[r][k] * w[k][c], for `rows` rows and `tiles` tiles whose weights lie `step` apart; what
 * is `fresh` was nothing before. */
INLINE void NAME(pass)(int kind, int rows, int tiles, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                       float *out, int64_t ldo, int fresh) {
    vf acc[ROWS_MOST][COLUMNS_MOST], weight[COLUMNS_MOST];
    vu lanes[COLUMNS_MOST];
    int inputs = NAME(inputs_of_line)(kind), columns = tiles * VECTORS;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) acc[r][c] = fresh ? splat(0.0f) : load(out + r * ldo + c * VL);
    for (int i = 0; i < k; i += inputs, w += TILE * 4) {
        for (int t = 0; t < tiles; t++)
            if (rows <= ROWS_PAIR)
                __builtin_prefetch(w + t * step + AHEAD, 0, 2);
            else
                __builtin_prefetch(w + t * step + AHEAD / 2);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) lanes[c] = *(const vuu *)(w + c / VECTORS * step + c % VECTORS * VL * 4);
        if (kind == KIND_PAIRS) {
            NAME(add_pairs)(rows, columns, x + i / 2, ldx, lanes, acc);
            continue;
        }
#pragma GCC unroll 8
        for (int j = 0; j < inputs; j++) {
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) weight[c] = NAME(weight_in)(kind, lanes[c], j);
            NAME(add_products)(rows, columns, x + i + j, ldx, weight, acc);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) store(out + r * ldo + c * VL, acc[r][c]);
}

#define CASE(r, tiles)                                                                                                 \
    case r: NAME(pass)(kind, r, tiles, x, ldx, w, step, k, out, ldo, fresh); break;
INLINE void NAME(pass_pair)(int kind, int rows, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                            float *out, int64_t ldo, int fresh) {
    switch (rows) {
        CASE(1, 2)
#if VL >= 8
        CASE(2, 2)
#endif
#if VL == 16
        CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2) CASE(7, 2) CASE(8, 2) CASE(9, 2) CASE(10, 2) CASE(11, 2) CASE(12, 2)
#endif
    }
}

INLINE void NAME(pass_one)(int kind, int rows, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                           float *out, int64_t ldo, int fresh) {
    switch (rows) {
#if VL <= 8
        CASE(1, 1) CASE(2, 1) CASE(3, 1)
#endif
#if VL == 8
        CASE(4, 1) CASE(5, 1) CASE(6, 1)
#endif
    }
}
#undef CASE

/* Rows against one pair of tiles: out[r][0..31] += x[r] . w, or = where `fresh`, in passes of as many rows as the
 * registers hold. */
INLINE void NAME(multiply_kind)(int kind, int rows, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                                float *out, int64_t ldo, int fresh) {
    while (rows > 0) {
        int pair = ROWS_ONE == 0 || (rows <= ROWS_PAIR), most = pair ? ROWS_PAIR : ROWS_ONE;
        int now = rows < most ? rows : most;
        if (pair)
            NAME(pass_pair)(kind, now, x, ldx, w, step, k, out, ldo, fresh);
        else
            for (int half = 0; half < 2; half++)
                NAME(pass_one)(kind, now, x, ldx, w + half * step, step, k, out + half * TILE, ldo, fresh);
        rows -= now, x += now * ldx, out += now * ldo;
    }
}

static void NAME(multiply)(int kind, int rows, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                           float *out, int64_t ldo, int fresh) {
    if (kind == KIND_F32)
        NAME(multiply_kind)(KIND_F32, rows, x, ldx, w, step, k, out, ldo, fresh);
    else
        NAME(multiply_kind)(NAME(met_as)(KIND_BF16), rows, x, ldx, w, step, k, out, ldo, fresh);
}
#define multiply NAME(multiply)

/* Rows from..to of x against pair `pair` of a layer, into buffer[to - from][2 * TILE]. */
static void NAME(linear_pair)(const Linear *layer, int pair, const float *x, int64_t ldx, int from, int to,
                              float *buffer) {
    int64_t bytes = tile_bytes(layer->kind, layer->k);
    const char *tiles = (const char *)layer->data + 2 * pair * bytes;
    int each = NAME(met_as)(layer->kind) == KIND_PAIRS ? 2 : 1; /* inputs of an element of x */
    for (int k = 0; k < layer->k; k += K_BLOCK) {
        int now = layer->k - k < K_BLOCK ? layer->k - k : K_BLOCK;
        multiply(layer->kind, to - from, x + from * ldx + k / each, ldx, tiles + tile_bytes(layer->kind, k), bytes, now,
                 buffer, 2 * TILE, k == 0);
    }
}
#define linear_pair NAME(linear_pair)

#include "coded.h"

/* What becomes of a layer's output. */
enum { PUT = 0, ADD = 1, GATE = 2 };

/* PUT: out = y + bias, over n columns. ADD: out += y + bias. GATE: out = silu(even tiles) * odd tiles, n / 2 columns. */
static void NAME(finish)(const Linear *layer, int pair, int from, int to, const float *buffer, int how, float *out,
                         int64_t ldo) {
    int width = how == GATE ? TILE : 2 * TILE, left = (how == GATE ? layer->n / 2 : layer->n) - pair * width;
    size_t size = (size_t)(left < width ? left : width) * sizeof(float);
    for (int r = from; r < to; r++) {
        const float *y = buffer + (r - from) * 2 * TILE;
        float *row = out + r * ldo + pair * width, done[2 * TILE] = {0};
        if (how == ADD) memcpy(done, row, size);
        for (int c = 0; c < width; c += VL) {
            vf value = load(y + c);
            if (how == GATE)
                value = value / (expv(-value) + 1.0f) * load(y + TILE + c);
            else if (layer->bias)
                value += load(layer->bias + pair * width + c);
            store(done + c, load(done + c) + value);
        }
        memcpy(row, done, size);
    }
}

static inline int NAME(pairs)(const Linear *layer) { return (layer->n + 2 * TILE - 1) / (2 * TILE); }

/* Bytes of a row of inputs as a layer may want them. */
INLINE int64_t NAME(input_row)(int64_t k) { return coded_row(k) > 2 * k ? coded_row(k) : 2 * k; }

/* A stage: every pair of tiles with every block of rows is a task; inputs are more than a pair's weights, so they are
 * what stays in the cache from one task to the next. Coded layers make `codes` of their inputs first, pairs likewise. */
static void NAME(linear_stage)(Team *team, char *mine, const Linear *layer, const float *x, int64_t ldx, int rows,
                               int how, float *out, int64_t ldo, int8_t *codes) {
    int pairs = NAME(pairs)(layer), tasks = (rows + ROW_BLOCK - 1) / ROW_BLOCK * pairs;
    float *buffer = (float *)mine;
    if (is_coded(layer->kind)) {
        NAME(code_stage)(team, x, ldx, rows, layer->k, codes);
        meet(team);
    } else if (NAME(met_as)(layer->kind) == KIND_PAIRS) {
        uint16_t *rounded = (uint16_t *)codes;
        for (int r = take(team); r < rows; r = take(team))
            NAME(pair_row)(x + r * ldx, layer->k, rounded + (int64_t)r * layer->k);
        meet(team);
        x = (const float *)rounded, ldx = layer->k / 2;
    }
    for (int task = take(team); task < tasks; task = take(team)) {
        int pair = task % pairs, from = task / pairs * ROW_BLOCK, to = from + ROW_BLOCK < rows ? from + ROW_BLOCK : rows;
        if (is_coded(layer->kind))
            NAME(coded_pair)(layer, pair, codes, from, to, buffer);
        else
            linear_pair(layer, pair, x, ldx, from, to, buffer);
        NAME(finish)(layer, pair, from, to, buffer, how, out, ldo);
    }
}
#define linear_stage NAME(linear_stage)
