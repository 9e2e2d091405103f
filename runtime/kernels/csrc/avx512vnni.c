/* AVX-512 with the dot products of bytes (VNNI): Ice Lake, Zen 4 and later. */
#if defined(__x86_64__) && !defined(SIDESTEP_ANY_TARGET)
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "kernels.h"
#include "team.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,prefer-vector-width=512")
#endif
#define VL 16
#define ISA avx512vnni
#include "body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int nothing_here;
#endif
