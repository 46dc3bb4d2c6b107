// Parts of a step, cut into tasks that threads share.
//
// Threads do not stay: another process may take a core at any time and keep it for longer than a whole layer takes. So
// a thread takes one task after the other, and where it has waited for the last ones for some time, it does them as
// well. That is harmless where a task writes the same values to the same places whenever it is done, and nothing else
// is written there before all threads have left the step: such a part is *repeatable*.

enum { PATIENCE = 1000, MAX_SPINS = 20000 };  // turns of a waiting loop, each some 20 ns

typedef struct {
  _Alignas(64) _Atomic int64_t next;  // task to be taken
  _Alignas(64) _Atomic int64_t num_done;
  _Atomic uint8_t* done;  // [num_tasks], where it is repeatable; else NULL
  // Where it is known only in the step, every thread sets it to the same number before its first task.
  _Atomic int64_t num_tasks;
} task_list;

// Does a task. `next` is the one that the thread does after it, -1 if none.
typedef void (*task_function)(const void* context, int64_t task, int64_t next);

INLINE int64_t take_task(task_list* tasks) { return atomic_fetch_add_explicit(&tasks->next, 1, memory_order_relaxed); }

INLINE void finish_task(task_list* tasks, int64_t task) {
  if (!tasks->done || !atomic_exchange_explicit(&tasks->done[task], 1, memory_order_acq_rel))
    atomic_fetch_add_explicit(&tasks->num_done, 1, memory_order_release);
}

INLINE void relax(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Does the tasks that no other thread takes, and returns at once.
static inline void share_tasks(task_list* tasks, task_function run, const void* context) {
  const int64_t num_tasks = tasks->num_tasks;
  for (int64_t task = take_task(tasks), next; task < num_tasks; task = next) {
    next = take_task(tasks);  // known ahead, so that what it reads can be fetched meanwhile
    run(context, task, next < num_tasks ? next : -1);
    finish_task(tasks, task);
  }
}

// Does the tasks that no other thread takes, and returns when all are done.
static inline void finish_tasks(task_list* tasks, task_function run, const void* context) {
  const int64_t num_tasks = tasks->num_tasks;
  share_tasks(tasks, run, context);
  for (int64_t spins = 1; atomic_load_explicit(&tasks->num_done, memory_order_acquire) < num_tasks; spins++) {
    if (spins == PATIENCE && tasks->done)
      for (int64_t task = 0; task < num_tasks; task++)
        if (!atomic_load_explicit(&tasks->done[task], memory_order_acquire)) {
          run(context, task, -1);
          finish_task(tasks, task);
        }
    if (spins % MAX_SPINS == 0)
      sched_yield();
    else
      relax();
  }
}
