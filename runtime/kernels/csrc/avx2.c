/* AVX2 with FMA: x86-64 since 2013 (Intel) and 2015 (AMD). */
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "kernels.h"
#include "team.h"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define VL 8
#define ISA avx2
#include "body.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int nothing_here;
#endif
