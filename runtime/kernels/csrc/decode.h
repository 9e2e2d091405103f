/* Attention of decode rows. A line is VL lanes of 32 bits of a key or value: a float each, or two numbers in bfloat16,
 * which are met where they lie. Queries are spread to match, and what is gathered lies spread until a part is done: of
 * each line the first of every two numbers, then the second. */
enum { KEYS = 2 * TILE, LINES = 2 }; /* of a block; of columns at a time */
/* Query heads whose sums the registers hold, and the keys that they meet at a time. */
enum { HEADS_MOST = VL == 16 ? 4 : VL == 8 ? 3 : 1, SOME = VL == 16 ? 4 : 2 };

/* What a task works with: query heads of `heads` KV heads, `lines` lines each. */
typedef struct {
    int lines, width;             /* of a head; floats that the lines gather */
    float *query, *out;           /* [heads * group][width], both spread */
    float *most, *total;          /* [heads * group] references; [heads * group][VL] sums of the weights */
    char *keys, *values;          /* of a block, where lines are not whole in memory: [KEYS][lines] */
    int bytes;                    /* of a key or value */
    float scale;                  /* as of Attention */
} NAME(Decode);
#define Decode NAME(Decode)

/* The keys and values of a KV head, each `at` bytes on. */
typedef struct {
    int count;
    const char *keys, *values;
    int64_t at[KEYS];
} NAME(Block);
#define Block NAME(Block)

/* Numbers of a line. */
INLINE int NAME(line_size)(int met) { return met == KIND_F32 ? VL : 2 * VL; }

/* Where everything lies in a thread's scratch; returns the number of floats. */
static int64_t NAME(decode_room)(const Model *m, float *at, Decode *d) {
    int size = NAME(line_size)(m->kv_kind);
    d->lines = (m->head_dim + size - 1) / size, d->width = d->lines * size;
    d->bytes = m->head_dim * (m->kv_kind == KIND_BF16 ? 2 : 4);
    float **where[] = {&d->query, &d->out, &d->total, &d->most, (float **)&d->keys, (float **)&d->values};
    int64_t each = d->lines * VL, all = 0;
    int64_t sizes[] = {m->heads * d->width, m->heads * d->width, m->heads * VL, (m->heads + VL - 1) / VL * VL,
                       KEYS * each, KEYS * each};
    for (int i = 0; i < 6; all += sizes[i++]) *where[i] = at ? at + all : NULL;
    return all;
}

static int64_t NAME(decode_floats)(const Model *m) {
    Decode d;
    return NAME(decode_room)(m, NULL, &d);
}

/* Of every two numbers of a line the first come first; `back`: as they were. */
INLINE void NAME(spread)(int met, int back, const float *from, int size, float *to) {
    for (int i = 0; i < size; i++) {
        int line = i / (2 * VL) * 2 * VL, other = met == KIND_F32 ? i : line + (i - line) / 2 + (i - line) % 2 * VL;
        to[back ? i : other] = from[back ? other : i];
    }
}

/* What comes lies anywhere, which no hardware foresees; little by little, as few lines can be on their way. */
INLINE void NAME(ask_for)(const char *cells, int bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(cells + line, 0, 2);
}

/* The products of a line with a query's, each in its lane. */
INLINE vf NAME(line_met)(int met, vf sums, const char *line, const float *query) {
    vu lanes = *(const vuu *)line;
    if (met == KIND_PAIRS) return NAME(pairs_of)(sums, lanes, *(const vuu *)query);
    if (met == KIND_F32) return sums + (vf)lanes * load(query);
    return sums + (vf)(lanes << 16) * load(query) + (vf)(lanes & 0xffff0000u) * load(query + VL);
}

