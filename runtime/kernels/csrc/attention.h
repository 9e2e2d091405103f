/* Attention over paged keys and values. Softmax is taken online, block of keys by block of keys (Milakov and
 * Gimelshein 2018; FlashAttention, Dao et al. 2022). A decode row's keys are cut into parts of PART, whatever the
 * number of threads, which are joined in order (Flash-Decoding, Dao et al. 2023). */
enum { KEYS = 2 * TILE, QUERY_ROWS = 96, MANY_TASKS = 4 }; /* of a thread */

typedef struct {
    const Model *model;
    const Step *step;
    const void *keys, *values;
    const float *qkv; /* [T][ld]: queries in front */
    int64_t ld;
    float *out;       /* [T][heads * head_dim] */
    float *parts;     /* of decode rows: [row, kv head, part][group][head_dim + 2] */
    int most_parts, blocks, queries; /* parts of the longest decode row; blocks of `queries` of all chunk rows */
    int task_heads; /* KV heads of a decode task: all, side by side in memory, unless that leaves threads without work */
    float scale;
} NAME(Attention);
#define Attention NAME(Attention)

static inline int64_t NAME(cell)(const Attention *a, int row, int position) {
    int size = a->model->block_size;
    return (int64_t)a->step->page_table[(int64_t)row * a->step->pages + position / size] * size + position % size;
}

static inline int NAME(first_key)(const Attention *a, int position) {
    int window = a->model->window;
    return window && position >= window ? position - window + 1 : 0;
}

/* `count` keys or values of one KV head as float, [count][dim]. Asks for those of the next block: pages lie anywhere,
 * which no hardware foresees. */
INLINE void NAME(gather)(const void *cells, int kind, const int64_t *at, int count, const int64_t *next, int coming,
                         int dim, float *out) {
    int size = kind == KIND_BF16 ? 2 : 4;
    for (int j = 0; j < count; j++) {
        const char *from = (const char *)cells + at[j] * size, *ahead = (const char *)cells + next[j] * size;
        float *to = out + j * dim;
        int d = 0;
        if (j < coming)
            for (int line = 0; line < dim * size; line += 64) __builtin_prefetch(ahead + line);
#pragma GCC unroll 4
        for (; d + VL <= dim; d += VL) store(to + d, load_kind(from, kind, d));
        for (; d < dim; d++) to[d] = NAME(scalar)(from, kind, d);
    }
}

static void NAME(gather_bf16)(const void *cells, const int64_t *at, int count, const int64_t *next, int coming, int dim,
                              float *out) {
    NAME(gather)(cells, KIND_BF16, at, count, next, coming, dim, out);
}

static void NAME(gather_f32)(const void *cells, const int64_t *at, int count, const int64_t *next, int coming, int dim,
                             float *out) {
    NAME(gather)(cells, KIND_F32, at, count, next, coming, dim, out);
}

/* One query against VL keys, [VL][dim]: a score in each lane. */
INLINE vf NAME(score)(const float *query, const float *keys, int dim) {
    vf lanes[VL];
    int d = 0;
#pragma GCC unroll 16
    for (int j = 0; j < VL; j++) lanes[j] = splat(0.0f);
    for (; d + VL <= dim; d += VL) {
        vf q = load(query + d);
#pragma GCC unroll 16
        for (int j = 0; j < VL; j++) lanes[j] += q * load(keys + j * dim + d);
    }
    vf scores = sums(lanes);
    for (; d < dim; d++)
        for (int j = 0; j < VL; j++) scores[j] += query[d] * keys[j * dim + d];
    return scores;
}

/* Scores to weights against the largest so far, in place; `all` gathers their sum. Keys outside from..to have none. */
INLINE void NAME(weights_of)(float *p, int from, int to, float scale, float *most, vf *all) {
    vf high = splat(*most);
    for (int j = 0; j < KEYS; j += VL) {
        vi at = iota() + j;
        vf score = choose((at >= from) & (at < to), load(p + j) * scale, splat(-INFINITY));
        store(p + j, score);
        high = larger(score, high);
    }
    *most = largest(high);
    *all = splat(0.0f);
    for (int j = 0; j < KEYS; j += VL) {
        vf e = *most == -INFINITY ? splat(0.0f) : expv(load(p + j) - *most);
        store(p + j, e);
        *all += e;
    }
}

