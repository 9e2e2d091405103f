/* Layers whose weights are codes (runtime/model/quantized.py). Their inputs become codes too: eight bits, with a scale
 * for each GROUP of a row, so that the products of a group are summed as integers. Those sums are exact, and what
 * follows is one chain over the groups: an output depends on its row alone. */
#if VL == 16
enum { ROWS_CODED = 8, TILES_CODED = 2 };
#elif VL == 8
enum { ROWS_CODED = 4, TILES_CODED = 1 };
#else
enum { ROWS_CODED = 1, TILES_CODED = 1 };
#endif
enum { AHEAD_CODED = 2048 }; /* bytes that are asked for early */

/* Scales and offsets of a group come before its lines. */
INLINE int NAME(is_coded)(int kind) { return kind == KIND_INT8 || kind == KIND_INT4; }
INLINE int NAME(header_bytes)(int kind) { return kind == KIND_INT8 ? TILE * 2 : TILE * 4; }
INLINE int64_t NAME(group_bytes)(int kind) {
    return NAME(header_bytes)(kind) + TILE * (kind == KIND_INT8 ? GROUP : GROUP / 2);
}
#define is_coded NAME(is_coded)
#define group_bytes NAME(group_bytes)

/* A row of `k` inputs: its codes, then scale and sum of the codes of each group, as float. */
INLINE int64_t NAME(coded_row)(int64_t k) { return k + k / GROUP * 8; }
#define coded_row NAME(coded_row)

INLINE void NAME(code_row)(const float *x, int k, int8_t *codes) {
    float *groups = (float *)(codes + k);
    for (int from = 0; from < k; from += GROUP, groups += 2) {
        vf most = {0}, odd = {0}, total = {0};
        for (int i = 0; i < GROUP; i += VL) {
            vf value = load(x + from + i);
            most = larger(most, (vf)((vu)value & 0x7fffffffu));
            odd += value - value; /* not a number where an input is none, or infinite */
        }
        float top = largest(most), turn = top > 1e-30f ? 127.0f / top : 0.0f;
        for (int i = 0; i < GROUP; i += VL) {
            vi code = nearest(load(x + from + i) * turn);
            *(vbu *)(codes + from + i) = __builtin_convertvector(code, vbu);
            total += __builtin_convertvector(code, vf);
        }
        groups[0] = (turn ? top / 127.0f : 0.0f) + sum(odd);
        groups[1] = sum(total);
    }
}

static void NAME(code_stage)(Team *team, const float *x, int64_t ldx, int rows, int k, int8_t *codes) {
    for (int r = take(team); r < rows; r = take(team)) NAME(code_row)(x + r * ldx, k, codes + r * coded_row(k));
}

/* The products of four codes a lane, of weights and inputs -127..127, added to a lane's sum. VNNI wants weights unsigned,
 * which `group_value` takes back. With only pairs to be had (up to AVX-512BW), which are summed in 16 bits, the signs of
 * int8's weights go to the inputs, and int4's products with a whole group fit as they are. */
#if VL == 16 && defined(__AVX512VNNI__)
INLINE vi NAME(dots)(int kind, vi sums, vu weights, vu inputs) {
    if (kind == KIND_INT8) weights ^= 0x80808080u;
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
}
INLINE vf NAME(totals)(int kind, vi sums, float total) {
    vf value = __builtin_convertvector(sums, vf);
    return kind == KIND_INT8 ? value - 128.0f * total : value; /* exact: below 2^24 */
}
#elif VL == 16 && defined(__AVX512BW__)
INLINE vi NAME(dots)(int kind, vi sums, vu weights, vu inputs) {
    __m512i w = (__m512i)weights, x = (__m512i)inputs;
    if (kind == KIND_INT4) return (vi)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16(w, x));
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), x);
    return sums + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
INLINE vf NAME(totals)(int kind, vi sums, float total) {
    (void)total;
    if (kind == KIND_INT4) sums = (vi)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
    return __builtin_convertvector(sums, vf);
}
#elif VL == 8 && defined(__AVX2__)
INLINE vi NAME(dots)(int kind, vi sums, vu weights, vu inputs) {
    __m256i w = (__m256i)weights, x = (__m256i)inputs;
    if (kind == KIND_INT4) return (vi)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16(w, x));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return sums + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE vf NAME(totals)(int kind, vi sums, float total) {
    (void)total;
    if (kind == KIND_INT4) sums = (vi)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
    return __builtin_convertvector(sums, vf);
}
#else
INLINE vi NAME(dots)(int kind, vi sums, vu weights, vu inputs) {
    (void)kind;
#pragma GCC unroll 4
    for (int i = 0; i < 32; i += 8) sums += ((vi)(weights << (24 - i)) >> 24) * ((vi)(inputs << (24 - i)) >> 24);
    return sums;
}
INLINE vf NAME(totals)(int kind, vi sums, float total) {
    (void)kind, (void)total;
    return __builtin_convertvector(sums, vf);
}
#endif
/* Compilers that may add integers in any order keep all of a group's products in memory to do so. */
#if VL >= 8 && defined(__AVX2__)
#define IN_ORDER(sums) __asm__("" : "+v"(sums))
#else
#define IN_ORDER(sums) (void)0
#endif

