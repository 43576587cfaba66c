// A lane stands for a stream in one pool: the blocks that were freed on it, which it may take again without waiting, and how the
// end of its work can be known. Makes no CUDA call.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <new>
#include <utility>
#include <vector>

#include "base/biased_lock.hpp"
#include "driver/events.hpp"
#include "pages/size_class.hpp"
#include "pages/span.hpp"

namespace rmm_bridge {

// Blocks of one size, the newest on top. A std::vector whose growing is out of the way: the compiler makes a call of each
// push_back.
class alignas(32) BlockStack {  // a power of two: finding one by its number is a shift
 public:
  BlockStack() = default;
  BlockStack(const BlockStack&) = delete;
  BlockStack& operator=(const BlockStack&) = delete;

  bool empty() const noexcept { return top_ == bottom_; }
  bool full() const noexcept { return top_ == end_; }
  std::size_t size() const noexcept { return static_cast<std::size_t>(top_ - bottom_); }
  Block** begin() const noexcept { return bottom_; }
  Block** end() const noexcept { return top_; }
  void clear() noexcept { top_ = bottom_; }
  void push(Block* block) noexcept { *top_++ = block; }  // unless full
  Block* pop() noexcept { return *--top_; }

  // Room for so many more. Throws std::bad_alloc and then has changed nothing.
  [[gnu::noinline]] void reserve(std::size_t more) {
    const std::size_t count = size();
    if (static_cast<std::size_t>(end_ - top_) >= more) return;
    const std::size_t room = std::max({2 * count, count + more, std::size_t{16}});
    auto* grown = static_cast<Block**>(std::realloc(bottom_, room * sizeof(Block*)));
    if (grown == nullptr) throw std::bad_alloc();
    bottom_ = grown;
    top_ = grown + count;
    end_ = grown + room;
  }

 private:
  Block** bottom_ = nullptr;
  Block** top_ = nullptr;
  Block** end_ = nullptr;
};

// The part of a lane that its own stream uses without the pool's lock: blocks that were freed last, and counts that the
// pool has not seen yet. Guarded by its own lock, which is taken under the pool's or alone. `Pool::drain` moves what is
// here to the lane; whoever looks at a lane under the pool's lock drains it first.
struct alignas(64) Front {
  static constexpr std::uint64_t kClosed = 0;  // which no stream has

  BiasedLock lock;
  std::atomic<std::uint64_t> key{kClosed};  // of the lane's stream, while that is held: frees need no event. Set under the lock
  // By size class; never freed, as lanes are not.
  BlockStack* bins = kNoBins.data();
  bool filled = false;          // its bins are its own
  std::uint32_t bin_count = 0;  // those that ever held a block
  std::size_t free_bytes = 0;
  std::size_t known_free_bytes = 0;  // as the pool knows it: what is missing since is used, what is more is not
  std::ptrdiff_t live_delta = 0;
  std::ptrdiff_t asked_delta = 0;  // of what was asked for in them
  // Of the deferred lane: what was drained since its last batch. It counts for the next, or whoever reads would put that off.
  std::ptrdiff_t drained_count = 0;
  std::size_t drained_bytes = 0;

  // Makes room for more blocks of a class. Throws std::bad_alloc.
  [[gnu::noinline]] BlockStack& make_room(std::uint32_t class_index, std::size_t more) {
    if (!filled) bins = new BlockStack[kSizeClasses];
    filled = true;
    bin_count = std::max(bin_count, class_index + 1);
    bins[class_index].reserve(more);
    return bins[class_index];
  }

  void begin_batch() noexcept {
    std::scoped_lock held(lock);
    drained_count = 0;
    drained_bytes = 0;
  }

  bool untouched() const noexcept { return free_bytes == 0 && known_free_bytes == 0 && live_delta == 0 && asked_delta == 0; }

 private:
  // Where nothing can be taken and nothing put: so a front that was never filled needs no look of its own.
  static inline constinit std::array<BlockStack, kSizeClasses> kNoBins{};
};

struct Batch;

// A place in the order of a lane's stream that a batch of blocks waits for: everything enqueued before it.
struct Point {
  Batch* batch;
  EventRef event;  // null while none could be recorded: `Lane::wait_at` says what that means
};

// How the end of the work before a point gets known.
enum class Wait : std::uint8_t {
  event,           // it has one
  to_be_recorded,  // the stream was being captured when one was asked for; it is held, so its handle can be asked again
  until_seen,      // nobody vouches for the handle: when the stream passes it again
  never,           // the stream is gone, or it was captured before it was ever known
};

struct Lane {
  // idle -> borrowed or held (`LaneTable::get`), borrowed -> held (`hold`), held -> closing (`let_go`), and back to idle once nothing
  // names the lane (`recycle`). A closing lane whose stream shows up again is borrowed.
  enum class State : std::uint8_t {
    idle,      // its number stands for no stream
    borrowed,  // nobody vouches for the handle: an event was recorded at each free
    held,      // the bridge keeps the stream's object, or the stream never ends: the handle is good, and events are recorded late
    closing,   // the object was let go: the number is kept until the work before has ended
  };

  StreamRef stream;
  std::uint16_t index = 0;
  std::atomic<State> state{State::idle};  // written under the pool's lock
  const void* home = nullptr;             // the table that it is in
  void* owner = nullptr;                  // the stream object, opaque here
  int pins = 0;                           // calls that use the lane outside the lock: see Pool::Pins
  std::size_t named_count = 0;            // live blocks of the lane, and uses of others on its stream
  std::list<Point> points;                // that batches wait for, oldest first
  std::size_t unrecorded_count = 0;       // points without an event
  std::uint64_t capture = 0;              // that the stream was last seen to take part in, since
  std::int64_t capture_seen_ns = 0;       // then at the latest
  EventRef departure;                     // behind all work of a stream that was let go, until that has ended
  std::vector<EventRef> events;           // borrowed: behind the work on the blocks in the bins
  std::vector<std::vector<Block*>> bins;  // by size class
  std::size_t free_bytes = 0;
  Front front;

  bool held() const noexcept { return state.load(std::memory_order_relaxed) == State::held; }
  bool in_use() const noexcept { return state.load(std::memory_order_relaxed) != State::idle; }

  Wait wait_at(const Point& point) const noexcept {
    if (point.event != nullptr) return Wait::event;
    switch (state.load(std::memory_order_relaxed)) {
      case State::held:
        return Wait::to_be_recorded;
      case State::borrowed:
        return stream.key == StreamRef::kUnseenKey ? Wait::never : Wait::until_seen;
      case State::idle:
      case State::closing:
        break;
    }
    return Wait::never;
  }

  std::vector<Block*>& bin(std::uint32_t class_index) {
    if (bins.size() <= class_index) bins.resize(class_index + 1);
    return bins[class_index];
  }

  // Takes all blocks out of the bins. Throws std::bad_alloc and then has changed nothing.
  std::size_t empty_into(std::vector<Block*>& blocks) {
    std::size_t count = blocks.size();
    for (const auto& each : bins) count += each.size();
    blocks.reserve(count);
    for (auto& each : bins) {
      blocks.insert(blocks.end(), each.begin(), each.end());
      each.clear();
    }
    return std::exchange(free_bytes, 0);
  }
};

// A stream, and the lane it was known from, if that was held; perhaps another stream's by now, as the lane's front says.
struct KnownStream : StreamRef {
  Lane* lane = nullptr;
};

}  // namespace rmm_bridge
