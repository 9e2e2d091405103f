/* Packed linear layers. An element of the output is one chain over K, whatever the number of rows: a step's first
 * thought is the memory of the weights, which are read once for all rows of a block of up to ROW_BLOCK. */
enum { VECTORS = TILE / VL, ROW_BLOCK = 192, K_BLOCK = 2048, MANY_ROWS = 12, MANY_CODED = 7, WIDE_BLOCK = 64 };
enum { LINEAR_ROOM = (ROW_BLOCK + WIDE_BLOCK) * 2 * TILE }; /* floats of a thread */
/* Few rows wait for the memory of the weights, which is asked for AHEAD bytes early (measured: bench/LOG.md). */
enum { FEW_ROWS = 6, AHEAD = 1024 };
/* Rows that one pass over the weights takes, with both tiles of a pair and with one: what the registers hold. */
#if VL == 16
enum { ROWS_PAIR = 12, ROWS_ONE = 0 };
#elif VL == 8
enum { ROWS_PAIR = 2, ROWS_ONE = 6 };
#else
enum { ROWS_PAIR = 1, ROWS_ONE = 3 };
#endif
enum { ROWS_MOST = ROWS_PAIR > ROWS_ONE ? ROWS_PAIR : ROWS_ONE, COLUMNS_MOST = 2 * VECTORS };

/* A line of a tile is a 32-bit lane for each column with so many inputs, the first in the lowest bits. */
INLINE int NAME(inputs_of_line)(int kind) {
    return kind == KIND_F32 ? 1 : kind == KIND_BF16 ? 2 : kind == KIND_INT8 ? 4 : 8;
}

/* Scales and offsets of a group come before its lines. */
INLINE int NAME(header_bytes)(int kind) { return kind == KIND_INT8 ? TILE * 2 : kind == KIND_INT4 ? TILE * 4 : 0; }

static inline int64_t NAME(tile_bytes)(int kind, int64_t k) {
    return k / NAME(inputs_of_line)(kind) * TILE * 4 + k / GROUP * NAME(header_bytes)(kind);
}
#define tile_bytes NAME(tile_bytes)

/* What turns a code into a weight, for VL columns. An int8 code is signed and has no offset. */
typedef struct { vf scale, offset; } NAME(Group);
#define Group NAME(Group)

INLINE Group NAME(group_at)(int kind, const char *header, int column) {
    Group group = {load_f16((const uint16_t *)header + column), splat(0.0f)};
    if (kind == KIND_INT4) group.offset = load_f16((const uint16_t *)header + TILE + column);
    return group;
}

/* Input `i` of a line. */
INLINE vf NAME(weight_in)(int kind, vu lanes, int i, Group group) {
    if (kind == KIND_F32) return (vf)lanes;
    if (kind == KIND_BF16) return (vf)(i ? lanes & 0xffff0000u : lanes << 16);
    if (kind == KIND_INT8) return __builtin_convertvector((vi)(lanes << (24 - 8 * i)) >> 24, vf) * group.scale;
    return __builtin_convertvector((vi)(lanes >> 4 * i & 15), vf) * group.scale + group.offset;
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

/* acc[r][c] += sum over k of x[r][k] * w[k][c], for `rows` rows and `tiles` tiles whose weights lie `step` apart. */
INLINE void NAME(pass)(int kind, int rows, int tiles, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                       float *out, int64_t ldo) {
    vf acc[ROWS_MOST][COLUMNS_MOST], weight[COLUMNS_MOST];
    vu lanes[COLUMNS_MOST];
    Group group[COLUMNS_MOST];
    int inputs = NAME(inputs_of_line)(kind), columns = tiles * VECTORS, coded = NAME(header_bytes)(kind) > 0;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) acc[r][c] = load(out + r * ldo + c * VL);
    for (int i = 0; i < k; i += inputs, w += TILE * 4) {
        if (coded && i % GROUP == 0) {
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++)
                group[c] = NAME(group_at)(kind, w + c / VECTORS * step, c % VECTORS * VL);
            w += NAME(header_bytes)(kind);
        }
        if (rows <= FEW_ROWS)
            for (int t = 0; t < tiles; t++) __builtin_prefetch(w + t * step + AHEAD);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) lanes[c] = *(const vuu *)(w + c / VECTORS * step + c % VECTORS * VL * 4);
#pragma GCC unroll 8
        for (int j = 0; j < inputs; j++) {
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) weight[c] = NAME(weight_in)(kind, lanes[c], j, group[c]);
            NAME(add_products)(rows, columns, x + i + j, ldx, weight, acc);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) store(out + r * ldo + c * VL, acc[r][c]);
}

#define CASE(r, tiles)                                                                                                 \
    case r: NAME(pass)(kind, r, tiles, x, ldx, w, step, k, out, ldo); break;
