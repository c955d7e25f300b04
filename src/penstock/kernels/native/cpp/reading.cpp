#include "reading.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <new>

namespace penstock {
namespace {

constexpr int kLowestPriority = 19;

}  // namespace

WeightReader::WeightReader(const ReadJob* jobs, int64_t count, int threads) : jobs_(jobs), count_(count) {
  start(threads, true);
}

void WeightReader::hurry(int threads) { start(threads, false); }

void WeightReader::start(int threads, bool lowest) {
  try {
    threads_.reserve(threads_.size() + threads);
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this, lowest] {
        if (lowest) setpriority(PRIO_PROCESS, 0, kLowestPriority);  // of this thread alone, on Linux; may be refused
        std::vector<uint8_t> buffer;
        while (next(buffer)) {
        }
      });
    }
  } catch (const std::exception&) {  // no thread, or no memory for one: other threads do the jobs
  }
}

WeightReader::~WeightReader() {
  next_job_ = count_;
  join();
}

bool WeightReader::help() { return next(buffer_); }

ReadFailure WeightReader::wait() {
  join();
  return failure_;
}

void WeightReader::join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool WeightReader::next(std::vector<uint8_t>& buffer) {
  const int64_t job = next_job_++;
  if (job >= count_) return false;
  try {
    perform(job, buffer);
  } catch (const std::bad_alloc&) {
    fail({job, 0, 0, ENOMEM});
  }
  return true;
}

void WeightReader::perform(int64_t index, std::vector<uint8_t>& buffer) {
  const ReadJob& job = jobs_[index];
  if (buffer.size() < static_cast<size_t>(job.bytes)) buffer.resize(job.bytes);
  for (int64_t read = 0; read < job.bytes;) {
    const ssize_t count = pread(job.file, buffer.data() + read, job.bytes - read, job.offset + read);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return fail({index, job.offset + read, 0, count < 0 ? errno : 0});
    read += count;
  }
  PackJob pack = job.pack;
  pack.rows = buffer.data();
  const int64_t bad = pack_rows(pack);
  if (bad == -2) return fail({index, 0, 0, EINVAL});
  if (bad < 0) throw std::bad_alloc();
  if (bad > 0) return fail({index, 0, bad, 0});
  done_ += job.bytes;
}

// Keeps the first failure, and lets no more jobs start.
void WeightReader::fail(const ReadFailure& failure) {
  next_job_ = count_;
  const std::lock_guard<std::mutex> lock(failing_);
  if (failure_.job < 0) failure_ = failure;
}

}  // namespace penstock