/* out = out * shrink + sum over j of p[j] * values[j], for `vectors` vectors of columns from d on. */
INLINE void NAME(weigh_columns)(int vectors, const float *p, const float *values, int count, int dim, int d,
                                float shrink, float *out) {
    vf acc[8];
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) acc[i] = load(out + d + i * VL) * shrink;
    for (int j = 0; j < count; j++)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) acc[i] += p[j] * load(values + j * dim + d + i * VL);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) store(out + d + i * VL, acc[i]);
}

INLINE void NAME(weigh)(const float *p, const float *values, int count, int dim, float shrink, float *out) {
    int d = 0;
    for (; d + 8 * VL <= dim; d += 8 * VL) NAME(weigh_columns)(8, p, values, count, dim, d, shrink, out);
    for (; d + 4 * VL <= dim; d += 4 * VL) NAME(weigh_columns)(4, p, values, count, dim, d, shrink, out);
    for (; d < dim; d++) {
        float one = out[d] * shrink;
        for (int j = 0; j < count; j++) one += p[j] * values[j * dim + d];
        out[d] = one;
    }
}

/* Where the keys of `count` positions begin, of KV head `head`. */
INLINE void NAME(find_block)(const Attention *a, int row, int head, int begin, int count, int64_t *at) {
    for (int j = 0; j < count; j++)
        at[j] = (NAME(cell)(a, row, begin + j) * a->model->kv_heads + head) * a->model->head_dim;
}

/* One block of keys and values, [count][dim], added to what a KV head's queries have gathered. */
INLINE void NAME(decode_block)(const Attention *a, const float *query, const float *keys, const float *values, int count,
                               float *out) {
    const Model *m = a->model;
    int dim = m->head_dim, group = m->heads / m->kv_heads;
    for (int g = 0; g < group; g++) {
        float *o = out + g * (dim + 2), most = o[dim], p[KEYS];
        vf total;
        for (int j = 0; j < count; j += VL) store(p + j, NAME(score)(query + g * dim, keys + j * dim, dim));
        NAME(weights_of)(p, 0, count, a->scale, &most, &total);
        float shrink = expf(o[dim] - most);
        o[dim] = most, o[dim + 1] = o[dim + 1] * shrink + sum(total);
        NAME(weigh)(p, values, count, dim, shrink, o);
    }
}

static float *NAME(part_of)(const Attention *a, int row, int head, int part) {
    const Model *m = a->model;
    int64_t index = ((int64_t)row * m->kv_heads + head) * a->most_parts + part;
    return a->parts + index * (m->heads / m->kv_heads) * (m->head_dim + 2);
}

/* One part of a decode row, keys from..to, with `heads` KV heads from `head`, whose keys lie side by side: the weighted
 * values of each query head, unnormed, then maximum and sum. */
static void NAME(decode_part)(const Attention *a, int row, int part, int head, int heads, int from, int to, float *mine) {
    const Model *m = a->model;
    int dim = m->head_dim, group = m->heads / m->kv_heads;
    float *keys = mine, *values = mine + KEYS * dim;
    int64_t at[2][KEYS] = {{0}}; /* of this block and of the next one, by turns */
    void (*gather)(const void *, const int64_t *, int, const int64_t *, int, int, float *) =
        m->kv_kind == KIND_BF16 ? NAME(gather_bf16) : NAME(gather_f32);
    for (int h = head; h < head + heads; h++)
        for (int g = 0; g < group; g++) {
            float *o = NAME(part_of)(a, row, h, part) + g * (dim + 2);
            memset(o, 0, (size_t)dim * sizeof(float));
            o[dim] = -INFINITY, o[dim + 1] = 0;
        }
    NAME(find_block)(a, row, head, from, to - from < KEYS ? to - from : KEYS, at[0]);
    for (int begin = from, turn = 0; begin < to; begin += KEYS, turn ^= 1) {
        int count = to - begin < KEYS ? to - begin : KEYS;
        int next = to - begin - count < KEYS ? to - begin - count : KEYS;
        NAME(find_block)(a, row, head, begin + count, next, at[turn ^ 1]);
        for (int h = head; h < head + heads; h++) {
            gather(a->keys, at[turn], count, at[turn ^ 1], next, dim, keys);
            gather(a->values, at[turn], count, at[turn ^ 1], next, dim, values);
            NAME(decode_block)(a, a->qkv + row * a->ld + (int64_t)h * group * dim, keys, values, count,
                               NAME(part_of)(a, row, h, part));
            for (int j = 0; j < KEYS; j++) at[0][j] += dim, at[1][j] += dim;
        }
        for (int j = 0; j < next; j++) at[turn ^ 1][j] -= heads * dim;
    }
}

