/* Attention over paged keys and values. Softmax is taken online, block of keys by block of keys (Milakov and
 * Gimelshein 2018; FlashAttention, Dao et al. 2022). A decode row's keys are cut into parts of PART, whatever the
 * number of threads, which are joined in order (Flash-Decoding, Dao et al. 2023). Weights are powers of two, told
 * against a reference that follows the largest score at a distance of up to SLACK, so that what was gathered is seldom
 * rescaled. Where there are products of pairs, keys and values in bfloat16 meet queries and weights that are rounded. */
enum { SLACK = 8, MANY_TASKS = 4 }; /* MANY_TASKS: of a thread */

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
    float scale;      /* of scores in powers of two */
} NAME(Attention);
#define Attention NAME(Attention)

static inline int NAME(first_key)(const Attention *a, int position) {
    int window = a->model->window;
    return window && position >= window ? position - window + 1 : 0;
}

/* Where the keys of `count` positions begin, of KV head `head`, where a number takes `size`. */
INLINE void NAME(find_block)(const Attention *a, int row, int head, int begin, int count, int size, int64_t *at) {
    const Model *m = a->model;
    int64_t each = (int64_t)m->kv_heads * m->head_dim * size;
    const int32_t *page = a->step->page_table + (int64_t)row * a->step->pages + begin / m->block_size;
    for (int done = 0, offset = begin % m->block_size; done < count; page++, offset = 0) {
        int left = count - done, run = m->block_size - offset < left ? m->block_size - offset : left;
        int64_t from = ((int64_t)*page * m->block_size + offset) * each + (int64_t)head * m->head_dim * size;
        for (int j = 0; j < run; j++) at[done + j] = from + j * each;
        done += run;
    }
}

/* Another reference than `most`: what a query has gathered is rescaled. */
INLINE void NAME(refer)(float *most, float here, float *total, float *out, int width) {
    float shrink = exp2f(*most - here);
    *most = here;
    store(total, load(total) * shrink);
    for (int d = 0; d < width; d += VL) store(out + d, load(out + d) * shrink);
}

/* Weights j..j + VL - 1 of a query are kept as `pairs` or as they are; returns what they have become. */
INLINE vf NAME(keep)(int pairs, float *weights, int j, vf weight) {
    if (!pairs) {
        store(weights + j, weight);
        return weight;
    }
    vh rounded = to_bf16(weight);
    memcpy((uint16_t *)weights + j, &rounded, sizeof rounded);
    return from_bf16(rounded);
}

#include "decode.h"
#include "chunk.h"

static Attention NAME(attention)(const Model *model, const Step *step, const Layer *layer, const float *qkv, int64_t ld,
                                 float *out, float *parts, int threads) {
    Attention a = {model, step, layer->keys, layer->values, qkv, ld, out, parts, 1, 0, 1, 1, 0};
    a.scale = 1.44269504f / sqrtf((float)model->head_dim);
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
