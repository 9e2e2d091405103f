/* A team of threads that walks through stages together: one OpenMP region for a whole step, so that a stage costs a
 * barrier (well under a microsecond) and not a fork. Tasks are taken from a shared counter: where one thread is
 * held up by another process on its core, the others take its share. */
#ifndef SIDESTEP_TEAM_H
#define SIDESTEP_TEAM_H
#include <sched.h>
#include <stdatomic.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { SPINS = 4000 }; /* about 50 µs; then the core is offered to others between looks */

typedef struct {
    _Alignas(64) atomic_int next;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int phase;
    _Alignas(64) int size;
    char *scratch;        /* of all threads */
    int64_t scratch_each; /* bytes of each thread's part */
} Team;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait for all; the counter starts anew. What was written before is seen after. */
static inline void meet(Team *team) {
    int phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->phase, memory_order_acquire) == phase; spins++)
        if (spins < SPINS)
            relax();
        else
            sched_yield();
}

static inline int take(Team *team) { return atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed); }

/* Run `body` in `threads` threads; in it `team`, `self` and `mine` (the thread's scratch) are known. */
#ifdef _OPENMP
#define TEAM_RUN(threads, memory, each, body)                                                                          \
    do {                                                                                                               \
        Team team_ = {.scratch = (char *)(memory), .scratch_each = (each)}, *team = &team_;                            \
        _Pragma("omp parallel num_threads(threads)") {                                                                 \
            if (omp_get_thread_num() == 0) team->size = omp_get_num_threads();                                         \
            _Pragma("omp barrier") char *mine = team->scratch ? team->scratch + team->scratch_each * omp_get_thread_num() : NULL;             \
            (void)mine;                                                                                                \
            body;                                                                                                      \
        }                                                                                                              \
    } while (0)
#else
#define TEAM_RUN(threads, memory, each, body)                                                                          \
    do {                                                                                                               \
        Team team_ = {.size = 1, .scratch = (char *)(memory), .scratch_each = (each)}, *team = &team_;                 \
        char *mine = team->scratch;                                                                                    \
        (void)mine, (void)(threads);                                                                                   \
        body;                                                                                                          \
    } while (0)
#endif
#endif