static inline int NAME(num_parts)(const Attention *a, int row) {
    int last = a->step->seq_lens[row] - 1;
    return (last - NAME(first_key)(a, last)) / PART + 1;
}

static void NAME(decode_task)(const Attention *a, int task, float *mine) {
    int heads = a->task_heads, groups = a->model->kv_heads / heads;
    int part = task % a->most_parts, head = task / a->most_parts % groups * heads, row = task / a->most_parts / groups;
    if (part >= NAME(num_parts)(a, row)) return;
    int length = a->step->seq_lens[row], from = NAME(first_key)(a, length - 1) + part * PART;
    NAME(decode_part)(a, row, part, head, heads, from, from + PART < length ? from + PART : length, mine);
}

/* The parts of one row and KV head joined into its output. */
static void NAME(join)(const Attention *a, int row, int head) {
    const Model *m = a->model;
    int dim = m->head_dim, group = m->heads / m->kv_heads, parts = NAME(num_parts)(a, row);
    for (int g = 0; g < group; g++) {
        float most = -INFINITY, total = 0, *out = a->out + ((int64_t)row * m->heads + head * group + g) * dim;
        for (int i = 0; i < parts; i++) {
            float here = NAME(part_of)(a, row, head, i)[g * (dim + 2) + dim];
            most = here > most ? here : most;
        }
        memset(out, 0, (size_t)dim * sizeof(float));
        for (int i = 0; i < parts; i++) {
            const float *o = NAME(part_of)(a, row, head, i) + g * (dim + 2);
            float weight = expf(o[dim] - most);
            total += weight * o[dim + 1];
            for (int d = 0; d < dim; d++) out[d] += weight * o[d];
        }
        for (int d = 0; d < dim; d++) out[d] /= total;
    }
}

/* A block of keys as [dim][TILE] twice, and of values as tiles [KEYS][TILE], in float; what is not there is 0. */
static void NAME(pack_block)(const Attention *a, int row, int head, int begin, int count, float *keys, float *values) {
    const Model *m = a->model;
    int dim = m->head_dim, tiles = (dim + TILE - 1) / TILE;
    memset(keys, 0, (size_t)dim * KEYS * sizeof(float));
    memset(values, 0, (size_t)tiles * TILE * KEYS * sizeof(float));
    for (int j = 0; j < count; j++) {
        int64_t at = (NAME(cell)(a, row, begin + j) * m->kv_heads + head) * dim;
        float *column = keys + (int64_t)(j / TILE) * dim * TILE + j % TILE;
        int d = 0;
        for (; d + VL <= dim; d += VL) {
            vf key = load_kind(a->keys, m->kv_kind, at + d);
            for (int i = 0; i < VL; i++) column[(d + i) * TILE] = key[i];
            store(values + (int64_t)(d / TILE) * KEYS * TILE + j * TILE + d % TILE, load_kind(a->values, m->kv_kind, at + d));
        }
        for (; d < dim; d++) {
            column[d * TILE] = NAME(scalar)(a->keys, m->kv_kind, at + d);
            values[(int64_t)(d / TILE) * KEYS * TILE + j * TILE + d % TILE] = NAME(scalar)(a->values, m->kv_kind, at + d);
        }
    }
}

/* The softmax of one row's scores, online: p in place, what was gathered so far shrunk. Seen are keys
 * from..to - 1. */
INLINE void NAME(soften)(float *p, int from, int to, float scale, float *most, float *total, float *out, int width) {
    float before = *most;
    vf all;
    NAME(weights_of)(p, from, to, scale, most, &all);
    if (*most > before) {
        float shrink = expf(before - *most);
        *total *= shrink;
        for (int d = 0; d < width; d += VL) store(out + d, load(out + d) * shrink);
    }
    *total += sum(all);
}

