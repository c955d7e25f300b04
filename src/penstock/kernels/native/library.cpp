// The functions that Python calls (see library.py).
#include <cstring>
#include <exception>
#include <vector>

#include "isa.h"

using namespace penstock;

namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

struct Choice {
  const Isa* isa;
  bool (*supported)();
};

constexpr int kChoices = 1;
const Choice kBestFirst[kChoices] = {{&kAvx2, has_avx2}};

}  // namespace

struct Engine {
  Engine(const Isa& isa, int threads, const std::vector<int>& cpus) : isa(isa), team(threads, cpus) {}

  void run(const Op* ops, int64_t count) {
    size_t shared = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (ops[i].code != OpCode::linear) continue;
      const size_t needed = isa.linear_shared_bytes(ops[i].linear);
      if (needed > shared) shared = needed;
    }
    team.reserve_shared(shared);
    team.run([&](Worker& worker) {
      for (int64_t i = 0; i < count; ++i) execute(ops[i], worker);
    });
  }

  void execute(const Op& op, Worker& worker) const {
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
      case OpCode::count:
        return;
    }
  }

  const Isa& isa;
  Team team;
};

#pragma GCC visibility push(default)
extern "C" {

// The i-th instruction set that was built and this processor has, the best first; null past the last.
const char* penstock_isa(int i) {
  for (const Choice& choice : kBestFirst) {
    if (choice.supported() && i-- == 0) return choice.isa->name;
  }
  return nullptr;
}

// Of the sources this was built from (see build.py).
const char* penstock_digest() { return PENSTOCK_DIGEST; }

int64_t penstock_op_bytes() { return sizeof(Op); }

// Null where the processor lacks the instruction set, or threads or memory are refused.
Engine* penstock_start(const char* isa, int threads, const int* cpus, int cpu_count) {
  try {
    for (const Choice& choice : kBestFirst) {
      if (std::strcmp(choice.isa->name, isa) == 0 && choice.supported()) {
        return new Engine(*choice.isa, threads, std::vector<int>(cpus, cpus + cpu_count));
      }
    }
  } catch (const std::exception&) {
  }
  return nullptr;
}

// Runs ops in order. One thread calls. Returns 0, or 1 when memory ran out before anything was done.
int penstock_run(Engine* engine, const Op* ops, int64_t count) {
  try {
    engine->run(ops, count);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

void penstock_stop(Engine* engine) { delete engine; }

}  // extern "C"
#pragma GCC visibility pop
