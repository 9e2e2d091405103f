/* A whole step: embedding, every layer, the last norm. One region, a meeting after each stage. */
typedef struct {
    float *x, *normed, *qkv, *attended, *gated, *parts; /* [T][hidden], ..., the parts of long decode rows */
    int8_t *codes;                                      /* [T] rows of coded inputs, or of pairs */
    char *threads;
    int64_t each;
} NAME(Room);

static inline int64_t NAME(up)(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Where everything lies in the scratch; with `base` NULL only the size counts, which is returned. */
static int64_t NAME(furnish)(NAME(Room) *room, char *base, const Model *m, int64_t tokens, int64_t rows, int parts) {
    int64_t at = 0, most = LINEAR_ROOM, chunk = NAME(chunk_floats)(m), decode = NAME(decode_floats)(m);
    if (most < chunk) most = chunk;
    room->each = NAME(up)((most > decode ? most : decode) * 4);
    float **where[] = {&room->x, &room->normed, &room->qkv, &room->attended, &room->gated, &room->parts};
    int64_t qkv = m->layers ? m->layer[0].qkv.n : 0;
    int64_t floats[] = {tokens * m->hidden, tokens * m->hidden, tokens * qkv, tokens * m->heads * m->head_dim,
                        tokens * m->intermediate, rows * m->heads * parts * (m->head_dim + 2)};
    for (int i = 0; i < 6; i++) {
        *where[i] = base ? (float *)(base + at) : NULL;
        at += NAME(up)(floats[i] * 4);
    }
    int64_t widest = m->heads * m->head_dim;
    if (widest < m->hidden) widest = m->hidden;
    if (widest < m->intermediate) widest = m->intermediate;
    room->codes = base ? (int8_t *)(base + at) : NULL;
    at += NAME(up)(tokens * NAME(input_row)(widest));
    room->threads = base ? base + at : NULL;
    return at;
}

static int64_t NAME(scratch_size)(const Model *model, int32_t tokens, int32_t rows, int32_t parts, int32_t threads) {
    NAME(Room) room;
    int64_t shared = NAME(furnish)(&room, NULL, model, tokens, rows, parts);
    return shared + threads * room.each;
}

static void NAME(layer)(Team *team, char *mine, const Model *m, const Step *step, const Layer *layer,
                        const NAME(Room) *room, const Attention *a) {
    int tokens = step->tokens, hidden = m->hidden, wide = layer->qkv.n, heads = m->heads * m->head_dim;
    norm_stage(team, room->x, layer->input_norm, m->eps, tokens, hidden, room->normed);
    meet(team);
    linear_stage(team, mine, &layer->qkv, room->normed, hidden, tokens, PUT, room->qkv, wide, room->codes);
    meet(team);
    NAME(position_stage)(team, m, layer, step, room->qkv, wide);
    meet(team);
    NAME(attend_stage)(team, a, mine);
    meet(team);
    NAME(join_stage)(team, a);
    meet(team);
    linear_stage(team, mine, &layer->out, room->attended, heads, tokens, ADD, room->x, hidden, room->codes);
    meet(team);
    norm_stage(team, room->x, layer->post_norm, m->eps, tokens, hidden, room->normed);
    meet(team);
    linear_stage(team, mine, &layer->gate_up, room->normed, hidden, tokens, GATE, room->gated, m->intermediate, room->codes);
    meet(team);
    linear_stage(team, mine, &layer->down, room->gated, m->intermediate, tokens, ADD, room->x, hidden, room->codes);
    meet(team);
}

static void NAME(walk)(Team *team, char *mine, const Model *m, const Step *step, const NAME(Room) *room, float *hidden) {
    NAME(embed_stage)(team, m, step, room->x);
    meet(team);
    for (int i = 0; i < m->layers; i++) {
        const Layer *layer = m->layer + i;
        Attention a = NAME(attention)(m, step, layer, room->qkv, layer->qkv.n, room->attended, room->parts, team->size);
        NAME(layer)(team, mine, m, step, layer, room, &a);
    }
    norm_stage(team, room->x, m->norm, m->eps, step->tokens, m->hidden, hidden);
}

static void NAME(forward)(const Model *model, const Step *step, float *hidden, void *scratch, int32_t threads) {
    NAME(Room) room;
    NAME(furnish)(&room, scratch, model, step->tokens, step->rows, step->parts);
    TEAM_RUN(threads, room.threads, room.each, NAME(walk)(team, mine, model, step, &room, hidden));
}

static int64_t NAME(linear_size)(const Linear *layer, int32_t rows, int32_t threads) {
    return NAME(up)(rows * NAME(input_row)(layer->k)) + threads * (int64_t)LINEAR_ROOM * 4;
}

static void NAME(linear)(const Linear *layer, const float *x, int32_t rows, float *out, void *scratch, int32_t threads) {
    int8_t *codes = scratch;
    TEAM_RUN(threads, (char *)scratch + NAME(up)(rows * NAME(input_row)(layer->k)), LINEAR_ROOM * 4,
             linear_stage(team, mine, layer, x, layer->k, rows, PUT, out, layer->n, codes));
}

/* The queries of `qkv` [T][ld] against keys and values that are there already. */
static void NAME(attend)(const Model *model, const Step *step, int32_t layer, const float *qkv, int32_t ld, float *out,
                         void *scratch, int32_t threads) {
    NAME(Room) room;
    NAME(furnish)(&room, scratch, model, step->tokens, step->rows, step->parts);
    Attention a = NAME(attention)(model, step, model->layer + layer, qkv, ld, out, room.parts, threads);
    TEAM_RUN(threads, room.threads, room.each, {
        NAME(attend_stage)(team, &a, mine);
        meet(team);
        NAME(join_stage)(team, &a);
    });
}

static void NAME(norm)(const float *x, const float *weight, float eps, int32_t rows, int32_t size, float *out,
                       int32_t threads) {
    TEAM_RUN(threads, NULL, 0, norm_stage(team, x, weight, eps, rows, size, out));
}

const Kernels NAME(kernels) = {
    ISA_NAME,           NAME(scratch_size), NAME(forward), NAME(linear_size), NAME(linear), NAME(attend), NAME(norm),
    NAME(choice_size),  NAME(draw),         NAME(tell),    NAME(mask),   NAME(penalise),
};
