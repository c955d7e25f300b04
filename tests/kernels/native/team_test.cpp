// Hammers Team with programs of random loops, to be built with -fsanitize=thread (see test_sanitized.py).
//
// A program is several loops in a row, of sizes and grains that every thread draws alike; an element of a loop is read
// by the next, from wherever another thread wrote it. What threads share without a barrier in between, the sanitizer
// reports; what a barrier lets through too early gives a wrong sum.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "team.h"

using penstock::Team;
using penstock::Worker;

namespace {

constexpr int64_t kMost = 97;

struct Loop {
  int64_t items, grain;
};

std::vector<Loop> draw_program(std::mt19937& random) {
  std::vector<Loop> loops(1 + random() % 6);
  for (Loop& loop : loops) loop = {static_cast<int64_t>(random() % kMost), 1 + static_cast<int64_t>(random() % 20)};
  return loops;
}

// Each element becomes 1 plus the sum of the last loop's elements at it and at its mirror image.
int64_t next(const std::vector<int64_t>& from, int64_t items, int64_t i) {
  return 1 + (from[i] + from[items - 1 - i]) % 1000003;
}

std::vector<int64_t> by_one_thread(const std::vector<Loop>& loops) {
  std::vector<int64_t> from(kMost), to(kMost);
  for (const Loop& loop : loops) {
    for (int64_t i = 0; i < loop.items; ++i) to[i] = next(from, loop.items, i);
    from.swap(to);
  }
  return from;
}

std::vector<int64_t> by_team(Team& team, const std::vector<Loop>& loops) {
  std::vector<int64_t> buffers[2] = {std::vector<int64_t>(kMost), std::vector<int64_t>(kMost)};
  team.reserve_shared(loops.size() * 64);
  team.run([&](Worker& worker) {
    auto* mine = reinterpret_cast<int64_t*>(worker.own(loops.size() * sizeof(int64_t)));
    auto* shared = reinterpret_cast<int64_t*>(worker.shared());
    for (size_t k = 0; k < loops.size(); ++k) {
      const std::vector<int64_t>& from = buffers[k % 2];
      std::vector<int64_t>& to = buffers[1 - k % 2];
      const Loop loop = loops[k];
      worker.for_each(loop.items, loop.grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) to[i] = next(from, loop.items, i);
        mine[k] = begin;
        if (begin == 0) shared[k] = loop.items;
      });
    }
  });
  return buffers[loops.size() % 2];
}

}  // namespace

int main(int, char** arguments) {
  const int threads = std::atoi(arguments[1]), programs = std::atoi(arguments[2]);
  std::mt19937 random(threads);
  for (int team_number = 0; team_number < 3; ++team_number) {
    Team team(threads, {});
    for (int program = 0; program < programs; ++program) {
      const std::vector<Loop> loops = draw_program(random);
      if (by_team(team, loops) != by_one_thread(loops)) {
        std::fprintf(stderr, "program %d of a team of %d is wrong\n", program, threads);
        return 1;
      }
    }
  }
  std::puts("all right");
}
