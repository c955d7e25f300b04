#include "team.h"

#include <sched.h>

#include <cstdlib>
#include <new>

namespace penstock {
namespace {

// About 100 µs, which is longer than a piece of work.
constexpr int kSpins = 4000;

// About 600 µs, which is longer than the Python between two steps: a sleeping thread would delay the next step. Only
// for pinned threads, which cannot take a processor from one another.
constexpr int kSpinsBetweenPrograms = 5 * kSpins;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Blocks until `value` is no longer `old`: spins first, unless or until `rests`, then sleeps.
void wait_while(std::atomic<uint32_t>& value, uint32_t old, std::atomic<int>& asleep, const std::atomic<bool>& rests,
                int spins = kSpins) {
  for (int i = 0; i < spins && !rests.load(std::memory_order_relaxed); ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  asleep.fetch_add(1);
  value.wait(old);
  asleep.fetch_sub(1);
}

// Sets `value` and wakes sleepers. Value and count of sleepers are sequentially consistent: either this sees the
// sleeper, or the sleeper sees the new value before it sleeps.
void set_and_wake(std::atomic<uint32_t>& value, uint32_t next, std::atomic<int>& asleep) {
  value.store(next);
  if (asleep.load() != 0) value.notify_all();
}

// Pins the calling thread. (pthread_setaffinity_np would need glibc 2.34: see isa/sampling/glibc.h.)
void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);  // if refused, the thread stays unpinned
}

std::unique_ptr<std::byte[], void (*)(void*)> aligned(size_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), std::free};
}

}  // namespace

Team::Team(int threads, const std::vector<int>& cpus)
    : size_(threads),
      pinned_(cpus.size() == static_cast<size_t>(threads)),
      shared_(nullptr, std::free),
      shares_(threads) {
  for (int i = 0; i < size_; ++i) workers_.push_back(std::make_unique<Worker>(*this, i));
  if (pinned_) pin(cpus[0]);
  for (int i = 1; i < size_; ++i) {
    threads_.emplace_back([this, i, cpu = pinned_ ? cpus[i] : -1] {
      if (cpu >= 0) pin(cpu);
      serve(i);
    });
  }
}

Team::~Team() {
  stopping_.store(1);
  generation_.fetch_add(1);
  wake();
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(Worker&)>& body) {
  body_ = &body;
  generation_.store(generation_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  wake();
  body(*workers_[0]);
  if (size_ > 1) barrier();
}

void Team::wake() {
  resting_.store(false, std::memory_order_relaxed);
  if (size_ > 1) set_and_wake(calls_, calls_.load(std::memory_order_relaxed) + 1, asleep_);
}

void Team::serve(int index) {
  uint32_t seen = 0, call = 0;
  for (;;) {
    wait_while(calls_, call, asleep_, resting_, pinned_ ? kSpinsBetweenPrograms : kSpins);
    call = calls_.load(std::memory_order_acquire);
    const uint32_t now = generation_.load(std::memory_order_acquire);
    if (now == seen) continue;
    seen = now;
    if (stopping_.load()) return;
    (*body_)(*workers_[index]);
    barrier();
  }
}

void Team::barrier() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    claimed_.store(0, std::memory_order_relaxed);
    set_and_wake(phase_, phase + 1, asleep_);
  } else {
    wait_while(phase_, phase, asleep_, resting_);
  }
}

void Team::reserve_shared(size_t bytes) {
  if (bytes <= shared_bytes_) return;
  shared_ = aligned(bytes);
  shared_bytes_ = bytes;
}

std::byte* Worker::own(size_t bytes, int place) {
  Own& own = own_[place];
  if (bytes > own.bytes) {
    own.memory = aligned(bytes);
    own.bytes = bytes;
  }
  return own.memory.get();
}

}  // namespace penstock
