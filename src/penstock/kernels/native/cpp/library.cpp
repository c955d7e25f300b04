// The functions that Python calls (see loader.py, team.py and reading.py).
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <vector>

#include "batch.h"
#include "finite.h"
#include "gather.h"
#include "gguf_rows.h"
#include "isa.h"
#include "lease.h"
#include "pack.h"
#include "reading.h"

using namespace penstock;

namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#ifdef PENSTOCK_EMULATED  // the tests' build: see tests/kernels/native/emulation
[[maybe_unused]] bool has_avx512() { return true; }
[[maybe_unused]] bool has_avx512_bf16() { return true; }
[[maybe_unused]] bool has_amx() { return true; }
#else
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

[[maybe_unused]] bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

#ifdef PENSTOCK_AMX
// A Linux process must request the tile registers once, before it starts threads.
bool has_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool has = has_avx512() && __builtin_cpu_supports("avx512bf16") &&
                          __builtin_cpu_supports("avx512fp16") && __builtin_cpu_supports("amx-tile") &&
                          __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
                          syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return has;
}
#endif
#endif

struct BuiltIsa {
  const Isa* isa;
  bool (*supported)();
};

// An old compiler cannot build all of them: build.py defines a macro for each file it built.
const BuiltIsa kBestFirst[] = {
#ifdef PENSTOCK_AMX
    {&kAmx, has_amx},
#endif
#ifdef PENSTOCK_AVX512_BF16
    {&kAvx512Bf16, has_avx512_bf16},
#endif
#ifdef PENSTOCK_AVX512
    {&kAvx512, has_avx512},
#endif
    {&kAvx2, has_avx2},
};

}  // namespace

struct ThreadTeam {
  ThreadTeam(const Isa& isa, int threads, const std::vector<int>& cpus) : isa(isa), team(threads, cpus) {}

  void run(const RecordedOp* ops, int64_t count) {
    reserve(ops, count);
    team.run([&](Worker& worker) {
      for (int64_t i = 0; i < count; ++i) execute(ops[i], worker);
    });
  }

  // Measures on the first thread: every op ends with a barrier.
  void profile(const RecordedOp* ops, int64_t count, double* seconds) {
    reserve(ops, count);
    team.run([&](Worker& worker) {
      for (int64_t i = 0; i < count; ++i) {
        const auto began = std::chrono::steady_clock::now();
        execute(ops[i], worker);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        if (worker.index() == 0) seconds[i] = took.count();
      }
    });
  }

  void reserve(const RecordedOp* ops, int64_t count) {
    size_t shared = 0;
    for (int64_t i = 0; i < count; ++i) {
      const size_t needed = shared_bytes(ops[i]);
      if (needed > shared) shared = needed;
    }
    team.reserve_shared(shared);
  }

  size_t shared_bytes(const RecordedOp& op) const {
    if (op.code == OpCode::linear) return isa.linear_shared_bytes(op.linear);
    if (op.code == OpCode::recurrence) return recurrence_shared_bytes(op.recurrence);
    return op.code == OpCode::experts ? isa.experts_shared_bytes(op.experts) : 0;
  }

  void execute(const RecordedOp& op, Worker& worker) const {
    switch (op.code) {
      case OpCode::embedding:
        return isa.embedding(worker, op.embedding);
      case OpCode::norm:
        return isa.norm(worker, op.norm);
      case OpCode::linear:
        return isa.linear(worker, op.linear);
      case OpCode::rotation:
        return isa.rotation(worker, op.rotation);
      case OpCode::cache:
        return isa.cache(worker, op.cache);
      case OpCode::attention:
        return isa.attention(worker, op.attention);
      case OpCode::sample:
        return isa.sample(worker, op.sample);
      case OpCode::route:
        return isa.route(worker, op.route);
      case OpCode::experts:
        return isa.experts(worker, op.experts);
      case OpCode::fill:
        return fill(worker, op.fill);
      case OpCode::advance:
        return advance(worker, op.advance);
      case OpCode::finite:
        return finite(worker, op.finite);
      case OpCode::recurrence:
        return isa.recurrence(worker, op.recurrence);
      case OpCode::gate:
        return isa.gate(worker, op.gate);
      case OpCode::latent:
        return isa.latent(worker, op.latent);
      case OpCode::gather:
        return gather(worker, op.gather);
      case OpCode::count:
        return;
    }
  }

  const Isa& isa;
  Team team;
};