INLINE void NAME(pass_pair)(int kind, int rows, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                            float *out, int64_t ldo) {
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
                           float *out, int64_t ldo) {
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

/* Rows against one pair of tiles: out[r][0..31] += x[r] . w, in passes of as many rows as the registers hold. */
INLINE void NAME(multiply_kind)(int kind, int rows, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                                float *out, int64_t ldo) {
    while (rows > 0) {
        int pair = ROWS_ONE == 0 || (rows <= ROWS_PAIR && kind != KIND_INT4), most = pair ? ROWS_PAIR : ROWS_ONE;
        int now = rows < most ? rows : most;
        if (pair)
            NAME(pass_pair)(kind, now, x, ldx, w, step, k, out, ldo);
        else
            for (int half = 0; half < 2; half++)
                NAME(pass_one)(kind, now, x, ldx, w + half * step, step, k, out + half * TILE, ldo);
        rows -= now, x += now * ldx, out += now * ldo;
    }
}

static void NAME(multiply)(int kind, int rows, const float *x, int64_t ldx, const char *w, int64_t step, int k,
                           float *out, int64_t ldo) {
    switch (kind) {
    case KIND_F32: NAME(multiply_kind)(KIND_F32, rows, x, ldx, w, step, k, out, ldo); break;
    case KIND_BF16: NAME(multiply_kind)(KIND_BF16, rows, x, ldx, w, step, k, out, ldo); break;
    case KIND_INT8: NAME(multiply_kind)(KIND_INT8, rows, x, ldx, w, step, k, out, ldo); break;
    case KIND_INT4: NAME(multiply_kind)(KIND_INT4, rows, x, ldx, w, step, k, out, ldo); break;
    }
}
#define multiply NAME(multiply)

/* `k` inputs of one tile as float: the same numbers in the same order. Asks for the block that comes next. */
INLINE void NAME(widen_kind)(int kind, const char *tile, int k, float *out) {
    int inputs = NAME(inputs_of_line)(kind), coded = NAME(header_bytes)(kind) > 0;
    int64_t block = tile_bytes(kind, WIDE_BLOCK);
    Group group[VECTORS];
    for (int i = 0; i < k; i += inputs, tile += TILE * 4) {
        if (coded && i % GROUP == 0) {
            for (int c = 0; c < VECTORS; c++) group[c] = NAME(group_at)(kind, tile, c * VL);
            tile += NAME(header_bytes)(kind);
        }
        __builtin_prefetch(tile + block);
        for (int c = 0; c < VECTORS; c++) {
            vu lanes = *(const vuu *)(tile + c * VL * 4);
#pragma GCC unroll 8
            for (int j = 0; j < inputs; j++)
                store(out + (i + j) * TILE + c * VL, NAME(weight_in)(kind, lanes, j, group[c]));
        }
    }
}

static void NAME(widen)(int kind, const char *tile, int k, float *out) {
    switch (kind) {
    case KIND_BF16: NAME(widen_kind)(KIND_BF16, tile, k, out); break;
    case KIND_INT8: NAME(widen_kind)(KIND_INT8, tile, k, out); break;
    case KIND_INT4: NAME(widen_kind)(KIND_INT4, tile, k, out); break;
    }
}

/* Rows from..to of x against pair `pair` of a layer, into buffer[to - from][2 * TILE]; `wide` is room for a block of
 * weights in float, which many rows share. */
static void NAME(linear_pair)(const Linear *layer, int pair, const float *x, int64_t ldx, int from, int to,
                              float *buffer, float *wide) {
    int rows = to - from, many = NAME(header_bytes)(layer->kind) ? MANY_CODED : MANY_ROWS;
    int widens = layer->kind != KIND_F32 && rows >= many, size = widens ? WIDE_BLOCK : K_BLOCK;
    int64_t bytes = tile_bytes(layer->kind, layer->k);
    const char *tiles = (const char *)layer->data + 2 * pair * bytes;
    memset(buffer, 0, (size_t)rows * 2 * TILE * sizeof(float));
    for (int k = 0; k < layer->k; k += size) {
        int now = layer->k - k < size ? layer->k - k : size;
        const char *block = tiles + tile_bytes(layer->kind, k);
        if (widens) {
            for (int half = 0; half < 2; half++) NAME(widen)(layer->kind, block + half * bytes, now, wide + half * WIDE_BLOCK * TILE);
            multiply(KIND_F32, rows, x + from * ldx + k, ldx, (const char *)wide, WIDE_BLOCK * TILE * 4, now, buffer,
                     2 * TILE);
        } else
            multiply(layer->kind, rows, x + from * ldx + k, ldx, block, bytes, now, buffer, 2 * TILE);
    }
}
#define linear_pair NAME(linear_pair)

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

/* A stage: every pair of tiles with every block of rows is a task. */
static void NAME(linear_stage)(Team *team, char *mine, const Linear *layer, const float *x, int64_t ldx, int rows,
                               int how, float *out, int64_t ldo) {
    int blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, tasks = NAME(pairs)(layer) * blocks;
    for (int task = take(team); task < tasks; task = take(team)) {
        int from = task % blocks * ROW_BLOCK, to = from + ROW_BLOCK < rows ? from + ROW_BLOCK : rows;
        linear_pair(layer, task / blocks, x, ldx, from, to, (float *)mine, (float *)mine + ROW_BLOCK * 2 * TILE);
        NAME(finish)(layer, task / blocks, from, to, (const float *)mine, how, out, ldo);
    }
}
#define linear_stage NAME(linear_stage)
