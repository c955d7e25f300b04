// Reads rows of weights from files and packs them, in threads of the lowest priority: so a model is read while Python
// is busy, for example with importing torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "pack.h"

namespace penstock {

struct ReadJob {
  PackJob pack;    // its `rows` are set to what was read
  int64_t offset;  // of the rows in the file
  int64_t bytes;   // of the rows, which lie together
  int32_t file;    // a descriptor that stays open until the end
};

// The first job that failed, if any: with an error of the system, at the file's end (`end`, with error 0), or with rows
// that cannot be quantised.
struct ReadFailure {
  int64_t job;  // -1: none
  int64_t end;
  int64_t bad_rows;
  int32_t error;
};

class WeightReader {
 public:
  // Starts threads of the lowest priority, fewer if the system refuses some. `jobs` must outlive this object.
  WeightReader(const ReadJob* jobs, int64_t count, int threads);
  // Drops jobs that have not started.
  ~WeightReader();
  WeightReader(const WeightReader&) = delete;
  WeightReader& operator=(const WeightReader&) = delete;

  // Adds threads of ordinary priority, since a caller is blocked on the result.
  void hurry(int threads);
  // Does the next job in the calling thread. False if none is left.
  bool help();
  // Blocks until the jobs of all threads are done.
  ReadFailure wait();
  // Bytes that are packed so far.
  int64_t done() const { return done_.load(std::memory_order_relaxed); }

 private:
  void start(int threads, bool lowest);
  bool next(std::vector<uint8_t>& buffer);
  void perform(int64_t job, std::vector<uint8_t>& buffer);
  void fail(const ReadFailure& failure);
  void join();

  const ReadJob* const jobs_;
  const int64_t count_;
  std::atomic<int64_t> next_job_{0}, done_{0};
  std::mutex failing_;
  ReadFailure failure_{-1, 0, 0, 0};
  std::vector<uint8_t> buffer_;  // of the thread that calls `help`
  std::vector<std::thread> threads_;
};

}  // namespace penstock
