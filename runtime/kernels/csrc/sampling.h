/* Tokens from logits, one row a task. Each filter is a cut-off, the smallest logit that stays, so ids with equal logits
 * share their fate; a token is the inverse of the cumulative distribution, in the order of ids, at the row's random
 * number. No row is sorted: a bound below which nothing can stay leaves few ids to look at. NaN is never drawn. */
enum { SPAN = 32, PIECE = 256 }; /* vectors of logits whose largest is kept lane by lane; ids whose weights are summed */

/* What a thread works in. */
typedef struct {
    float *tops;            /* of each span and lane the largest logit */
    float *values, *weights; /* of the ids that are looked at, in order */
    float *order, *measure; /* copies that a selection may reorder */
    int32_t *ids;
    int spans, count;
    float best;
    int odd; /* there is a NaN */
} NAME(Choice);
#define Choice NAME(Choice)

static inline int NAME(spans)(int size) { return (size + SPAN * VL - 1) / (SPAN * VL); }

static int64_t NAME(choice_floats)(int32_t size) { return ((int64_t)size + NAME(spans)(size) * VL + VL + 15) / 16 * 16; }

static int64_t NAME(choice_size)(int32_t size) { return NAME(choice_floats)(size) * 4 * 6; }

static void NAME(furnish_choice)(Choice *choice, char *memory, int size) {
    int64_t each = NAME(choice_floats)(size) * 4;
    float **parts[] = {&choice->tops, &choice->values, &choice->weights, &choice->order, &choice->measure};
    for (int i = 0; i < 5; i++) *parts[i] = (float *)(memory + i * each);
    choice->ids = (int32_t *)(memory + 5 * each);
}

INLINE int NAME(any)(vi mask) {
    union { vi whole; int64_t part[VL / 2]; } u = {mask};
    int64_t all = 0;
    for (int i = 0; i < VL / 2; i++) all |= u.part[i];
    return all != 0;
}

/* The first pass over a row: its best, and the tops of its spans. */
static void NAME(survey)(Choice *choice, const float *x, int size) {
    vf best = splat(-INFINITY);
    vi odd = {0};
    choice->spans = NAME(spans)(size);
    for (int span = 0; span < choice->spans; span++) {
        vf top[4];
        for (int j = 0; j < 4; j++) top[j] = splat(-INFINITY);
        int i = span * SPAN * VL, end = i + SPAN * VL < size ? i + SPAN * VL : size;
        for (; i + 4 * VL <= end; i += 4 * VL)
            for (int j = 0; j < 4; j++) {
                vf one = load(x + i + j * VL);
                odd |= one != one;
                top[j] = larger(one, top[j]);
            }
        float rest[VL];
        store(rest, larger(larger(top[0], top[1]), larger(top[2], top[3])));
        for (; i < end; i++) {
            if (x[i] != x[i]) odd[0] = -1;
            if (x[i] > rest[i % VL]) rest[i % VL] = x[i];
        }
        store(choice->tops + span * VL, load(rest));
        best = larger(load(rest), best);
    }
    choice->best = largest(best);
    choice->odd = NAME(any)(odd);
}

/* The first id of the best logit; 0 where there is none. */
static int NAME(first_best)(const Choice *choice, const float *x, int size) {
    for (int span = 0; span < choice->spans; span++) {
        if (!NAME(any)(load(choice->tops + span * VL) == choice->best)) continue;
        for (int i = span * SPAN * VL; i < size && i < (span + 1) * SPAN * VL; i++)
            if (x[i] == choice->best) return i;
    }
    return 0;
}

/* Keep the ids whose logit is at least `lower`, in order. */
static void NAME(collect)(Choice *choice, const float *x, int size, float lower) {
    int count = 0;
    for (int span = 0; span < choice->spans; span++) {
        if (!NAME(any)(load(choice->tops + span * VL) >= lower)) continue;
        int end = (span + 1) * SPAN * VL < size ? (span + 1) * SPAN * VL : size;
        for (int i = span * SPAN * VL; i < end; i++) {
            choice->ids[count] = i, choice->values[count] = x[i];
            count += x[i] >= lower;
        }
    }
    choice->count = count;
}

