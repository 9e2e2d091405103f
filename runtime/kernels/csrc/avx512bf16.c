/* AVX-512 with the dot products of bytes and of bfloat16: Zen 4, Cooper Lake, Sapphire Rapids and later. */
#include "kernels.h"
#if defined(__x86_64__) && defined(KNOWS_BF16)
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "team.h"
#if defined(SIDESTEP_ANY_TARGET) /* for tests: the same vectors in whatever instructions the compiler is told to use */
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma,prefer-vector-width=512")
#endif
#define VL 16
#define PAIRS_OF_BF16
#define ISA avx512bf16
#include "body.h"
#if defined(__clang__) && !defined(SIDESTEP_ANY_TARGET)
#pragma clang attribute pop
#endif
#else
typedef int nothing_here;
#endif
