/* Norms, rotary positions, embeddings, the write of keys and values. */

/* Root mean square norm (Zhang and Sennrich 2019) of one row. */
INLINE void NAME(norm_row)(const float *x, const float *weight, float eps, int size, float *out) {
    vf squares = {0};
    int i = 0;
    for (; i + VL <= size; i += VL) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / size + eps);
    for (i = 0; i + VL <= size; i += VL) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * scale * weight[i];
}
#define norm_row NAME(norm_row)

static void NAME(norm_stage)(Team *team, const float *x, const float *weight, float eps, int rows, int size,
                             float *out) {
    for (int r = take(team); r < rows; r = take(team))
        norm_row(x + (int64_t)r * size, weight, eps, size, out + (int64_t)r * size);
}
#define norm_stage NAME(norm_stage)

/* Halves rotated against each other (RoFormer, as the Llama family pairs them). */
INLINE void NAME(rotate)(float *x, const float *cos, const float *sin, int size) {
    int half = size / 2, i = 0;
    for (; i + VL <= half; i += VL) {
        vf low = load(x + i), high = load(x + half + i);
        store(x + i, low * load(cos + i) - high * load(sin + i));
        store(x + half + i, high * load(cos + half + i) + low * load(sin + half + i));
    }
    for (; i < half; i++) {
        float low = x[i], high = x[half + i];
        x[i] = low * cos[i] - high * sin[i];
        x[half + i] = high * cos[half + i] + low * sin[half + i];
    }
}

INLINE void NAME(write_cell)(void *cells, int kind, int64_t at, const float *x, int size) {
    int i = 0;
    for (; i + VL <= size; i += VL) store_kind(cells, kind, at + i, load(x + i));
    for (; i < size; i++) {
        if (kind == KIND_BF16)
            ((uint16_t *)cells)[at + i] = to_bf16(splat(x[i]))[0];
        else
            ((float *)cells)[at + i] = x[i];
    }
}

/* One token: queries and keys normed where the model does, rotated in place; keys and values into their cell. */
static void NAME(position_token)(const Model *model, const Layer *layer, const Step *step, int token, float *qkv) {
    int dim = model->head_dim, heads = model->heads, kv_heads = model->kv_heads;
    const float *cos = step->cos + (int64_t)token * dim, *sin = step->sin + (int64_t)token * dim;
    for (int head = 0; head < heads + kv_heads; head++) {
        const float *weight = head < heads ? layer->q_norm : layer->k_norm;
        if (weight) norm_row(qkv + head * dim, weight, model->eps, dim, qkv + head * dim);
        NAME(rotate)(qkv + head * dim, cos, sin, dim);
    }
    int64_t at = step->cells[token] * kv_heads * dim;
    NAME(write_cell)(layer->keys, model->kv_kind, at, qkv + heads * dim, kv_heads * dim);
    NAME(write_cell)(layer->values, model->kv_kind, at, qkv + (heads + kv_heads) * dim, kv_heads * dim);
}

static void NAME(position_stage)(Team *team, const Model *model, const Layer *layer, const Step *step, float *qkv,
                                 int64_t ld) {
    for (int token = take(team); token < step->tokens; token = take(team))
        NAME(position_token)(model, layer, step, token, qkv + token * ld);
}

static void NAME(embed_stage)(Team *team, const Model *model, const Step *step, float *out) {
    int size = model->hidden;
    for (int token = take(team); token < step->tokens; token = take(team)) {
        int64_t at = (int64_t)step->ids[token] * size, to = (int64_t)token * size;
        int i = 0;
        for (; i + VL <= size; i += VL) store(out + to + i, load_kind(model->embedding, model->embedding_kind, at + i));
        for (; i < size; i++) out[to + i] = NAME(scalar)(model->embedding, model->embedding_kind, at + i);
    }
}