/* Of each value against the best one at a temperature; 0 for those that min_p leaves out. */
static void NAME(weigh_values)(const float *values, int count, float best, float temperature, float min_p,
                               float *weights) {
    for (int i = 0; i < count; i += VL) {
        float line[VL];
        int left = count - i < VL ? count - i : VL;
        if (left < VL) memset(line, 0, sizeof line), memcpy(line, values + i, (size_t)left * sizeof *line);
        vf weight = expv(((left < VL ? load(line) : load(values + i)) - best) / temperature);
        store(line, choose(weight < min_p, splat(0.0f), weight));
        if (left < VL)
            memcpy(weights + i, line, (size_t)left * sizeof *line);
        else
            store(weights + i, load(line));
    }
}

static double NAME(add_up)(const float *weights, int count) {
    double total = 0;
    for (int i = 0; i < count; i++) total += weights[i];
    return total;
}

/* Bring the values that are larger (or smaller) than `pivot` to the front; returns how many, adds up their measures. */
INLINE int NAME(part)(float *values, float *measure, int count, float pivot, int larger_ones, double *total) {
    int front = 0;
    for (int i = 0; i < count; i++) {
        float value = values[i], one = measure[i];
        int chosen = larger_ones ? value > pivot : value < pivot;
        values[i] = values[front], measure[i] = measure[front];
        values[front] = value, measure[front] = one;
        front += chosen, *total += chosen ? one : 0.0f;
    }
    return front;
}

/* The smallest value such that the measures of those larger than it sum to less than `limit` (> 0). Reorders both. */
static float NAME(cutoff)(float *values, float *measure, int count, double limit) {
    double above = 0;
    for (;;) {
        float a = values[0], b = values[count / 2], c = values[count - 1];
        float pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
        double heavier = above, ignored = 0;
        int front = NAME(part)(values, measure, count, pivot, 1, &heavier);
        if (heavier >= limit) {
            if (front == 0) return pivot;
            count = front;
            continue;
        }
        values += front, measure += front, count -= front;
        int behind = NAME(part)(values, measure, count, pivot, 0, &ignored);
        above = heavier + NAME(add_up)(measure + behind, count - behind); /* with those that equal the pivot */
        if (above >= limit || behind == 0) return pivot;
        count = behind;
    }
}

/* The `k`-th largest of `count` values. */
static float NAME(kth_largest)(Choice *choice, const float *values, int count, int64_t k) {
    memcpy(choice->order, values, (size_t)count * sizeof *values);
    for (int i = 0; i < count; i++) choice->measure[i] = 1.0f;
    return NAME(cutoff)(choice->order, choice->measure, count, (double)k);
}

/* A bound below which none of the `k` largest lies: as many tops are no smaller. */
static float NAME(bound_of)(Choice *choice, int64_t k) {
    int tops = choice->spans * VL;
    return k < tops ? NAME(kth_largest)(choice, choice->tops, tops, k) : -INFINITY;
}

static void NAME(drop_below)(Choice *choice, float least) {
    for (int i = 0; i < choice->count; i++)
        if (choice->values[i] < least) choice->weights[i] = 0;
}

/* Where the cumulated weights pass `target`; the last that has any where rounding points beyond it. */
static int NAME(inverse)(const float *weights, int count, double target) {
    double cumulated = 0;
    int last = 0;
    for (int i = 0; i < count; i++) {
        if (weights[i] <= 0) continue;
        cumulated += weights[i], last = i;
        if (cumulated > target) return i;
    }
    return last;
}

typedef struct {
    float temperature, min_p;
    int64_t top_k; /* 0: off */
    double top_p, uniform;
} NAME(Wish);
#define Wish NAME(Wish)

/* The weights of a whole row summed piece by piece, with room for each sum in `sums`. */
static double NAME(sum_pieces)(Choice *choice, const float *x, int size, const Wish *wish, double *sums) {
    double total = 0;
    for (int i = 0; i < size; i += PIECE) {
        float weights[PIECE];
        vf lanes = {0};
        int count = size - i < PIECE ? size - i : PIECE, j = 0;
        NAME(weigh_values)(x + i, count, choice->best, wish->temperature, wish->min_p, weights);
        for (; j + VL <= count; j += VL) lanes += load(weights + j);
        total += sums[i / PIECE] = sum(lanes) + NAME(add_up)(weights + j, count - j);
    }
    return total;
}

