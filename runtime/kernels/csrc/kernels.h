/* What the library offers. Everything is plain C on caller-owned memory: no allocation, no torch, no globals.
 *
 * Weights are packed in tiles of TILE output columns, K in order (see runtime/kernels/pack.py). A row's result depends on no other row
 * and on no number of threads: each output element is one chain of multiply-adds over K in a fixed order. */
#ifndef SIDESTEP_KERNELS_H
#define SIDESTEP_KERNELS_H
#include <stdint.h>

enum { TILE = 16 };                   /* output columns of a tile */
enum { KIND_F32 = 0, KIND_BF16 = 1 }; /* of weights, keys, values and embeddings */
enum { KIND_INT8 = 2, KIND_INT4 = 3 }; /* of weights: signed codes * scale; code * scale + offset; by groups of inputs */
enum { GROUP = 32 };                  /* inputs that share a scale and an offset, which are float16 */

typedef struct {
    int32_t kind, n, k;   /* n outputs, k inputs: an even number, of codes a multiple of GROUP */
    const void *data;     /* packed, with zeros beyond n up to a whole pair of tiles */
    const float *bias;    /* as long as the packed outputs, or NULL */
} Linear;

typedef struct {
    const float *input_norm, *post_norm; /* [hidden] */
    const float *q_norm, *k_norm;        /* [head_dim] or NULL */
    Linear qkv, out, gate_up, down;      /* gate_up: tiles of gate and up take turns */
    void *keys, *values;                 /* [cells, kv_heads, head_dim] */
} Layer;

typedef struct {
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim;
    int32_t block_size, window;          /* window: keys that a token sees, 0 is all */
    int32_t kv_kind, embedding_kind;
    float eps;
    const Layer *layer;
    const void *embedding;               /* [vocab, hidden] */
    const float *norm;                   /* [hidden] */
} Model;

typedef struct {
    int32_t tokens, rows, decode;        /* T, R; the first `decode` rows have one token each */
    int32_t pages;                       /* columns of page_table */
    int32_t parts;                       /* room for so many parts of a decode row's keys, PART keys each */
    const int32_t *ids;                  /* [T] */
    const int64_t *cells;                /* [T] where each token's keys and values go */
    const float *cos, *sin;              /* [T, head_dim] */
    const int32_t *query_lens, *seq_lens; /* [R] */
    const int32_t *page_table;           /* [R, pages] */
} Step;

/* A decode row's keys are attended to in parts of PART, so that one long row is work for several threads. */
enum { PART = 512 };

/* How each row's token is drawn; see sampling.h. */
typedef struct {
    int32_t rows, size;          /* logits [rows, size] */
    const float *logits;
    const double *temperature;   /* [rows]; 0 is greedy */
    const int64_t *top_k;        /* [rows]; 0 is off */
    const double *top_p, *min_p; /* [rows]; 1 and 0 are off */
    const double *uniform;       /* [rows], in [0, 1) */
    int32_t *ids;                /* [rows] out */
} Draws;

typedef struct {
    int32_t row, count;
    const int32_t *ids, *counts; /* [count]: ids that have occurred, each once; how often each stands in the output */
    float repetition, frequency, presence;
} Penalty;

/* What is told of tokens beside themselves. */
typedef struct {
    int32_t rows, size, real, top; /* logits [rows, size], of which the first `real` are ids; `top` <= real */
    float least;                   /* what a smaller log probability is told as */
    const float *logits;
    int32_t *ids;                  /* [rows, 1 + top]: the first of each row is given, the best follow */
    float *values;                 /* [rows, 1 + top]: their log probabilities */
    int32_t *ranks;                /* [rows]: of the given ids, from 1 */
} Told;

/* Every kernel for one instruction set. `scratch` is aligned to 64 bytes and of at least the size that is told. */
typedef struct {
    const char *name;
    int64_t (*scratch_size)(const Model *, int32_t tokens, int32_t rows, int32_t parts, int32_t threads);
    void (*forward)(const Model *, const Step *, float *hidden, void *scratch, int32_t threads);
    int64_t (*linear_size)(const Linear *, int32_t rows, int32_t threads); /* of the scratch of `linear` */
    void (*linear)(const Linear *, const float *x, int32_t rows, float *out, void *scratch, int32_t threads);
    void (*attend)(const Model *, const Step *, int32_t layer, const float *qkv, int32_t ld, float *out, void *scratch,
                   int32_t threads);
    void (*rms_norm)(const float *x, const float *weight, float eps, int32_t rows, int32_t size, float *out,
                     int32_t threads);
    int64_t (*choice_size)(int32_t size); /* scratch of each thread that `draw` and `tell` need */
    void (*draw)(const Draws *, void *scratch, int32_t threads);
    void (*tell)(const Told *, void *scratch, int32_t threads);
    void (*mask)(float *logits, int32_t size, const int64_t *rows, int32_t count, const uint32_t *bits, int32_t words,
                 int32_t threads);
    void (*penalise)(float *logits, int32_t size, const Penalty *, int32_t count, int32_t threads);
} Kernels;

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_avx512vnni, kernels_avx512bf16;

/* Compilers that know every instruction set here; the newest ones are left out by others. */
#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 11
#define KNOWS_BF16
#endif
#endif
