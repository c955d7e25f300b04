#include "lease.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <limits>

namespace penstock {
namespace {

constexpr int64_t kMillisecond = 1'000'000, kSecond = 1000 * kMillisecond;
constexpr int64_t kTurn = 5 * kMillisecond;     // by which a holder's tag may exceed a waiting one: fewer changes
constexpr int64_t kLook = 20 * kMillisecond;    // between looks of a waiting process at the holder
constexpr int64_t kClose = kSecond / 2;         // before a deadline, from which on the engine goes ahead
constexpr int64_t kAhead = kSecond;             // of its tag, so that deadlines do not starve other engines
constexpr int64_t kLongest = kSecond;           // that a step may take before others stop waiting for it
constexpr int64_t kShortest = kSecond / 10;     // the least such time
constexpr int64_t kUsualSteps = 10;             // that time, in usual steps of the holder
constexpr int64_t kRecent = kSecond;            // since an engine's last step: it competes

int64_t clock_now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

void wake(EnginePlace& place) {
  place.wakes.fetch_add(1);
  syscall(SYS_futex, &place.wakes, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

// True for a process that has not ended. One that has ended and was not reaped yet still has its id.
bool runs(uint32_t process) {
  constexpr long kPidfdOpen = 434;  // on every architecture; old headers lack the name
  const int opened = static_cast<int>(syscall(kPidfdOpen, process, 0));
  if (opened < 0) return false;
  pollfd ended{opened, POLLIN, 0};
  const bool running = poll(&ended, 1, 0) == 0;
  close(opened);
  return running;
}

int64_t rank(const EnginePlace& place, int64_t now) {
  return place.tag.load() - (place.due.load() - now < kClose ? kAhead : 0);
}

constexpr uint64_t kPlaceBits = 0xff;

bool is_free(uint64_t holder) { return (holder & kPlaceBits) == 0; }

}  // namespace

ProcessorLease::ProcessorLease(LeaseSegment& segment, int place, double weight)
    : segment_(segment), own_(segment.places[place]), place_(place), weight_(weight) {
  own_.waits.store(0);
  own_.usual.store(0);
  own_.process.store(static_cast<uint32_t>(getpid()));
  uint32_t used = segment_.used.load();
  while (used < static_cast<uint32_t>(place + 1) && !segment_.used.compare_exchange_weak(used, place + 1)) {
  }
  uint64_t holder = segment_.holder.load();  // perhaps the process that had this place before
  if ((holder & kPlaceBits) == static_cast<uint64_t>(place + 1)) {
    segment_.holder.compare_exchange_strong(holder, holder & ~kPlaceBits);
  }
}

ProcessorLease::Answer ProcessorLease::take(int64_t due) {
  const int64_t now = clock_now();
  own_.due.store(due);
  if (is_holder()) {
    charge(now);
    EnginePlace* first = first_waiting(now);
    if (first == nullptr || rank(own_, now) <= rank(*first, now) + kTurn) {
      own_.began.store(now);
      return answer(now);
    }
    own_.waits.store(1);
    segment_.holder.compare_exchange_strong(held_, held_ & ~kPlaceBits);
    wake(*first);
    held_ = 0;
    return kWait;
  }
  if (held_ != 0) {  // others did not wait for the end of the last step
    charge(now);
    held_ = 0;
  } else {
    own_.tag.store(std::max(own_.tag.load(), least_tag()));  // idle time gives no credit
  }
  own_.waits.store(1);
  return take_free(now) ? answer(now) : kWait;
}

ProcessorLease::Answer ProcessorLease::wait() {
  const timespec look{0, kLook};
  for (;;) {
    const uint32_t wakes = own_.wakes.load();
    if (take_free(clock_now())) break;
    const long woken = syscall(SYS_futex, &own_.wakes, FUTEX_WAIT, wakes, &look, nullptr, 0);
    if (woken != 0 && errno == ETIMEDOUT && take_from_holder(clock_now())) break;
  }
  return answer(clock_now());
}

void ProcessorLease::give() {
  if (held_ == 0) return;
  const int64_t now = clock_now();
  charge(now);
  if (segment_.holder.compare_exchange_strong(held_, held_ & ~kPlaceBits)) {
    if (EnginePlace* first = first_waiting(now)) wake(*first);
  }
  held_ = 0;
}

void ProcessorLease::charge(int64_t now) {
  const int64_t step = now - own_.began.load(), usual = own_.usual.load();
  own_.tag.store(own_.tag.load() + static_cast<int64_t>(static_cast<double>(step) / weight_));
  own_.usual.store(usual == 0 ? step : usual + (step - usual) / 8);
  segment_.clock.store(std::max(segment_.clock.load(), own_.tag.load()));
}

// Begins a turn if `holder` still has the value `before`.
bool ProcessorLease::begin(uint64_t before, int64_t now) {
  own_.began.store(now);
  const uint64_t next = ((before | kPlaceBits) + 1) | static_cast<uint64_t>(place_ + 1);
  if (!segment_.holder.compare_exchange_strong(before, next)) return false;
  held_ = next;
  own_.waits.store(0);
  return true;
}

// Takes the lease if nobody has it and this engine is the first that waits; else wakes the first one. A process that
// gives the lease back sets `holder` before it reads `waits`, and one that waits does it the other way round: so one of
// the two sees the other.
bool ProcessorLease::take_free(int64_t now) {
  const uint64_t holder = segment_.holder.load();
  if (!is_free(holder)) return false;
  EnginePlace* first = first_waiting(now);
  if (first == &own_) return begin(holder, now);
  if (first != nullptr) wake(*first);
  return false;
}

// After a time without a wake: takes the lease if the first that waits does not come, or if the holder has ended or
// holds it too long.
bool ProcessorLease::take_from_holder(int64_t now) {
  const uint64_t holder = segment_.holder.load();
  if (is_free(holder)) {
    EnginePlace* first = first_waiting(now);
    if (first != nullptr && first != &own_ && !runs(first->process.load())) first->waits.store(0);
    return begin(holder, now);
  }
  const EnginePlace& other = segment_.places[(holder & kPlaceBits) - 1];
  const int64_t longest = std::clamp(kUsualSteps * other.usual.load(), kShortest, kLongest);
  if (now - other.began.load() < longest && runs(other.process.load())) return false;
  return begin(holder, now);
}

// Returns the least tag of the engines that compete now. Without any, the highest one so far.
int64_t ProcessorLease::least_tag() const {
  const uint64_t holder = segment_.holder.load() & kPlaceBits;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (uint32_t i = 0; i < segment_.used.load(); ++i) {
    const EnginePlace& place = segment_.places[i];
    if (&place != &own_ && (place.waits.load() != 0 || holder == i + 1)) least = std::min(least, place.tag.load());
  }
  return least == std::numeric_limits<int64_t>::max() ? segment_.clock.load() : least;
}

EnginePlace* ProcessorLease::first_waiting(int64_t now) const {
  EnginePlace* first = nullptr;
  for (uint32_t i = 0; i < segment_.used.load(); ++i) {
    EnginePlace& place = segment_.places[i];
    if (place.waits.load() != 0 && (first == nullptr || rank(place, now) < rank(*first, now))) first = &place;
  }
  return first;
}

ProcessorLease::Answer ProcessorLease::answer(int64_t now) const {
  for (uint32_t i = 0; i < segment_.used.load(); ++i) {
    const EnginePlace& place = segment_.places[i];
    if (&place == &own_) continue;
    if (place.waits.load() != 0 || (place.began.load() != 0 && now - place.began.load() < kRecent)) return kContested;
  }
  return kAlone;
}

}  // namespace penstock
