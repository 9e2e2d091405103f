/* Attention of chunks: a block of queries with a block of keys at a time, as two small matrix products. Keys are cut at
 * multiples of CHUNK_KEYS, wherever a chunk or its window begins. */
enum { CHUNK_KEYS = 4 * TILE, MOST_ROWS = 384, LEAST_ROWS = 48 };

/* What a task works with. A row is a query of one head; those of a position follow one another. */
typedef struct {
    int row, kv_head, position, rows; /* of the step; of the first query; queries times heads */
    int kind, each;                   /* what keys and values are as weights; how many a line of a tile holds */
    int lines, width;                 /* of dim; columns of `out`: pairs of tiles */
    float scale;                      /* as of Attention */
    float *query, *scores, *out;      /* [rows][dim]; [rows][CHUNK_KEYS]; [rows][width]; pairs in a row's first half */
    float *keys, *values;             /* tiles: [CHUNK_KEYS / TILE][lines][TILE], [width / TILE][CHUNK_KEYS / each][TILE] */
    float *most, *total;              /* [rows] references of the weights; [rows][VL] sums of the weights */
} NAME(Chunk);
#define Chunk NAME(Chunk)

/* VL keys as columns of a tile. */
INLINE void NAME(pack_keys)(const void *cells, int kind, const int64_t *at, int dim, float *tile) {
    vf lanes[VL];
    int d = 0;
    for (; d + VL <= dim; d += VL) {
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++) lanes[j] = load_kind(cells, kind, at[j] + d);
        transpose(lanes);
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) store(tile + (d + i) * TILE, lanes[i]);
    }
    for (; d < dim; d++)
        for (int j = 0; j < VL; j++) tile[d * TILE + j] = NAME(scalar)(cells, kind, at[j] + d);
}

INLINE void NAME(pack_value)(const void *cells, int kind, int64_t at, int dim, float *tiles) {
    int d = 0;
    for (; d + VL <= dim; d += VL) store(tiles + d / TILE * CHUNK_KEYS * TILE + d % TILE, load_kind(cells, kind, at + d));
    for (; d < dim; d++) tiles[d / TILE * CHUNK_KEYS * TILE + d % TILE] = NAME(scalar)(cells, kind, at + d);
}

/* The same of pairs of numbers in bfloat16, as a lane each: of a key, or of two values that follow one another. */
INLINE void NAME(pack_key_pairs)(const uint16_t *cells, const int64_t *at, int dim, float *tile) {
    vf lanes[VL];
    int d = 0;
    for (; d + 2 * VL <= dim; d += 2 * VL) {
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++) lanes[j] = load((const float *)(cells + at[j] + d));
        transpose(lanes);
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) store(tile + (d / 2 + i) * TILE, lanes[i]);
    }
    for (; d < dim; d += 2)
        for (int j = 0; j < VL; j++) {
            uint16_t two[2] = {cells[at[j] + d], d + 1 < dim ? cells[at[j] + d + 1] : 0};
            memcpy(tile + d / 2 * TILE + j, two, sizeof two);
        }
}

INLINE void NAME(pack_value_pair)(const uint16_t *one, const uint16_t *other, int dim, float *tiles) {
    int d = 0;
    for (; d + VL <= dim; d += VL) {
        vu lanes = widened(*(const vhu *)(one + d)) | widened(*(const vhu *)(other + d)) << 16;
        store(tiles + d / TILE * (CHUNK_KEYS / 2) * TILE + d % TILE, (vf)lanes);
    }
    for (; d < dim; d++) {
        uint16_t two[2] = {one[d], other[d]};
        memcpy(tiles + d / TILE * (CHUNK_KEYS / 2) * TILE + d % TILE, two, sizeof two);
    }
}

