/* Attention over paged keys and values. Softmax is taken online, block of keys by block of keys (Milakov and
 * Gimelshein 2018; FlashAttention, Dao et al. 2022). A decode row's keys are cut into parts of PART, whatever the
 * number of threads, which are joined in order (Flash-Decoding, Dao et al. 2023). */
enum { KEYS = 2 * TILE, QUERY_ROWS = 96 };

typedef struct {
    const Model *model;
    const Step *step;
    const void *keys, *values;
    const float *qkv; /* [T][ld]: queries in front */
    int64_t ld;
    float *out;       /* [T][heads * head_dim] */
    float *parts;     /* of decode rows with more than one: [row, kv head, part][group][head_dim + 2] */
    int most_parts, blocks, queries; /* parts of the longest decode row; blocks of `queries` of all chunk rows */
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

/* `count` keys or values of one KV head as float, [count][dim]. */
INLINE void NAME(gather)(const void *cells, int kind, const int64_t *at, int count, int dim, float *out) {
    for (int j = 0; j < count; j++) {
        int d = 0;
        for (; d + VL <= dim; d += VL) store(out + j * dim + d, load_kind(cells, kind, at[j] + d));
        for (; d < dim; d++) out[j * dim + d] = NAME(scalar)(cells, kind, at[j] + d);
    }
}

static void NAME(gather_bf16)(const void *cells, const int64_t *at, int count, int dim, float *out) {
    NAME(gather)(cells, KIND_BF16, at, count, dim, out);
}

static void NAME(gather_f32)(const void *cells, const int64_t *at, int count, int dim, float *out) {
    NAME(gather)(cells, KIND_F32, at, count, dim, out);
}

INLINE float NAME(dot)(const float *a, const float *b, int size) {
    vf even = {0}, odd = {0};
    int d = 0;
    for (; d + 2 * VL <= size; d += 2 * VL) {
        even += load(a + d) * load(b + d);
        odd += load(a + d + VL) * load(b + d + VL);
    }
    float total = sum(even + odd);
    for (; d < size; d++) total += a[d] * b[d];
    return total;
}

/* out = out * shrink + sum over j of p[j] * values[j], four vectors of columns at a time. */
INLINE void NAME(weigh)(const float *p, const float *values, int count, int dim, float shrink, float *out) {
    int d = 0;
    for (; d + 4 * VL <= dim; d += 4 * VL) {
        vf acc[4];
        for (int i = 0; i < 4; i++) acc[i] = load(out + d + i * VL) * shrink;
        for (int j = 0; j < count; j++)
            for (int i = 0; i < 4; i++) acc[i] += p[j] * load(values + j * dim + d + i * VL);
        for (int i = 0; i < 4; i++) store(out + d + i * VL, acc[i]);
    }
    for (; d < dim; d++) {
        float one = out[d] * shrink;
        for (int j = 0; j < count; j++) one += p[j] * values[j * dim + d];
        out[d] = one;
    }
}

/* One decode row and one KV head against keys from..to: the weighted values, unnormed, then maximum and sum. */
static void NAME(decode_part)(const Attention *a, int row, int head, int from, int to, float *out, float *mine) {
    const Model *m = a->model;
    int dim = m->head_dim, group = m->heads / m->kv_heads;
    const float *query = a->qkv + row * a->ld + (int64_t)head * group * dim;
    float *keys = mine, *values = mine + KEYS * dim, p[KEYS];
    void (*gather)(const void *, const int64_t *, int, int, float *) =
        m->kv_kind == KIND_BF16 ? NAME(gather_bf16) : NAME(gather_f32);
    for (int g = 0; g < group; g++) {
        float *o = out + g * (dim + 2);
        memset(o, 0, (size_t)dim * sizeof(float));
        o[dim] = -INFINITY, o[dim + 1] = 0;
    }
    for (int begin = from; begin < to; begin += KEYS) {
        int count = to - begin < KEYS ? to - begin : KEYS;
        int64_t at[KEYS];
        for (int j = 0; j < count; j++) at[j] = (NAME(cell)(a, row, begin + j) * m->kv_heads + head) * dim;
        gather(a->keys, at, count, dim, keys);
        gather(a->values, at, count, dim, values);
        for (int g = 0; g < group; g++) {
            float *o = out + g * (dim + 2), most = o[dim];
            for (int j = count; j < KEYS; j++) p[j] = -INFINITY;
            for (int j = 0; j < count; j++) {
                p[j] = NAME(dot)(query + g * dim, keys + j * dim, dim) * a->scale;
                most = p[j] > most ? p[j] : most;
            }
            vf total = {0};
            for (int j = 0; j < KEYS; j += VL) {
                vf e = expv(load(p + j) - most);
                store(p + j, e);
                total += e;
            }
            float shrink = expf(o[dim] - most);
            o[dim] = most, o[dim + 1] = o[dim + 1] * shrink + sum(total);
            NAME(weigh)(p, values, count, dim, shrink, o);
        }
    }
}

static inline int NAME(num_parts)(const Attention *a, int row) {
    int last = a->step->seq_lens[row] - 1;
    return (last - NAME(first_key)(a, last)) / PART + 1;
}

static float *NAME(part_of)(const Attention *a, int row, int head, int part) {
    const Model *m = a->model;
    int64_t index = ((int64_t)row * m->kv_heads + head) * a->most_parts + part;
    return a->parts + index * (m->heads / m->kv_heads) * (m->head_dim + 2);
}

static void NAME(decode_task)(const Attention *a, int task, float *mine) {
    int part = task % a->most_parts, head = task / a->most_parts % a->model->kv_heads;
    int row = task / a->most_parts / a->model->kv_heads;
    if (part >= NAME(num_parts)(a, row)) return;
    int length = a->step->seq_lens[row], from = NAME(first_key)(a, length - 1) + part * PART;
    NAME(decode_part)(a, row, head, from, from + PART < length ? from + PART : length,
                      NAME(part_of)(a, row, head, part), mine);
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

/* The softmax of one row's scores, online: p in place, what was gathered so far shrunk. `seen`: keys from..to - 1. */
INLINE void NAME(soften)(float *p, int from, int to, float scale, float *most, float *total, float *out, int width) {
    float high = *most;
    for (int j = 0; j < KEYS; j++) {
        p[j] = j >= from && j < to ? p[j] * scale : -INFINITY;
        high = p[j] > high ? p[j] : high;
    }
    if (high == -INFINITY) {
        memset(p, 0, KEYS * sizeof(float));
        return;
    }
    vf all = {0};
    for (int j = 0; j < KEYS; j += VL) {
        vf e = expv(load(p + j) - high);
        store(p + j, e);
        all += e;
    }
    if (high > *most) {
        float shrink = expf(*most - high);
        *total *= shrink;
        for (int d = 0; d < width; d += VL) store(out + d, load(out + d) * shrink);
    }
    *most = high;
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
                                 float *out, float *parts) {
    int group = model->heads / model->kv_heads;
    Attention a = {model, step, layer->keys, layer->values, qkv, ld, out, parts, 1, 0, 1, 0};
    a.queries = QUERY_ROWS / group > 0 ? QUERY_ROWS / group : 1;
    a.scale = 1.0f / sqrtf((float)model->head_dim);
    for (int row = 0; row < step->decode; row++)
        if (NAME(num_parts)(&a, row) > a.most_parts) a.most_parts = NAME(num_parts)(&a, row);
    for (int row = step->decode; row < step->rows; row++) a.blocks += (step->query_lens[row] + a.queries - 1) / a.queries;
    return a;
}

/* Every block of chunk queries and every part of a decode row, with every KV head, is a task; long ones first. */
static void NAME(attend_stage)(Team *team, const Attention *a, char *mine) {
    const Step *step = a->step;
    int kv_heads = a->model->kv_heads, chunks = a->blocks * kv_heads, tasks = chunks + step->decode * kv_heads * a->most_parts;
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
