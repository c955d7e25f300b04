// A team of threads that runs one program at a time. All threads go through the program op by op: they share an op's
// work, and meet at a barrier after it.
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
  // `cpus`: the processor of each thread, the caller's first; empty: threads are not pinned.
  Team(int threads, const std::vector<int>& cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs `body` on every thread, the caller included, and returns when all are done.
  void run(const std::function<void(Worker&)>& body);

  // Wakes sleeping threads for a program that comes soon. They spin for as long as after a program.
  void wake();

  // Lets threads that spin between programs sleep at once: other processes compute now on their processors.
  void rest() { resting_.store(true, std::memory_order_relaxed); }

  // Memory that the threads share while a program runs. It grows only between programs.
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

  alignas(64) std::atomic<uint32_t> calls_{0};  // counts programs and wakes; workers block until it changes
  std::atomic<uint32_t> generation_{0};         // counts programs; changes before `calls_` does
  std::atomic<int> stopping_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};  // counts barriers
  std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> claimed_{0};  // items of the current loop that are taken
  alignas(64) std::atomic<int> asleep_{0};

  struct alignas(64) Share {  // a thread's share of a loop: items taken, alternately for one loop and the next
    std::atomic<int64_t> taken[2] = {0, 0};
  };
  std::vector<Share> shares_;  // [size_]
  std::atomic<bool> resting_{false};  // until the next program or wake
};

// One thread of a team, as the ops see it.
class Worker {
 public:
  Worker(Team& team, int index) : team_(team), index_(index) {}

  int index() const { return index_; }
  int count() const { return team_.size(); }

  // Calls body(begin, end) for pieces of [0, items), of `grain` items each but the last. A thread that is free takes
  // the next piece. Returns when all pieces are done. Every thread must make the same calls.
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

  // The same, but each thread goes through a share of its own from front to back, and then takes pieces of shares that
  // are not done. So a thread reads memory as one stream, and its next piece is known.
  template <class Body>
  void for_share(int64_t items, int64_t grain, Body&& body) {
    const int size = team_.size();
    if (size == 1) return for_each(items, grain, body);
    team_.shares_[index_].taken[!parity_].store(0, std::memory_order_relaxed);  // all threads have left that loop
    for (int i = 0; i < size; ++i) {
      const int owner = (index_ + i) % size;
      const int64_t first = items * owner / size, last = items * (owner + 1) / size;
      std::atomic<int64_t>& taken = team_.shares_[owner].taken[parity_];
      for (;;) {
        const int64_t begin = first + taken.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= last) break;
        body(begin, begin + grain < last ? begin + grain : last);
      }
    }
    parity_ = !parity_;
    team_.barrier();
  }

  // Memory of all threads, of at least the bytes last reserved.
  std::byte* shared() const { return team_.shared_.get(); }

  // Memory of this thread, 64-byte aligned. It is invalidated by the next call with the same place, of kPlaces.
  static constexpr int kPlaces = 2;
  std::byte* own(size_t bytes, int place = 0);

 private:
  Team& team_;
  int index_;
  bool parity_ = false;
  struct Own {
    std::unique_ptr<std::byte[], void (*)(void*)> memory{nullptr, nullptr};
    size_t bytes = 0;
  } own_[kPlaces];
};

}  // namespace penstock