/* Where no filter narrows the choice: the piece first, then the id within it. */
static int NAME(draw_from_all)(Choice *choice, const float *x, int size, const Wish *wish) {
    double *sums = (double *)choice->values, cumulated = 0;
    double target = wish->uniform * NAME(sum_pieces)(choice, x, size, wish, sums);
    int pieces = (size + PIECE - 1) / PIECE, piece = 0;
    while (piece + 1 < pieces && cumulated + sums[piece] <= target) cumulated += sums[piece++];
    float weights[PIECE];
    int from = piece * PIECE, count = size - from < PIECE ? size - from : PIECE;
    NAME(weigh_values)(x + from, count, choice->best, wish->temperature, wish->min_p, weights);
    double within = (target - cumulated) / sums[piece] * NAME(add_up)(weights, count);
    return from + NAME(inverse)(weights, count, within);
}

/* A bound below which no id can stay; `total` is set where top_p is a share of all weights. */
static float NAME(bound_below)(Choice *choice, const float *x, int size, const Wish *wish, double *total) {
    float lower = -INFINITY, best = choice->best, slack = 1e-3f * wish->temperature + 1e-6f * fabsf(best);
    if (wish->min_p > 0) lower = best + wish->temperature * logf(wish->min_p) - slack;
    if (wish->top_k) {
        float bound = NAME(bound_of)(choice, wish->top_k);
        return bound > lower ? bound : lower;
    }
    if (wish->top_p < 1 && wish->min_p <= 0) {
        /* all that are lighter than this together are less than what top_p drops */
        *total = NAME(sum_pieces)(choice, x, size, wish, (double *)choice->values);
        lower = best + wish->temperature * logf((float)((1 - wish->top_p) * *total / size)) - slack;
    }
    return lower;
}

static int NAME(draw_from_few)(Choice *choice, const float *x, int size, const Wish *wish) {
    double total = -1;
    NAME(collect)(choice, x, size, NAME(bound_below)(choice, x, size, wish, &total));
    int count = choice->count;
    NAME(weigh_values)(choice->values, count, choice->best, wish->temperature, wish->min_p, choice->weights);
    if (wish->top_k && wish->top_k < count)
        NAME(drop_below)(choice, NAME(kth_largest)(choice, choice->values, count, wish->top_k));
    if (wish->top_p < 1) {
        if (total < 0) total = NAME(add_up)(choice->weights, count);
        memcpy(choice->order, choice->values, (size_t)count * sizeof(float));
        memcpy(choice->measure, choice->weights, (size_t)count * sizeof(float));
        NAME(drop_below)(choice, NAME(cutoff)(choice->order, choice->measure, count, wish->top_p * total));
    }
    double target = wish->uniform * NAME(add_up)(choice->weights, count);
    return choice->ids[NAME(inverse)(choice->weights, count, target)];
}

static int NAME(draw_row)(Choice *choice, const float *x, int size, const Wish *wish) {
    NAME(survey)(choice, x, size);
    int finite = choice->best - choice->best == 0;
    if (!(wish->temperature > 0) || choice->odd || !finite) return NAME(first_best)(choice, x, size);
    if ((wish->top_k == 0 || wish->top_k >= size) && wish->top_p >= 1 && wish->min_p <= 0)
        return NAME(draw_from_all)(choice, x, size, wish);
    return NAME(draw_from_few)(choice, x, size, wish);
}

static void NAME(draw_stage)(Team *team, char *mine, const Draws *draws) {
    Choice choice;
    NAME(furnish_choice)(&choice, mine, draws->size);
    for (int r = take(team); r < draws->rows; r = take(team)) {
        Wish wish = {(float)draws->temperature[r], (float)draws->min_p[r], draws->top_k[r], draws->top_p[r],
                     draws->uniform[r]};
        draws->ids[r] = NAME(draw_row)(&choice, draws->logits + (int64_t)r * draws->size, draws->size, &wish);
    }
}

static void NAME(draw)(const Draws *draws, void *scratch, int32_t threads) {
    TEAM_RUN(threads, scratch, NAME(choice_size)(draws->size), NAME(draw_stage)(team, mine, draws));
}