/* The codes of a line that meet four inputs. */
INLINE vu NAME(codes_in)(int kind, vu line, int part) { return kind == KIND_INT4 ? line >> 4 * part & 0x0f0f0f0fu : line; }

/* What a group adds to an output but for the scale of its inputs; `total` is the sum of their codes. */
INLINE vf NAME(group_value)(int kind, vi sums, float total, vf scale, vf offset) {
    vf value = NAME(totals)(kind, sums, total) * scale;
    return kind == KIND_INT4 ? value + offset * total : value;
}

/* `rows` rows of `k` coded inputs, whose scales and sums begin at `groups`, against `tiles` tiles that lie `step` apart, added to out. */
INLINE void NAME(coded_pass)(int kind, int rows, int tiles, const int8_t *x, int64_t ldx, const int8_t *groups,
                             const char *w, int64_t step, int k, float *out, int64_t ldo) {
    enum { MOST = ROWS_CODED, WIDE = 2 * TILE / VL };
    int columns = tiles * TILE / VL, lines = kind == KIND_INT8 ? GROUP / 4 : GROUP / 8, parts = GROUP / 4 / lines;
    vf acc[MOST][WIDE];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) acc[r][c] = load(out + r * ldo + c * VL);
    for (int from = 0; from < k; from += GROUP, w += group_bytes(kind), groups += 8) {
        vi sums[MOST][WIDE] = {{{0}}};
        const char *line = w + NAME(header_bytes)(kind);
#pragma GCC unroll 8
        for (int l = 0; l < lines; l++, line += TILE * 4) {
            for (int t = 0; t < tiles; t++) __builtin_prefetch(line + t * step + AHEAD_CODED, 0, 2);
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) {
                vu codes[WIDE];
#pragma GCC unroll 8
                for (int c = 0; c < columns; c++)
                    codes[c] = NAME(codes_in)(kind, *(const vuu *)(line + c / (TILE / VL) * step + c % (TILE / VL) * VL * 4), part);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    uint32_t four;
                    memcpy(&four, x + r * ldx + from + (l * parts + part) * 4, 4);
#pragma GCC unroll 8
                    for (int c = 0; c < columns; c++) {
                        sums[r][c] = NAME(dots)(kind, sums[r][c], codes[c], (vu){0} + four);
                        IN_ORDER(sums[r][c]);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            const uint16_t *header = (const uint16_t *)(w + c / (TILE / VL) * step) + c % (TILE / VL) * VL;
            vf scale = load_f16(header), offset = kind == KIND_INT4 ? load_f16(header + TILE) : splat(0.0f);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const float *group = (const float *)(groups + r * ldx);
                acc[r][c] += NAME(group_value)(kind, sums[r][c], group[1], scale, offset) * group[0];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) store(out + r * ldo + c * VL, acc[r][c]);
}

/* Rows against one pair of tiles, in passes of as many rows as the registers hold. */
INLINE void NAME(coded_rows)(int kind, int rows, const int8_t *x, int64_t ldx, const int8_t *groups, const char *w,
                             int64_t step, int k, float *out, int64_t ldo) {
    if (rows == 1) {
        NAME(coded_pass)(kind, 1, 2, x, ldx, groups, w, step, k, out, ldo);
        return;
    }
    for (int tile = 0; tile < 2; tile += TILES_CODED, w += TILES_CODED * step, out += TILES_CODED * TILE) {
        int r = 0;
        for (; r + ROWS_CODED <= rows; r += ROWS_CODED)
            NAME(coded_pass)(kind, ROWS_CODED, TILES_CODED, x + r * ldx, ldx, groups + r * ldx, w, step, k, out + r * ldo, ldo);
        for (; r < rows; r++)
            NAME(coded_pass)(kind, 1, TILES_CODED, x + r * ldx, ldx, groups + r * ldx, w, step, k, out + r * ldo, ldo);
    }
}

static void NAME(coded_pair)(const Linear *layer, int pair, const int8_t *codes, int from, int to, float *buffer) {
    int64_t bytes = layer->k / GROUP * group_bytes(layer->kind), ldx = coded_row(layer->k);
    const char *tiles = (const char *)layer->data + 2 * pair * bytes;
    memset(buffer, 0, (size_t)(to - from) * 2 * TILE * sizeof(float));
    for (int k = 0; k < layer->k; k += K_BLOCK) {
        int now = layer->k - k < K_BLOCK ? layer->k - k : K_BLOCK;
        const int8_t *x = codes + from * ldx, *groups = x + layer->k + k / GROUP * 8;
        const char *w = tiles + k / GROUP * group_bytes(layer->kind);
        if (layer->kind == KIND_INT8)
            NAME(coded_rows)(KIND_INT8, to - from, x + k, ldx, groups, w, bytes, now, buffer, 2 * TILE);
        else
            NAME(coded_rows)(KIND_INT4, to - from, x + k, ldx, groups, w, bytes, now, buffer, 2 * TILE);
    }
}
#undef IN_ORDER
