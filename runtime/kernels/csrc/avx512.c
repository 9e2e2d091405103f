/* AVX-512 (foundation, bytes and words, double and quad words, short vectors). */
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "kernels.h"
#include "team.h"
#if defined(SIDESTEP_ANY_TARGET) /* for tests: the same vectors in whatever instructions the compiler is told to use */
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif
#define VL 16
#define ISA avx512
#include "body.h"
#if defined(__clang__) && !defined(SIDESTEP_ANY_TARGET)
#pragma clang attribute pop
#endif
#else
typedef int nothing_here;
#endif