/* -infinity for the ids of a row whose bit is not set, 32 of them in a word. */
static void NAME(mask_row)(float *x, int size, const uint32_t *bits) {
    vu lane;
    for (int i = 0; i < VL; i++) lane[i] = 1u << i;
    int i = 0;
    for (; i + VL <= size; i += VL) {
        vi set = (vi)((((vu){0} + (bits[i / 32] >> i % 32)) & lane) != 0);
        store(x + i, choose(set, load(x + i), splat(-INFINITY)));
    }
    for (; i < size; i++)
        if (!(bits[i / 32] >> i % 32 & 1)) x[i] = -INFINITY;
}

static void NAME(mask)(float *logits, int32_t size, const int64_t *rows, int32_t count, const uint32_t *bits,
                       int32_t words, int32_t threads) {
    TEAM_RUN(threads, NULL, 0, for (int i = take(team); i < count; i = take(team))
                                   NAME(mask_row)(logits + rows[i] * size, size, bits + (int64_t)i * words));
}

static void NAME(penalise_row)(const Penalty *p, float *x) {
    for (int i = 0; i < p->count; i++) {
        float value = x[p->ids[i]];
        value = value > 0 ? value / p->repetition : value * p->repetition;
        x[p->ids[i]] = value - p->frequency * p->counts[i] - (p->counts[i] > 0 ? p->presence : 0.0f);
    }
}

static void NAME(penalise)(float *logits, int32_t size, const Penalty *penalties, int32_t count, int32_t threads) {
    TEAM_RUN(threads, NULL, 0, for (int i = take(team); i < count; i = take(team)) NAME(penalise_row)(
                                   penalties + i, logits + (int64_t)penalties[i].row * size));
}

/* The `top` ids of the largest logits, the first ones where they tie, in descending order, and their logits. */
static void NAME(list_best)(Choice *choice, const float *x, int size, int top, int32_t *ids, float *values) {
    NAME(collect)(choice, x, size, NAME(bound_of)(choice, top));
    int listed = 0;
    for (int i = 0; i < choice->count; i++) {
        float value = choice->values[i];
        if (listed == top && !(value > values[top - 1])) continue;
        int at = listed < top ? listed++ : top - 1;
        for (; at > 0 && value > values[at - 1]; at--) ids[at] = ids[at - 1], values[at] = values[at - 1];
        ids[at] = choice->ids[i], values[at] = value;
    }
    for (; listed < top; listed++) ids[listed] = 0, values[listed] = -INFINITY; /* NaN is none of them */
}

static int NAME(count_above)(const float *x, int size, float least) {
    vi counts = {0};
    int i = 0, total = 0;
    for (; i + VL <= size; i += VL) counts -= (vi)(load(x + i) > least);
    for (int lane = 0; lane < VL; lane++) total += counts[lane];
    for (; i < size; i++) total += x[i] > least;
    return total;
}

static void NAME(tell_row)(Choice *choice, const Told *told, int row) {
    const float *x = told->logits + (int64_t)row * told->size;
    int32_t *ids = told->ids + (int64_t)row * (told->top + 1), own = ids[0];
    float *values = told->values + (int64_t)row * (told->top + 1);
    Wish plain = {.temperature = 1};
    NAME(survey)(choice, x, told->size);
    double total = choice->best + log(NAME(sum_pieces)(choice, x, told->size, &plain, (double *)choice->values));
    told->ranks[row] = NAME(count_above)(x, told->size, x[own]) + 1;
    values[0] = x[own];
    if (told->top) {
        NAME(survey)(choice, x, told->real);
        NAME(list_best)(choice, x, told->real, told->top, ids + 1, values + 1);
    }
    for (int i = 0; i <= told->top; i++) {
        float value = (float)(values[i] - total);
        values[i] = value < told->least ? told->least : value;
    }
}

static void NAME(tell_stage)(Team *team, char *mine, const Told *told) {
    Choice choice;
    NAME(furnish_choice)(&choice, mine, told->size);
    for (int r = take(team); r < told->rows; r = take(team)) NAME(tell_row)(&choice, told, r);
}

static void NAME(tell)(const Told *told, void *scratch, int32_t threads) {
    TEAM_RUN(threads, scratch, NAME(choice_size)(told->size), NAME(tell_stage)(team, mine, told));
}