/* `heads` queries against SOME keys: partial sums of their scores, those of key j in lanes j, j + SOME, ... */
INLINE void NAME(meet)(int met, int heads, const Decode *d, const float *query, const char *keys, const int64_t *at,
                       vf *scores, int each) {
    vf lanes[HEADS_MOST][SOME];
#pragma GCC unroll 16
    for (int j = 0; j < heads * SOME; j++) lanes[j / SOME][j % SOME] = splat(0.0f);
    for (int i = 0; i < d->lines; i++, query += met == KIND_BF16 ? 2 * VL : VL, keys += VL * 4)
#pragma GCC unroll 4
        for (int j = 0; j < SOME; j++)
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++)
                lanes[h][j] = NAME(line_met)(met, lanes[h][j], keys + at[j], query + h * d->width);
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) scores[h * each] = sums(lanes[h], 1, SOME);
}

/* The scores of a block, [heads][KEYS / VL]; `ask`: for the coming keys meanwhile. */
INLINE void NAME(scores_of)(int met, int heads, const Decode *d, const float *query, const Block *now,
                            const Block *coming, int ask, vf *scores) {
    vf parts[HEADS_MOST][VL / SOME];
    for (int j = 0; j < KEYS / VL; j++) {
#pragma GCC unroll 8
        for (int k = 0; k < VL / SOME; k++) {
            const int64_t *at = now->at + j * VL + k * SOME, *next = coming->at + j * VL + k * SOME;
            for (int i = 0; i < SOME * ask; i++) NAME(ask_for)(coming->keys + next[i], d->bytes);
            NAME(meet)(met, heads, d, query, now->keys, at, &parts[0][k], VL / SOME);
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            vf whole = sums(parts[h], SOME, VL) * d->scale;
            if (now->count < KEYS) whole = choose(iota() + j * VL < now->count, whole, splat(-INFINITY));
            scores[h * KEYS / VL + j] = whole;
        }
    }
}

/* The weights of head `head` by its scores. */
INLINE void NAME(weights_of)(int met, const Decode *d, int head, const Block *now, const vf *scores, float *weights) {
    vf high = scores[0], total = load(d->total + head * VL);
#pragma GCC unroll 8
    for (int j = 1; j < KEYS / VL; j++) high = larger(scores[j], high);
    float here = largest(high);
    if (here > d->most[head] + SLACK) {
        NAME(refer)(d->most + head, here, d->total + head * VL, d->out + head * d->width, d->width);
        total = load(d->total + head * VL);
    }
#pragma GCC unroll 8
    for (int j = 0; j < KEYS / VL; j++) {
        vf weight = exp2v(scores[j] - d->most[head]);
        if (now->count < KEYS) weight = choose(scores[j] == -INFINITY, splat(0.0f), weight);
        total += NAME(keep)(met == KIND_PAIRS, weights, j * VL, weight);
    }
    store(d->total + head * VL, total);
}

/* Of two values' lines the pairs of first numbers, and of second ones. */
INLINE void NAME(pairs_from)(vu one, vu other, vu *pairs) {
    pairs[0] = (one & 0xffffu) | (other << 16);
    pairs[1] = (one >> 16) | (other & 0xffff0000u);
}

/* `heads` heads gather `lines` lines of all values of a block, `at` bytes in, by their weights. */
INLINE void NAME(gather_lines)(int met, int heads, int lines, const float *weights, const Block *now,
                               const Block *coming, int64_t at, float *out, int width) {
    int each = met == KIND_F32 ? 1 : 2, step = met == KIND_PAIRS ? 2 : 1, columns = lines * each;
    vf acc[HEADS_MOST][2 * LINES];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) acc[h][c] = load(out + h * width + c * VL);
    for (int j = 0; j < KEYS; j += step) {
        vu lanes[2 * LINES];
        for (int k = j; k < j + step; k++) NAME(ask_for)(coming->values + coming->at[k] + at, lines * VL * 4);
#pragma GCC unroll 4
        for (int i = 0; i < lines; i++) {
            const char *here = now->values + at + i * VL * 4;
            vu line = *(const vuu *)(here + now->at[j]);
            if (met == KIND_PAIRS)
                NAME(pairs_from)(line, *(const vuu *)(here + now->at[j + 1]), lanes + 2 * i);
            else if (met == KIND_BF16)
                lanes[2 * i] = line << 16, lanes[2 * i + 1] = line & 0xffff0000u;
            else
                lanes[i] = line;
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            uint32_t weight;
            memcpy(&weight, weights + h * KEYS + j / step, sizeof weight);
            vu all = (vu){0} + weight;
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++)
                acc[h][c] = met == KIND_PAIRS ? NAME(pairs_of)(acc[h][c], lanes[c], all) : acc[h][c] + (vf)lanes[c] * (vf)all;
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) store(out + h * width + c * VL, acc[h][c]);
}

