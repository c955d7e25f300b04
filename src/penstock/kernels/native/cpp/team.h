// A team of threads that runs one program at a time: every thread walks through it, they share the work of each op,
// and none goes on before all are done with it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace penstock {

class Worker;

class Team {
 public:
  // `cpus`: where to pin each thread, the caller's first; empty: nowhere. Its size is the number of threads otherwise.
  Team(int threads, const std::vector<int>& cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs body on every thread, this one included, and returns when all are done.
  void run(const std::function<void(Worker&)>& body);

  // Tells threads that sleep of a program to come soon: they wait for it awake, for as long as after a program.
  void wake();

  // Memory that the threads share while a program runs. Grows between programs only.
  void reserve_shared(size_t bytes);

 private:
  friend class Worker;
  void serve(int index);
  void barrier();

  const int size_;
  const bool pinned_;
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<std::byte[], void (*)(void*)> shared_;
  size_t shared_bytes_ = 0;
  const std::function<void(Worker&)>* body_ = nullptr;

  alignas(64) std::atomic<uint32_t> calls_{0};  // counts programs and wakes; workers wait for it to change
  std::atomic<uint32_t> generation_{0};         // counts programs; changes before `calls_` does
  std::atomic<int> stopping_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};  // counts barriers
  std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> claimed_{0};  // items of the present loop that are taken
  alignas(64) std::atomic<int> asleep_{0};

  struct alignas(64) Share {  // of a loop that is shared out; in turns of one loop and the next
    std::atomic<int64_t> taken[2] = {0, 0};
  };
  std::vector<Share> shares_;  // [size_]
};

// One thread of a team, as the ops see it.
class Worker {
 public:
  Worker(Team& team, int index) : team_(team), index_(index), own_(nullptr, nullptr) {}

  int index() const { return index_; }
  int count() const { return team_.size(); }

  // Calls body(begin, end) for pieces of [0, items), of `grain` items each but the last, that the team's threads take
  // as they come; returns when all pieces are done. Every thread must make the same calls.
  template <class Body>
  void for_each(int64_t items, int64_t grain, Body&& body) {
    if (team_.size() == 1) {
      for (int64_t begin = 0; begin < items; begin += grain) {
        body(begin, begin + grain < items ? begin + grain : items);
      }
      return;
    }
    for (;;) {
      const int64_t begin = team_.claimed_.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= items) break;
      body(begin, begin + grain < items ? begin + grain : items);
    }
    team_.barrier();
  }

  // The same, but a thread goes through a share of its own from front to back, and then helps where others are not
  // done: what it reads is one stream, and what it reads next is known.
  template <class Body>
  void for_share(int64_t items, int64_t grain, Body&& body) {
    const int size = team_.size();
    if (size == 1) return for_each(items, grain, body);
    team_.shares_[index_].taken[!turn_].store(0, std::memory_order_relaxed);  // all have left that loop
    for (int i = 0; i < size; ++i) {
      const int owner = (index_ + i) % size;
      const int64_t first = items * owner / size, last = items * (owner + 1) / size;
      std::atomic<int64_t>& taken = team_.shares_[owner].taken[turn_];
      for (;;) {
        const int64_t begin = first + taken.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= last) break;
        body(begin, begin + grain < last ? begin + grain : last);
      }
    }
    turn_ = !turn_;
    team_.barrier();
  }

  // Of at least the bytes last reserved; for all threads.
  std::byte* shared() const { return team_.shared_.get(); }

  // Memory of this thread, 64-byte aligned; what an earlier call returned is lost.
  std::byte* own(size_t bytes);

 private:
  Team& team_;
  int index_;
  bool turn_ = false;
  std::unique_ptr<std::byte[], void (*)(void*)> own_;
  size_t own_bytes_ = 0;
};

}  // namespace penstock
