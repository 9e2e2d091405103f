/* Vectors of VL floats in the compiler's own vector types: one source for every instruction set. */
typedef float NAME(vf) __attribute__((vector_size(4 * VL)));
typedef float NAME(vfu) __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint32_t NAME(vu) __attribute__((vector_size(4 * VL)));
typedef uint32_t NAME(vuu) __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t NAME(vi) __attribute__((vector_size(4 * VL)));
typedef uint16_t NAME(vh) __attribute__((vector_size(2 * VL)));
typedef uint16_t NAME(vhu) __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef int8_t NAME(vbu) __attribute__((vector_size(VL), aligned(1), may_alias));
typedef float NAME(v4) __attribute__((vector_size(16)));
#define vf NAME(vf)
#define vfu NAME(vfu)
#define vu NAME(vu)
#define vuu NAME(vuu)
#define vi NAME(vi)
#define vh NAME(vh)
#define vhu NAME(vhu)
#define vbu NAME(vbu)
#define v4 NAME(v4)

#define INLINE static inline __attribute__((always_inline))

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf x) { *(vfu *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf from_bf16(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }
INLINE vf load_bf16(const uint16_t *p) { return from_bf16(*(const vhu *)p); }
INLINE float NAME(scalar)(const void *p, int kind, int64_t at) {
    if (kind == KIND_F32) return ((const float *)p)[at];
    union { uint32_t bits; float value; } u = {(uint32_t)((const uint16_t *)p)[at] << 16};
    return u.value;
}
INLINE vf load_kind(const void *p, int kind, int64_t at) {
    return kind == KIND_BF16 ? load_bf16((const uint16_t *)p + at) : load((const float *)p + at);
}

/* Rounded to nearest even; NaN stays NaN. */
INLINE vh to_bf16(vf x) {
    vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
    vu odd = (vu)(x != x);
    return __builtin_convertvector((quiet & odd) | (rounded & ~odd), vh);
}

INLINE void store_kind(void *p, int kind, int64_t at, vf x) {
    if (kind == KIND_BF16)
        *(vhu *)((uint16_t *)p + at) = to_bf16(x);
    else
        store((float *)p + at, x);
}

INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vf larger(vf a, vf b) { return select(a > b, a, b); }

INLINE float sum(vf x) {
    union { vf whole; v4 part[VL / 4]; } u = {x};
    v4 s = u.part[0];
    for (int i = 1; i < VL / 4; i++) s += u.part[i];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

INLINE float largest(vf x) {
    float m = x[0];
    for (int i = 1; i < VL; i++) m = x[i] > m ? x[i] : m;
    return m;
}

/* e^x within 2 ulp for x <= 0 or small; 0 below -87 (Cody and Waite's reduction, a degree 6 polynomial). */
INLINE vf expv(vf x) {
    vf clamped = larger(x, splat(-87.0f));
    vf n = clamped * 1.44269504f;
    vi whole = __builtin_convertvector(n + select(n < 0, splat(-0.5f), splat(0.5f)), vi);
    vf k = __builtin_convertvector(whole, vf);
    vf r = clamped - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return select(x < -87.0f, splat(0.0f), p * (vf)((whole + 127) << 23));
}
