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
typedef int32_t NAME(v4i) __attribute__((vector_size(16)));
#define vf NAME(vf)
#define vfu NAME(vfu)
#define vu NAME(vu)
#define vuu NAME(vuu)
#define vi NAME(vi)
#define vh NAME(vh)
#define vhu NAME(vhu)
#define vbu NAME(vbu)
#define v4 NAME(v4)
#define v4i NAME(v4i)

#define INLINE static inline __attribute__((always_inline))

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf x) { *(vfu *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
/* Spelled out where compilers make five instructions of one. */
#if VL == 16 && defined(__AVX512F__)
#define widened(x) (vu)_mm512_cvtepu16_epi32((__m256i)(x))
#elif VL == 8 && defined(__AVX2__)
#define widened(x) (vu)_mm256_cvtepu16_epi32((__m128i)(x))
#else
#define widened(x) __builtin_convertvector(x, vu)
#endif
INLINE vf from_bf16(vh x) { return (vf)(widened(x) << 16); }
INLINE vf load_bf16(const uint16_t *p) { return from_bf16(*(const vhu *)p); }
INLINE float NAME(scalar)(const void *p, int kind, int64_t at) {
    if (kind == KIND_F32) return ((const float *)p)[at];
    union { uint32_t bits; float value; } u = {(uint32_t)((const uint16_t *)p)[at] << 16};
    return u.value;
}
INLINE vf load_kind(const void *p, int kind, int64_t at) {
    return kind == KIND_BF16 ? load_bf16((const uint16_t *)p + at) : load((const float *)p + at);
}

/* Finite float16: the exponent is rebased by a multiplication, which subnormals survive. */
INLINE vf load_f16(const uint16_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(*(const __m256i_u *)p);
#elif VL == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(*(const __m128i_u *)p);
#else
    vu bits = widened(*(const vhu *)p), sign = (bits & 0x8000) << 16;
    return (vf)((vu)((vf)((bits & 0x7fff) << 13) * 0x1p112f) | sign);
#endif
}

/* The whole number that is nearest, even of two; |x| < 2^22. */
INLINE vi nearest(vf x) {
#if VL == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtps_epi32((__m256)x);
#else
    return (vi)(x + 12582912.0f) - (vi)splat(12582912.0f);
#endif
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

/* `mask` is all ones or all zeros in each lane. */
INLINE vf choose(vi mask, vf yes, vf no) {
#if VL == 8 && defined(__AVX2__)
    return (vf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
#endif
}
/* `b` where one is not a number. */
INLINE vf larger(vf a, vf b) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8 && defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE vf smaller(vf a, vf b) { return -larger(-a, -b); }

INLINE float sum(vf x) {
    union { vf whole; v4 part[VL / 4]; } u = {x};
    v4 s = u.part[0];
    for (int i = 1; i < VL / 4; i++) s += u.part[i];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

INLINE float largest(vf x) {
    union { vf whole; v4 part[VL / 4]; } u = {x};
    v4 m = u.part[0];
    for (int i = 1; i < VL / 4; i++) {
        v4i more = u.part[i] > m;
        m = (v4)(((v4i)u.part[i] & more) | ((v4i)m & ~more));
    }
    float low = m[0] > m[1] ? m[0] : m[1], high = m[2] > m[3] ? m[2] : m[3];
    return low > high ? low : high;
}

INLINE vi iota(void) {
    vi lanes;
    for (int i = 0; i < VL; i++) lanes[i] = i;
    return lanes;
}

/* Of two vectors the lanes without the bit `half` (`odd`: with it), those of `b` moved to the lanes with the bit. */
INLINE vf mix(vf a, vf b, int half, int odd) {
#if defined(__clang__)
    vf r;
    for (int i = 0; i < VL; i++) r[i] = i & half ? b[odd ? i : i - half] : a[odd ? i + half : i];
    return r;
#else
    vi low = iota(), with = (low & half) != 0;
    return __builtin_shuffle(a, b, low + (with & (VL - half)) + (odd ? half : 0));
#endif
}

/* Lane j of x[i] and lane i of x[j] change places. */
INLINE void transpose(vf *x) {
#pragma GCC unroll 4
    for (int half = 1; half < VL; half *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++)
            if (!(i & half)) {
                vf a = x[i], b = x[i + half];
                x[i] = mix(a, b, half, 0), x[i + half] = mix(a, b, half, 1);
            }
}

/* Neighbours `half` apart added: of `a` in the lanes without the bit `half`, of `b` in those with it. */
INLINE vf halves(vf a, vf b, int half) { return mix(a, b, half, 0) + mix(a, b, half, 1); }

/* Sums of the lanes of `to / from` vectors whose lanes are sums already but for those `from`, 2 * from, ... apart: lanes
 * i, i + to, ... have what is left of x[i / from]. Overwrites x. */
INLINE vf sums(vf *x, int from, int to) {
#pragma GCC unroll 4
    for (int half = from; half < to; half *= 2)
#pragma GCC unroll 8
        for (int i = 0; i < to / from; i += 2 * half / from) x[i] = halves(x[i], x[i + half / from], half);
    return x[0];
}

/* e^x within 2 ulp; 0 below -87, e^88 above 88 (Cody and Waite's reduction, a degree 6 polynomial). */
INLINE vf expv(vf x) {
    vf clamped = smaller(larger(x, splat(-87.0f)), splat(88.0f));
    vi whole = nearest(clamped * 1.44269504f);
    vf k = __builtin_convertvector(whole, vf);
    vf r = clamped - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return choose(x < -87.0f, splat(0.0f), p * (vf)((whole + 127) << 23));
}

/* 2^x within 3e-7 of itself, x below 128; 2^-100 below -100. NaN stays NaN. A degree 5 polynomial, fitted to relative
 * errors; the sum with 3 * 2^22 + 127 has the exponent in its lowest bits. */
INLINE vf exp2v(vf x) {
    vf clamped = larger(splat(-100.0f), x), shifted = clamped + 12583039.0f, r = clamped - (shifted - 12583039.0f);
    vf p = r * 1.327647245e-3f + 9.675540961e-3f;
    p = p * r + 5.550713092e-2f;
    p = p * r + 2.402212024e-1f;
    p = p * r + 6.931469440e-1f;
    p = p * r + 1.000000119f;
    return p * (vf)((vi)shifted << 23);
}