/* `count` keys and values from `begin` on. The last is repeated up to a whole pair of tiles, seen by nobody. */
INLINE void NAME(pack_block)(const Attention *a, const Chunk *c, int met, int begin, int count) {
    int64_t at[CHUNK_KEYS];
    int dim = a->model->head_dim, padded = (count + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
    NAME(find_block)(a, c->row, c->kv_head, begin, count, 1, at);
    for (int j = count; j < padded; j++) at[j] = at[count - 1];
    for (int j = 0; j < padded; j += VL) {
        float *tile = c->keys + j / TILE * c->lines * TILE + j % TILE;
        if (met == KIND_PAIRS)
            NAME(pack_key_pairs)(a->keys, at + j, dim, tile);
        else
            NAME(pack_keys)(a->keys, met, at + j, dim, tile);
    }
    const uint16_t *values = a->values;
    for (int j = 0; j < count; j += c->each)
        if (met == KIND_PAIRS)
            NAME(pack_value_pair)(values + at[j], values + at[j + 1], dim, c->values + j / 2 * TILE);
        else
            NAME(pack_value)(a->values, met, at[j], dim, c->values + j * TILE);
}

static void NAME(pack_kind)(const Attention *a, const Chunk *c, int begin, int count) {
    if (a->model->kv_kind == KIND_BF16)
        NAME(pack_block)(a, c, NAME(met_as)(KIND_BF16), begin, count);
    else
        NAME(pack_block)(a, c, KIND_F32, begin, count);
}

/* Scores of row `r` that are not of keys from..to - 1 become those of keys that nobody sees. */
INLINE void NAME(hide)(float *scores, int size, int from, int to) {
    for (int j = 0; j < size; j += VL) {
        vi at = iota() + j;
        store(scores + j, choose((at >= from) & (at < to), load(scores + j), splat(-INFINITY)));
    }
}

INLINE float NAME(largest_of)(const float *scores, int size) {
    vf high = load(scores);
    for (int j = VL; j < size; j += VL) high = larger(load(scores + j), high);
    return largest(high);
}

/* The first `size` scores of a row become weights against `most`; returns their sums. */
INLINE vf NAME(soften)(const Chunk *c, float *p, int size, int whole, float most) {
    vf total = splat(0.0f);
    for (int j = 0; j < size; j += VL) {
        vf score = load(p + j), weight = exp2v(score * c->scale - most);
        if (!whole) weight = choose(score == -INFINITY, splat(0.0f), weight);
        total += NAME(keep)(c->each == 2, p, j, weight);
    }
    return total;
}

/* The first `size` scores of rows from..to - 1 become weights; what stays `whole` has no hidden ones. Largest scores
 * come first, as a row's weights wait for its own. */
INLINE void NAME(soften_rows)(const Chunk *c, int from, int to, int size, int whole) {
    for (int r = from; r < to; r++) {
        float here = NAME(largest_of)(c->scores + r * CHUNK_KEYS, size) * c->scale;
        if (here > c->most[r] + SLACK)
            NAME(refer)(c->most + r, here, c->total + r * VL, c->out + (int64_t)r * c->width, c->width);
    }
    for (int r = from; r < to; r++) {
        vf total = NAME(soften)(c, c->scores + r * CHUNK_KEYS, size, whole, c->most[r]);
        store(c->total + r * VL, load(c->total + r * VL) + total);
    }
}

/* Scores of rows from..to - 1 with the first `count` keys of the block at `begin`, made weights. */
static void NAME(score_rows)(const Attention *a, const Chunk *c, int from, int to, int begin, int count) {
    int dim = a->model->head_dim, group = a->model->heads / a->model->kv_heads, size = (count + VL - 1) / VL * VL;
    float *scores = c->scores + from * CHUNK_KEYS;
    for (int j = 0; j < count; j += 2 * TILE)
        multiply(c->kind, to - from, c->query + (int64_t)from * dim, dim, (const char *)(c->keys + j * c->lines),
                 (int64_t)c->lines * TILE * 4, c->lines * c->each, scores + j, CHUNK_KEYS, 1);
    if (NAME(first_key)(a, c->position + (to - 1) / group) <= begin && c->position + from / group + 1 - begin >= size) {
        NAME(soften_rows)(c, from, to, size, 1);
        return;
    }
    for (int r = from; r < to; r++) {
        int at = c->position + r / group;
        NAME(hide)(c->scores + r * CHUNK_KEYS, size, NAME(first_key)(a, at) - begin, at + 1 - begin);
    }
    NAME(soften_rows)(c, from, to, size, 0);
}

/* Rows from..to - 1 gather the first `count` values by their weights. */
static void NAME(weigh_rows)(const Chunk *c, int from, int to, int count) {
    for (int d = 0; d < c->width; d += 2 * TILE)
        multiply(c->kind, to - from, c->scores + from * CHUNK_KEYS, CHUNK_KEYS,
                 (const char *)(c->values + d * CHUNK_KEYS / c->each), CHUNK_KEYS / c->each * TILE * 4,
                 (count + c->each - 1) / c->each * c->each, c->out + (int64_t)from * c->width + d, c->width, 0);
}

/* A block of keys with the rows that see any of it, as many at a time as the registers hold, up to the last key that
 * these see. */
static void NAME(chunk_block)(const Attention *a, const Chunk *c, int begin, int there) {
    int group = a->model->heads / a->model->kv_heads, window = a->model->window, from = 0, to = c->rows;
    NAME(pack_kind)(a, c, begin, there);
    if (begin > c->position) from = (begin - c->position) * group;
    if (window && begin + CHUNK_KEYS + window - 1 - c->position < to / group)
        to = (begin + CHUNK_KEYS + window - 1 - c->position) * group;
    for (int pass = 0; pass < 2; pass++)
        for (int r = from; r < to; r += ROWS_MOST) {
            int end = r + ROWS_MOST < to ? r + ROWS_MOST : to, seen = c->position + (end - 1) / group + 1 - begin;
            if (seen > there) seen = there;
            if (pass)
                NAME(weigh_rows)(c, r, end, seen);
            else
                NAME(score_rows)(a, c, r, end, begin, seen);
        }
}

/* Where everything lies in a thread's scratch; returns the number of floats. */
static int64_t NAME(chunk_room)(const Model *m, int rows, float *at, Chunk *c) {
    int width = (m->head_dim + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
    c->kind = NAME(met_as)(m->kv_kind) == KIND_PAIRS ? KIND_BF16 : KIND_F32, c->each = c->kind == KIND_BF16 ? 2 : 1;
    c->lines = (m->head_dim + c->each - 1) / c->each;
    float **where[] = {&c->keys, &c->values, &c->scores, &c->out, &c->query, &c->total, &c->most};
    int64_t sizes[] = {CHUNK_KEYS * m->head_dim, CHUNK_KEYS * width, rows * CHUNK_KEYS, rows * width,
                       rows * m->head_dim, rows * VL, rows}, all = 0;
    for (int i = 0; i < 7; all += sizes[i++]) *where[i] = at ? at + all : NULL;
    c->rows = rows, c->width = width;
    return all;
}

static void NAME(begin_rows)(const Attention *a, const Chunk *c, int token) {
    const Model *m = a->model;
    int dim = m->head_dim, group = m->heads / m->kv_heads;
    memset(c->query, 0, (size_t)c->rows * dim * sizeof(float));
    for (int r = 0; r < c->rows; r++) {
        const float *from = a->qkv + (token + r / group) * a->ld + (int64_t)(c->kv_head * group + r % group) * dim;
        float *query = c->query + (int64_t)r * dim;
        if (c->each == 2)
            NAME(pair_row)(from, dim, (uint16_t *)query);
        else
            memcpy(query, from, (size_t)dim * sizeof(float));
        c->most[r] = -INFINITY;
    }
    memset(c->total, 0, (size_t)c->rows * VL * sizeof(float));
    memset(c->out, 0, (size_t)c->rows * c->width * sizeof(float));
    memset(c->values, 0, (size_t)c->width * CHUNK_KEYS * sizeof(float));
}

static void NAME(end_rows)(const Attention *a, const Chunk *c, int token) {
    const Model *m = a->model;
    int dim = m->head_dim, group = m->heads / m->kv_heads;
    for (int r = 0; r < c->rows; r++) {
        float *to = a->out + ((int64_t)(token + r / group) * m->heads + c->kv_head * group + r % group) * dim;
        float total = sum(load(c->total + r * VL));
        for (int d = 0; d < dim; d++) to[d] = c->out[(int64_t)r * c->width + d] / total;
    }
}

/* `count` queries of a chunk row from token `token`, at `position`, with one KV head. */
static void NAME(chunk_task)(const Attention *a, int row, int head, int token, int position, int count, float *mine) {
    Chunk c = {.row = row, .kv_head = head, .position = position, .scale = a->scale};
    int last = position + count;
    NAME(chunk_room)(a->model, count * (a->model->heads / a->model->kv_heads), mine, &c);
    NAME(begin_rows)(a, &c, token);
    for (int begin = NAME(first_key)(a, position) / CHUNK_KEYS * CHUNK_KEYS; begin < last; begin += CHUNK_KEYS)
        NAME(chunk_block)(a, &c, begin, last - begin < CHUNK_KEYS ? last - begin : CHUNK_KEYS);
    NAME(end_rows)(a, &c, token);
}

/* Queries of a task whose rows are `rows`. */
static inline int NAME(chunk_queries)(const Model *m, int rows) {
    int group = m->heads / m->kv_heads;
    return rows / group > 0 ? rows / group : 1;
}

static int64_t NAME(chunk_floats)(const Model *m) {
    Chunk c;
    return NAME(chunk_room)(m, NAME(chunk_queries)(m, MOST_ROWS) * (m->heads / m->kv_heads), NULL, &c);
}

/* Large blocks of queries, which share the packing of keys, unless that leaves threads without work. */
static void NAME(cut_chunks)(Attention *a, int threads) {
    const Step *step = a->step;
    for (int rows = MOST_ROWS; rows >= LEAST_ROWS; rows /= 2) {
        a->queries = NAME(chunk_queries)(a->model, rows), a->blocks = 0;
        for (int row = step->decode; row < step->rows; row++)
            a->blocks += (step->query_lens[row] + a->queries - 1) / a->queries;
        if (a->blocks * a->model->kv_heads >= MANY_TASKS * threads) return;
    }
}