/* A block is gathered by `heads` query heads of one KV head, of which `head` of the task's is the first. */
INLINE void NAME(heads_block)(int met, int heads, const Decode *d, int head, const Block *now, const Block *coming,
                              int ask) {
    vf scores[HEADS_MOST * KEYS / VL];
    float weights[HEADS_MOST * KEYS]; /* pairs in the first half of a head's */
    float *out = d->out + head * d->width;
    int i = 0, size = NAME(line_size)(met);
    NAME(scores_of)(met, heads, d, d->query + head * d->width, now, coming, ask, scores);
    for (int h = 0; h < heads; h++)
        NAME(weights_of)(met, d, head + h, now, scores + h * KEYS / VL, weights + h * KEYS);
    for (; i + LINES <= d->lines; i += LINES)
        NAME(gather_lines)(met, heads, LINES, weights, now, coming, i * VL * 4, out + i * size, d->width);
    if (i < d->lines)
        NAME(gather_lines)(met, heads, 1, weights, now, coming, i * VL * 4, out + i * size, d->width);
}

/* The same by all `group` heads. */
INLINE void NAME(decode_block)(int met, const Decode *d, int first, int group, const Block *now, const Block *coming) {
    for (int g = 0; g < group; g += HEADS_MOST)
        switch (group - g) {
            case 1: NAME(heads_block)(met, 1, d, first + g, now, coming, g == 0); break;
#if VL >= 8
            case 2: NAME(heads_block)(met, 2, d, first + g, now, coming, g == 0); break;
#endif
#if VL == 16
            case 3: NAME(heads_block)(met, 3, d, first + g, now, coming, g == 0); break;
#endif
            default: NAME(heads_block)(met, HEADS_MOST, d, first + g, now, coming, g == 0);
        }
}

/* Keys from `begin` on, at most `left`. The last stands for those that a block lacks, seen by nobody. */
static void NAME(point)(const Attention *a, int row, int head, int begin, int left, Block *block) {
    int size = a->model->kv_kind == KIND_BF16 ? 2 : 4;
    block->count = left < KEYS ? left : KEYS, block->keys = a->keys, block->values = a->values;
    NAME(find_block)(a, row, head, begin, block->count, size, block->at);
    for (int j = block->count; j < KEYS; j++) block->at[j] = block->at[block->count - 1];
}

/* The same block with whole lines, of which those of `d` begin with what there is. */
static void NAME(copy_block)(const Decode *d, const Block *block, Block *copy) {
    copy->count = block->count, copy->keys = d->keys, copy->values = d->values;
    for (int j = 0; j < KEYS; j++) {
        int64_t at = copy->at[j] = (int64_t)j * d->lines * VL * 4;
        memcpy(d->keys + at, block->keys + block->at[j], (size_t)d->bytes);
        memcpy(d->values + at, block->values + block->at[j], (size_t)d->bytes);
    }
}

static float *NAME(part_of)(const Attention *a, int row, int head, int part) {
    const Model *m = a->model;
    int64_t index = ((int64_t)row * m->kv_heads + head) * a->most_parts + part;
    return a->parts + index * (m->heads / m->kv_heads) * (m->head_dim + 2);
}

