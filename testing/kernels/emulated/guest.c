// Calls functions of a library on an emulated processor, on behalf of the parent process and with its pointers.
// The first access to a page requests the page from the parent, and after the call the changed bytes are sent back. So
// this program needs no description of the memory that the arguments point to.
//
// Requests arrive on stdin, messages are written to stdout; all numbers have 8 bytes.
//   request: is_text, the length of the function's name, the name, 16 integers, 8 numbers in the format of
//            floating-point registers
//   PAGE address             requests a page; the parent answers with is_there and the bytes of the page
//   CHANGED address length   followed by the changed bytes
//   DONE result              or, for a function that returns text, the length of the text, followed by the text
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE, CHANGED, DONE };
enum { PAGE_SIZE = 4096, MAX_PAGES = 1 << 16, NUM_INTEGERS = 16, NUM_REALS = 8 };

typedef struct {
  char *place, *before;
} page;

static page pages[MAX_PAGES];
static int num_pages;
static atomic_flag is_busy = ATOMIC_FLAG_INIT;

static void fail(const char* text) {
  fprintf(stderr, "%s\n", text);
  _exit(3);
}

static void receive(void* target, size_t size) {
  for (char* at = target; size;) {
    const ssize_t num = read(0, at, size);
    if (num <= 0) _exit(0);  // the parent has ended
    at += num, size -= (size_t)num;
  }
}

static void send(const void* source, size_t size) {
  for (const char* at = source; size;) {
    const ssize_t num = write(1, at, size);
    if (num <= 0) _exit(0);
    at += num, size -= (size_t)num;
  }
}

// Replaces the C library's function in the library that is called. That one zeroes with DC ZVA, which qemu 7.2 leaves out
// at some addresses if the instruction is the first access to a page.
void* memset(void* target, int value, size_t size) {
  for (volatile char* at = target; at < (char*)target + size; at++) *at = (char)value;
  return target;
}

static char* map_page(void) {
  char* place = mmap(NULL, PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) fail("there is no memory for a page");
  return place;
}

// Another thread may have fetched the page meanwhile. mremap makes the page visible together with its content.
static void fetch_page(int signal_number, siginfo_t* info, void* context) {
  char* place = (char*)((uintptr_t)info->si_addr / PAGE_SIZE * PAGE_SIZE);
  (void)signal_number, (void)context;
  while (atomic_flag_test_and_set(&is_busy)) usleep(0);
  int found = 0;
  while (found < num_pages && pages[found].place != place) found++;
  if (found == num_pages) {
    const int64_t message[] = {PAGE, (int64_t)place};
    int64_t is_there;
    if (num_pages == MAX_PAGES) fail("a call touches too many pages");
    send(message, sizeof message);
    receive(&is_there, sizeof is_there);
    if (!is_there) fail("a call touches memory that is not mapped");
    char *before = map_page(), *filled = map_page();
    receive(before, PAGE_SIZE);
    memcpy(filled, before, PAGE_SIZE);
    if (mremap(filled, PAGE_SIZE, PAGE_SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place) fail("a page has no place");
    pages[num_pages++] = (page){place, before};
  }
  atomic_flag_clear(&is_busy);
}

static void send_changes(const page* p) {
  for (int64_t i = 0; i < PAGE_SIZE; i++) {
    int64_t end = i;
    while (end < PAGE_SIZE && p->place[end] != p->before[end]) end++;
    if (end == i) continue;
    const int64_t message[] = {CHANGED, (int64_t)(p->place + i), end - i};
    send(message, sizeof message);
    send(p->place + i, (size_t)(end - i));
    i = end;
  }
}

static void return_pages(void) {
  for (int i = 0; i < num_pages; i++) {
    send_changes(&pages[i]);
    munmap(pages[i].place, PAGE_SIZE);
    munmap(pages[i].before, PAGE_SIZE);
  }
  num_pages = 0;
}

// In the calling convention of AArch64, integers and floating-point numbers are passed in separate registers, whatever
// their order among each other, and a function ignores additional arguments.
typedef int64_t (*function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double, double, double, double,
                            double, double, double, double);

static int64_t call(function f, const int64_t* i, const double* r) {
  return f(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15], r[0],
           r[1], r[2], r[3], r[4], r[5], r[6], r[7]);
}

static void answer(void* library) {
  int64_t is_text, length, integers[NUM_INTEGERS];
  double reals[NUM_REALS];
  char name[256] = {0};
  receive(&is_text, sizeof is_text);
  receive(&length, sizeof length);
  if (length >= (int64_t)sizeof name) fail("a name is too long");
  receive(name, (size_t)length);
  receive(integers, sizeof integers);
  receive(reals, sizeof reals);
  const function f = (function)dlsym(library, name);
  if (!f) fail(dlerror());
  int64_t result = call(f, integers, reals);
  const char* text = (const char*)result;
  return_pages();
  if (is_text) result = (int64_t)strlen(text);
  const int64_t message[] = {DONE, result};
  send(message, sizeof message);
  if (is_text) send(text, (size_t)result);
}

int main(int num_arguments, char** arguments) {
  const struct sigaction action = {.sa_sigaction = fetch_page, .sa_flags = SA_SIGINFO};
  if (num_arguments != 2) fail("there is one argument, the library");
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) fail(dlerror());
  sigaction(SIGSEGV, &action, NULL);
  for (;;) answer(library);
}
