/*
 * The team: the thread pool of the kernels. The calling thread is a member.
 *
 * A job has a number of items, and threads claim them one by one. A thread that is not running
 * claims none. A preempted thread therefore delays a job by one item at most, and sleeping threads
 * do not delay it. A thread without work spins for a moment, and then sleeps.
 */

#ifndef TEAM_H
#define TEAM_H

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_THREADS 1024
#define SPIN_NANOSECONDS 50000

typedef void (*Item)(void *job, long item);

static struct {
    /*
     * high half: number of the job's items; low half: the next item to claim.
     * One word holds both, so that a claimed item belongs to the count that was read
     */
    _Atomic uint64_t turns;
    _Atomic uint32_t left;  /* items that are not done; a futex */
    _Atomic int is_awaited; /* the caller sleeps until nothing is left */
    _Atomic uint32_t jobs;  /* so far; a futex */
    _Atomic int sleepers;
    Item item;
    void *job;
    _Atomic int threads;  /* that may work, the caller among them */
    _Atomic int is_bound; /* each thread of the team keeps to its core; the caller sees to itself */
    int cores[MOST_THREADS];
    cpu_set_t anywhere; /* where the process may run, once threads were bound */
    int started;
    pthread_mutex_t mutex;
} team = {.threads = 1, .mutex = PTHREAD_MUTEX_INITIALIZER};

static inline void futex(_Atomic uint32_t *word, int operation, uint32_t value) {
    syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

static inline int has_items(uint64_t turns) { return (uint32_t)turns < turns >> 32; }

/* Claims and executes items until none is left. */
static void work(void) {
    while (has_items(atomic_load_explicit(&team.turns, memory_order_relaxed))) {
        const uint64_t turns = atomic_fetch_add(&team.turns, 1);
        if (!has_items(turns)) return;
        team.item(team.job, (long)(uint32_t)turns);
        if (atomic_fetch_sub(&team.left, 1) == 1 && atomic_load(&team.is_awaited))
            futex(&team.left, FUTEX_WAKE_PRIVATE, 1);
    }
}

static inline long long nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Spins until `is_so` is true or SPIN_NANOSECONDS have passed. Returns `is_so`. */
#define SPIN_UNTIL(is_so)                                                                          \
    ({                                                                                             \
        const long long end = nanoseconds() + SPIN_NANOSECONDS;                                    \
        while (!(is_so) && nanoseconds() < end)                                                    \
            for (int i = 0; i < 16 && !(is_so); i++) __builtin_ia32_pause();                       \
        (is_so);                                                                                   \
    })

static void keep_to(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    /* If the system refuses, the thread runs on any core. */
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
}

static void *member(void *number) {
    const int me = (int)(intptr_t)number;
    int is_bound = 0;
    /* The thread inherits its creator's affinity, which may be one core. */
    if (CPU_COUNT(&team.anywhere))
        pthread_setaffinity_np(pthread_self(), sizeof team.anywhere, &team.anywhere);
    for (;;) {
        const uint32_t jobs = atomic_load(&team.jobs);
        if (!is_bound && me < atomic_load(&team.threads) && atomic_load(&team.is_bound))
            keep_to(team.cores[me]), is_bound = 1;
        if (me < atomic_load(&team.threads)) {
            work();
            if (SPIN_UNTIL(has_items(atomic_load_explicit(&team.turns, memory_order_relaxed))))
                continue;
        }
        atomic_fetch_add(&team.sleepers, 1);
        futex(&team.jobs, FUTEX_WAIT_PRIVATE, jobs);
        atomic_fetch_sub(&team.sleepers, 1);
    }
    return NULL;
}

/* Resets the team in a forked child, which has none of the threads. */
static void forget(void) {
    atomic_store(&team.sleepers, 0);
    atomic_store(&team.turns, 0);
    team.started = 0;
    pthread_mutex_init(&team.mutex, NULL);
}

static void start_threads(void) {
    pthread_attr_t attributes;
    sigset_t all, old;
    if (team.started == 0) team.started = 1;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 8 << 20);
    /* The host application handles signals, so the threads block them. */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    for (pthread_t thread; team.started < atomic_load(&team.threads); team.started++)
        if (pthread_create(&thread, &attributes, member, (void *)(intptr_t)team.started) != 0)
            break;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
}

/*
 * Executes all items of a job, fewer than 2^31, on the team.
 * If another caller uses the team, the calling thread executes them alone.
 */
static void share_out(long count, Item item, void *job) {
    if (count == 1 || atomic_load(&team.threads) == 1 || pthread_mutex_trylock(&team.mutex) != 0) {
        for (long i = 0; i < count; i++) item(job, i);
        return;
    }
    if (team.started < atomic_load(&team.threads)) start_threads();
    team.item = item, team.job = job;
    atomic_store(&team.left, (uint32_t)count);
    atomic_store(&team.is_awaited, 0);
    atomic_store(&team.turns, (uint64_t)count << 32);
    atomic_fetch_add(&team.jobs, 1);
    if (atomic_load(&team.sleepers)) futex(&team.jobs, FUTEX_WAKE_PRIVATE, INT32_MAX);
    work();
    if (!SPIN_UNTIL(atomic_load(&team.left) == 0)) {
        atomic_store(&team.is_awaited, 1);
        for (uint32_t left; (left = atomic_load(&team.left)) != 0;)
            futex(&team.left, FUTEX_WAIT_PRIVATE, left);
    }
    pthread_mutex_unlock(&team.mutex);
}

/* share_out if the job `is_long`, else a loop: a short job ends before threads would wake. */
static void share_out_if(int is_long, long count, Item item, void *job) {
    if (is_long)
        share_out(count, item, job);
    else
        for (long i = 0; i < count; i++) item(job, i);
}

static pthread_key_t own_key;

/*
 * Scratch memory of the calling thread for one item. Its earlier contents are lost.
 * NULL: out of memory.
 */
static void *own_memory(size_t bytes) {
    static __thread size_t size;
    void *memory = pthread_getspecific(own_key);
    if (bytes <= size) return memory;
    free(memory);
    size = (bytes + 4095) / 4096 * 4096;
    memory = aligned_alloc(64, size);
    if (memory == NULL || pthread_setspecific(own_key, memory) != 0) size = 0;
    return memory;
}

/* Sets up the team. Must be called first. 0: the system lacks resources. */
static int make_team(void) {
    return pthread_key_create(&own_key, free) == 0 && pthread_atfork(NULL, NULL, forget) == 0;
}

#endif
