// The turns of engines in several processes that compute on the same processors.
//
// All processes map one segment. One engine holds the lease at a time: it takes the lease before a step, and keeps it
// for the next one unless another engine's turn has come. Turns follow start-time fair queueing (Goyal, Vin, Cheng
// 1997): an engine has a tag, which grows by the time of its steps divided by its weight, and the smallest tag is first.
#pragma once

#include <atomic>
#include <cstdint>

namespace penstock {

// An engine's place in the segment. Only its own process writes it, except `wakes` and, after its end, `waits`.
struct alignas(64) EnginePlace {
  std::atomic<uint32_t> wakes;    // a futex: it changes when the process should look again
  std::atomic<uint32_t> waits;    // 1 while the process waits for its turn
  std::atomic<uint32_t> process;  // its id
  std::atomic<int64_t> tag;       // ns of all steps, divided by the weight
  std::atomic<int64_t> usual;     // ns of a step, on average of late
  std::atomic<int64_t> began;     // when its last step began, as all times in ns of CLOCK_MONOTONIC
  std::atomic<int64_t> due;       // when the first token of one of its requests is due at the earliest
};

struct LeaseSegment {
  static constexpr int kPlaces = 255;
  alignas(64) std::atomic<uint64_t> holder;  // in the low 8 bits the holder's place + 1, or 0; above a count of turns
  std::atomic<int64_t> clock;                // the highest tag of a holder so far
  std::atomic<uint32_t> used;                // places up to the last one that had an engine
  EnginePlace places[kPlaces];
};

class ProcessorLease {
 public:
  enum Answer { kWait, kAlone, kContested };

  // The segment is zero at first. An engine that is started again has the same place.
  ProcessorLease(LeaseSegment& segment, int place, double weight);

  // Takes the lease for a step, or keeps it for another one, if it is this engine's turn. Else `wait` must follow.
  Answer take(int64_t due);
  // Blocks until it is this engine's turn.
  Answer wait();
  // Gives the lease back, if this engine has it.
  void give();

 private:
  bool is_holder() const { return held_ != 0 && segment_.holder.load() == held_; }
  void charge(int64_t now);
  bool begin(uint64_t before, int64_t now);
  bool take_free(int64_t now);
  bool take_from_holder(int64_t now);
  int64_t least_tag() const;
  EnginePlace* first_waiting(int64_t now) const;
  Answer answer(int64_t now) const;

  LeaseSegment& segment_;
  EnginePlace& own_;
  const int place_;
  const double weight_;
  uint64_t held_ = 0;  // the value of `holder` in the turn of this engine; 0: it has none
};

}  // namespace penstock
