// Reads rows of weights from files and packs them, by threads that leave the processors to whoever wants them: a model
// can be read while Python is busy with something else, as with importing torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "pack.h"

namespace penstock {

struct ReadJob {
  PackJob pack;    // its `rows` are what is read
  int64_t offset;  // of these in the file: they lie together,
  int64_t bytes;   // so many
  int32_t file;    // a descriptor, open until the end
};

// The first job that failed, if any: by an error of the system, the file's end (at `end`, without an error), or rows
// that cannot be quantised.
struct ReadFailure {
  int64_t job;  // -1: none
  int64_t end;
  int64_t bad_rows;
  int32_t error;
};

class WeightReader {
 public:
  // Begins, with threads of the lowest priority. The jobs must stay where they are until this is gone. With fewer threads
  // where the system refuses some.
  WeightReader(const ReadJob* jobs, int64_t count, int threads);
  // What has not begun is left undone.
  ~WeightReader();
  WeightReader(const WeightReader&) = delete;
  WeightReader& operator=(const WeightReader&) = delete;

  // Goes on with so many more threads, of ordinary priority: somebody waits.
  void hurry(int threads);
  // Does the next job in the calling thread. False when there is none left.
  bool help();
  // Waits for those that others do.
  ReadFailure wait();
  // Bytes that are packed.
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
  std::vector<uint8_t> buffer_;  // of who helps
  std::vector<std::thread> threads_;
};

}  // namespace penstock
