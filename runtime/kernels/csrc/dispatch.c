/* The library's door: the kernels of an instruction set by name, best first, as far as this machine has it; and who
 * runs them. */
#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "kernels.h"

static int runs(const char *name) {
#if defined(SIDESTEP_ANY_TARGET)
    if (!strcmp(name, "avx512") || !strcmp(name, "avx512bf16")) return 1;
#endif
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx512")) return avx512;
    int vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(name, "avx512vnni")) return vnni;
#if defined(KNOWS_BF16)
    if (!strcmp(name, "avx512bf16")) return vnni && __builtin_cpu_supports("avx512bf16");
#endif
#endif
    return !strcmp(name, "portable");
}

/* NULL where there is no `index`-th that runs here. */
const Kernels *sidestep_kernels(int32_t index) {
    static const Kernels *const all[] = {
#if defined(__x86_64__)
#if defined(KNOWS_BF16)
        &kernels_avx512bf16,
#endif
#if !defined(SIDESTEP_ANY_TARGET)
        &kernels_avx512vnni,
#endif
        &kernels_avx512, &kernels_avx2,
#endif
        &kernels_portable};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (runs(all[i]->name) && index-- == 0) return all[i];
    return NULL;
}

/* The operating system's ids of the threads that compute for the caller, whose own is the first; 0 for what is wanting. */
void sidestep_threads(int32_t *ids, int32_t threads) {
    memset(ids, 0, (size_t)threads * sizeof *ids);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    ids[omp_get_thread_num()] = (int32_t)syscall(SYS_gettid);
#else
    ids[0] = (int32_t)syscall(SYS_gettid);
#endif
}
