// Tasks: the parts of a step that threads share.
//
// Another process may occupy a core at any time, for longer than a whole layer takes, so a thread may be suspended in
// the middle of a task. Threads therefore take tasks one by one. A thread that has waited for some time for unfinished
// tasks executes these tasks too. This is harmless if a task always writes the same values to the same places, and no
// other code writes there until all threads have left the step. Such tasks are *repeatable*.

enum { PATIENCE = 1000, MAX_SPINS = 20000 };  // turns of a waiting loop, each about 20 ns

typedef struct {
  _Alignas(64) _Atomic int64_t next;  // the next task to start
  _Alignas(64) _Atomic int64_t num_done;
  _Atomic uint8_t* done;  // [num_tasks] if the tasks are repeatable, otherwise NULL
  // If the number is known only during the step, every thread sets it to the same value before its first task.
  _Atomic int64_t num_tasks;
} task_list;

// Executes a task. `next` is the task that the thread executes afterwards, or -1.
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

// Executes tasks until all have been started, and returns without waiting for other threads.
static inline void share_tasks(task_list* tasks, task_function run, const void* context) {
  const int64_t num_tasks = tasks->num_tasks;
  for (int64_t task = take_task(tasks), next; task < num_tasks; task = next) {
    next = take_task(tasks);  // known in advance, so that run() can prefetch its data
    run(context, task, next < num_tasks ? next : -1);
    finish_task(tasks, task);
  }
}

// Executes tasks until all have been started, then waits until all are done.
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