#pragma GCC visibility push(default)
extern "C" {

// The i-th of the instruction sets that were built and this processor has, the best first; null past the last.
const char* penstock_isa(int i) {
  for (const BuiltIsa& built : kBestFirst) {
    if (built.supported() && i-- == 0) return built.isa->name;
  }
  return nullptr;
}

// The digest of the sources (see build.py).
const char* penstock_digest() { return PENSTOCK_DIGEST; }

int64_t penstock_op_bytes() { return sizeof(RecordedOp); }

// Null if the processor lacks the instruction set, or threads or memory are refused.
ThreadTeam* penstock_start(const char* isa, int threads, const int* cpus, int cpu_count) {
  try {
    for (const BuiltIsa& built : kBestFirst) {
      if (std::strcmp(built.isa->name, isa) == 0 && built.supported()) {
        return new ThreadTeam(*built.isa, threads, std::vector<int>(cpus, cpus + cpu_count));
      }
    }
  } catch (const std::exception&) {
  }
  return nullptr;
}

// Runs ops in order. Only one thread may call. Returns 0, or 1 if memory ran out before anything was done.
int penstock_run(ThreadTeam* engine, const RecordedOp* ops, int64_t count) {
  try {
    engine->run(ops, count);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// The same, and the seconds that each op took: [count].
int penstock_profile(ThreadTeam* engine, const RecordedOp* ops, int64_t count, double* seconds) {
  try {
    engine->profile(ops, count, seconds);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// Wakes sleeping threads for a run that comes soon.
void penstock_wake(ThreadTeam* engine) { engine->team.wake(); }

// Lets the threads sleep until then.
void penstock_rest(ThreadTeam* engine) { engine->team.rest(); }

void penstock_stop(ThreadTeam* engine) { delete engine; }

int64_t penstock_lease_bytes() { return sizeof(LeaseSegment); }

// `segment` is memory of that size, at the begin of a page. The lease lasts as long as the process. The results of the
// next two functions are ProcessorLease::Answer.
ProcessorLease* penstock_lease_open(void* segment, int place, double weight) {
  return new ProcessorLease(*static_cast<LeaseSegment*>(segment), place, weight);
}

int penstock_lease_take(ProcessorLease* lease, int64_t due) { return lease->take(due); }

int penstock_lease_wait(ProcessorLease* lease) { return lease->wait(); }

void penstock_lease_give(ProcessorLease* lease) { lease->give(); }

int64_t penstock_pack(const PackJob* job) { return pack_rows(*job); }

// Writes rows of a GGUF type as fp32 [rows_count][k]. A row starts every row_bytes. Returns 0. Returns -1 and writes
// nothing if the type has no codes, k is not a whole number of blocks, a row is too short, or the processor lacks AVX2.
int64_t penstock_dequantize(int32_t type, const void* rows, int64_t rows_count, int64_t k, int64_t row_bytes,
                            float* out) {
  if (!has_avx2() || rows_count < 0 || !is_coded_row(type, k, row_bytes)) return -1;
  for (int64_t i = 0; i < rows_count; ++i) {
    dequantize_row(Stored{type}, static_cast<const uint8_t*>(rows) + i * row_bytes, k, out + i * k);
  }
  return 0;
}

// Writes a row's codes and scales. Returns 0 or -1 as penstock_dequantize does.
int64_t penstock_decode(int32_t type, const void* row, int64_t k, int64_t row_bytes, const CodedRow* out) {
  if (!has_avx2() || !is_coded_row(type, k, row_bytes)) return -1;
  decode_row(Stored{type}, static_cast<const uint8_t*>(row), k, *out);
  return 0;
}

// Null if the type has no codes.
const CodeTraits* penstock_code_traits(int32_t type) {
  return is_coded_row(type, 0, 0) ? &traits_of(Stored{type}) : nullptr;
}

// Null if memory is refused.
WeightReader* penstock_read(const ReadJob* jobs, int64_t count, int threads) {
  try {
    return new WeightReader(jobs, count, threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Adds threads of ordinary priority.
void penstock_read_hurry(WeightReader* reader, int threads) { reader->hurry(threads); }

// Does up to `most` jobs in the calling thread. Returns the bytes that all threads have packed so far.
int64_t penstock_help(WeightReader* reader, int64_t most) {
  while (most-- > 0 && reader->help()) {
  }
  return reader->done();
}

// Blocks until started jobs are done. `failure` is the first one.
void penstock_read_wait(WeightReader* reader, ReadFailure* failure) { *failure = reader->wait(); }

void penstock_read_end(WeightReader* reader) { delete reader; }

}  // extern "C"
#pragma GCC visibility pop
