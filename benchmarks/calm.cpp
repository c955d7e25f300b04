// Samples how fast each core completes independent instructions: see calm.py.
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Core {
  struct Sample {
    double at, ratio;
  };
  std::vector<Sample> samples;
  double lowest = 1e9;
};
std::mutex guard;
std::vector<Core>& cores = *new std::vector<Core>;  // never freed: the threads run until the process ends

double now() {  // Python's time.perf_counter(), in all processes
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// 1,600 instructions, of which eight after one another are independent.
void independent() {
  for (int i = 0; i < 25; ++i) {
    asm volatile(
        ".rept 8\n\tlea (%%rsp), %%rax\n\tlea (%%rsp), %%rcx\n\tlea (%%rsp), %%rdx\n\tlea (%%rsp), %%rsi\n\t"
        "lea (%%rsp), %%rdi\n\tlea (%%rsp), %%r8\n\tlea (%%rsp), %%r9\n\tlea (%%rsp), %%r10\n\t.endr"
        :
        :
        : "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10");
  }
}

// 400 multiplications that depend on one another.
void dependent() {
  unsigned long x = 1;
  for (int i = 0; i < 25; ++i) asm volatile(".rept 16\n\timul %0, %0\n\t.endr" : "+r"(x));
}

void sample(Core& core) {
  std::array<double, 9> times;
  double chain = 1e9;
  for (double& time : times) {
    const double began = now();
    independent();
    const double between = now();
    dependent();
    time = between - began;
    chain = std::min(chain, now() - between);
  }
  std::sort(times.begin(), times.end());
  const std::lock_guard lock(guard);
  core.lowest = std::min(core.lowest, times[0] / chain);
  core.samples.push_back({now(), times[times.size() / 2] / chain});
}

}  // namespace

// Starts a thread on each of the processors, which takes a sample every `period` seconds. To be called once.
extern "C" void watch(const int* cpus, int count, double period) {
  cores.resize(count);
  for (int i = 0; i < count; ++i) {
    std::thread([cpu = cpus[i], &core = cores[i], period] {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpu, &set);
      sched_setaffinity(0, sizeof set, &set);
      for (;; std::this_thread::sleep_for(std::chrono::duration<double>(period))) sample(core);
    }).detach();
  }
}

// The share of samples from `began` to `ended` whose ratio is at most `limit` times the core's lowest, of the core with
// the smallest share. -1 if a core has no sample.
extern "C" double calm_share(double began, double ended, double limit) {
  const std::lock_guard lock(guard);
  double least = cores.empty() ? -1 : 1;
  for (const Core& core : cores) {
    int calm = 0, all = 0;
    for (auto each = core.samples.rbegin(); each != core.samples.rend() && each->at >= began; ++each) {
      if (each->at > ended) continue;
      ++all;
      calm += each->ratio <= limit * core.lowest;
    }
    if (all == 0) return -1;
    least = std::min(least, double(calm) / all);
  }
  return least;
}