/* The queries of `heads` heads; nothing is gathered yet. */
INLINE void NAME(begin_part)(int met, const Attention *a, const Decode *d, const float *queries, int heads) {
    int dim = a->model->head_dim;
    memset(d->query, 0, (size_t)heads * d->width * sizeof(float));
    for (int h = 0; h < heads; h++, queries += dim) {
        float *query = d->query + h * d->width;
        if (met == KIND_PAIRS)
            NAME(pair_row)(queries, dim, (uint16_t *)query);
        else
            NAME(spread)(met, 0, queries, dim, query);
        d->most[h] = -INFINITY;
    }
    memset(d->out, 0, (size_t)heads * d->width * sizeof(float));
    memset(d->total, 0, (size_t)heads * VL * sizeof(float));
    if (dim == d->width) return;
    memset(d->keys, 0, (size_t)KEYS * d->lines * VL * 4);
    memset(d->values, 0, (size_t)KEYS * d->lines * VL * 4);
}

/* The weighted values of each query head, unnormed, then reference and sum. */
INLINE void NAME(end_part)(int met, const Attention *a, const Decode *d, int row, int part, int head, int heads) {
    int dim = a->model->head_dim, group = a->model->heads / a->model->kv_heads;
    for (int h = 0; h < heads * group; h++) {
        float *to = NAME(part_of)(a, row, head + h / group, part) + h % group * (dim + 2);
        NAME(spread)(met, 1, d->out + h * d->width, dim, to);
        to[dim] = d->most[h], to[dim + 1] = sum(load(d->total + h * VL));
    }
}

/* One part of a decode row, keys from..to, with `heads` KV heads from `head`, whose keys lie side by side. */
INLINE void NAME(decode_part)(int met, const Attention *a, int row, int part, int head, int heads, int from, int to,
                              float *mine) {
    int dim = a->model->head_dim, group = a->model->heads / a->model->kv_heads;
    Block blocks[2], copy; /* this one and the next, by turns */
    Decode d;
    NAME(decode_room)(a->model, mine, &d);
    d.scale = a->scale;
    NAME(begin_part)(met, a, &d, a->qkv + row * a->ld + (int64_t)head * group * dim, heads * group);
    NAME(point)(a, row, head, from, to - from, &blocks[0]);
    for (int begin = from, turn = 0; begin < to; begin += KEYS, turn ^= 1) {
        Block *now = &blocks[turn], *coming = &blocks[turn ^ 1];
        if (begin + KEYS < to)
            NAME(point)(a, row, head, begin + KEYS, to - begin - KEYS, coming);
        else
            *coming = *now;
        for (int h = 0; h < heads; h++) {
            if (dim < d.width) NAME(copy_block)(&d, now, &copy);
            NAME(decode_block)(met, &d, h * group, group, dim < d.width ? &copy : now, coming);
            now->keys += d.bytes, now->values += d.bytes, coming->keys += d.bytes, coming->values += d.bytes;
        }
        coming->keys = a->keys, coming->values = a->values;
    }
    NAME(end_part)(met, a, &d, row, part, head, heads);
}

static void NAME(decode_part_f32)(const Attention *a, int row, int part, int head, int heads, int from, int to,
                                  float *mine) {
    NAME(decode_part)(KIND_F32, a, row, part, head, heads, from, to, mine);
}

static void NAME(decode_part_bf16)(const Attention *a, int row, int part, int head, int heads, int from, int to,
                                   float *mine) {
    NAME(decode_part)(NAME(met_as)(KIND_BF16), a, row, part, head, heads, from, to, mine);
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
    int to = from + PART < length ? from + PART : length;
    if (a->model->kv_kind == KIND_BF16)
        NAME(decode_part_bf16)(a, row, part, head, heads, from, to, mine);
    else
        NAME(decode_part_f32)(a, row, part, head, heads, from, to, mine);
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
            float weight = exp2f(o[dim] - most);
            total += weight * o[dim + 1];
            for (int d = 0; d < dim; d++) out[d] += weight * o[d];
        }
        for (int d = 0; d < dim; d++) out[d] /= total;
    }
}
