/* Attention over paged keys and values. Softmax is taken online, block of keys by block of keys (Milakov and
 * Gimelshein 2018; FlashAttention, Dao et al. 2022). A decode row's keys are cut into parts of PART, whatever the
 * number of threads, which are joined in order (Flash-Decoding, Dao et al. 2023). */
enum { KEYS = 2 * TILE, MANY_TASKS = 4 }; /* of a thread */

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
    const Model *m = a->model;
    int64_t each = (int64_t)m->kv_heads * m->head_dim;
    const int32_t *page = a->step->page_table + (int64_t)row * a->step->pages + begin / m->block_size;
    for (int j = 0, offset = begin % m->block_size; j < count; page++, offset = 0)
        for (int64_t cell = (int64_t)*page * m->block_size; offset < m->block_size && j < count; offset++)
            at[j++] = (cell + offset) * each + head * m->head_dim;
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

#include "chunk.h"

static Attention NAME(attention)(const Model *model, const Step *step, const Layer *layer, const float *qkv, int64_t ld,
                                 float *out, float *parts, int threads) {
    Attention a = {model, step, layer->keys, layer->values, qkv, ld, out, parts, 1, 0, 1, 1, 0};
    a.scale = 1.0f / sqrtf((float)model->head_dim);
    for (int row = 0; row < step->decode; row++)
        if (NAME(num_parts)(&a, row) > a.most_parts) a.most_parts = NAME(num_parts)(&a, row);
    if (step->decode * a.most_parts >= MANY_TASKS * threads) a.task_heads = model->kv_heads;
    NAME(cut_chunks)(&a, threads);
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