/* `count` queries of a chunk row from token `token`, at `position`, with one KV head: rows of a small matrix. */
static void NAME(chunk_task)(const Attention *a, int row, int head, int token, int position, int count, float *mine) {
    const Model *m = a->model;
    int dim = m->head_dim, group = m->heads / m->kv_heads, tiles = (dim + 2 * TILE - 1) / (2 * TILE) * 2, width = tiles * TILE;
    int rows = count * group, last = position + count;
    float *query = mine, *scores = query + (int64_t)rows * dim, *out = scores + rows * KEYS;
    float *keys = out + (int64_t)rows * width, *values = keys + dim * KEYS, *most = values + width * KEYS, *total = most + rows;
    for (int r = 0; r < rows; r++) {
        memcpy(query + (int64_t)r * dim, a->qkv + (token + r / group) * a->ld + (int64_t)(head * group + r % group) * dim,
               (size_t)dim * sizeof(float));
        most[r] = -INFINITY, total[r] = 0;
    }
    memset(out, 0, (size_t)rows * width * sizeof(float));
    memset(values, 0, (size_t)width * KEYS * sizeof(float));
    for (int begin = NAME(first_key)(a, position) / KEYS * KEYS; begin < last; begin += KEYS) {
        int there = last - begin < KEYS ? last - begin : KEYS;
        NAME(pack_block)(a, row, head, begin, there, keys, values);
        memset(scores, 0, (size_t)rows * KEYS * sizeof(float));
        multiply(KIND_F32, rows, query, dim, (const char *)keys, (int64_t)dim * TILE * 4, dim, scores, KEYS);
        for (int r = 0; r < rows; r++) {
            int at = position + r / group, from = NAME(first_key)(a, at) - begin, to = at + 1 - begin;
            NAME(soften)(scores + r * KEYS, from, to, a->scale, most + r, total + r, out + (int64_t)r * width, width);
        }
        for (int t = 0; t < tiles; t += 2)
            multiply(KIND_F32, rows, scores, KEYS, (const char *)(values + (int64_t)t * KEYS * TILE), KEYS * TILE * 4, there,
                     out + t * TILE, width);
    }
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d++)
            a->out[((int64_t)(token + r / group) * m->heads + head * group + r % group) * dim + d] =
                out[(int64_t)r * width + d] / total[r];
}

static inline int64_t NAME(chunk_floats)(const Model *m) {
    int group = m->heads / m->kv_heads, queries = QUERY_ROWS / group > 0 ? QUERY_ROWS / group : 1, rows = queries * group;
    int width = (m->head_dim + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
    return (int64_t)rows * (m->head_dim + KEYS + width + 2) + (int64_t)KEYS * (m->head_dim + width);
}

static Attention NAME(attention)(const Model *model, const Step *step, const Layer *layer, const float *qkv, int64_t ld,
                                 float *out, float *parts, int threads) {
    int group = model->heads / model->kv_heads;
    Attention a = {model, step, layer->keys, layer->values, qkv, ld, out, parts, 1, 0, 1, 1, 0};
    a.queries = QUERY_ROWS / group > 0 ? QUERY_ROWS / group : 1;
    a.scale = 1.0f / sqrtf((float)model->head_dim);
    for (int row = 0; row < step->decode; row++)
        if (NAME(num_parts)(&a, row) > a.most_parts) a.most_parts = NAME(num_parts)(&a, row);
    if (step->decode * a.most_parts >= MANY_TASKS * threads) a.task_heads = model->kv_heads;
    for (int row = step->decode; row < step->rows; row++) a.blocks += (step->query_lens[row] + a.queries - 1) / a.queries;
    return a;
}

/* Every block of chunk queries and every part of a decode row, with each KV head or all of them, is a task; long
 * ones first. */
static void NAME(attend_stage)(Team *team, const Attention *a, char *mine) {
    const Step *step = a->step;
    int kv_heads = a->model->kv_heads, chunks = a->blocks * kv_heads;
    int tasks = chunks + step->decode * (kv_heads / a->task_heads) * a->most_parts;
    for (int task = take(team); task < tasks; task = take(team)) {
        if (task >= chunks) {
            NAME(decode_task)(a, task - chunks, (float *)mine);
            continue;
        }
        int block = a->blocks - 1 - task / kv_heads, row = step->decode, token = step->decode;
        for (; block >= (step->query_lens[row] + a->queries - 1) / a->queries; row++) {
            block -= (step->query_lens[row] + a->queries - 1) / a->queries;
            token += step->query_lens[row];
        }
        int begin = block * a->queries, left = step->query_lens[row] - begin;
        NAME(chunk_task)(a, row, task % kv_heads, token + begin, step->seq_lens[row] - step->query_lens[row] + begin,
                         left < a->queries ? left : a->queries, (float *)mine);
    }
}

static void NAME(join_stage)(Team *team, const Attention *a) {
    int kv_heads = a->model->kv_heads;
    for (int task = take(team); task < a->step->decode * kv_heads; task = take(team))
        NAME(join)(a, task / kv_heads, task % kv_heads);
}
