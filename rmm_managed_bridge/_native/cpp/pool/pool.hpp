// Slabs and bins between the ledger and upstream: hands out blocks that are safe for whoever asked, at once where it
// can. docs/design/pool.md has the reasons; in short:
//
//   a block freed on a stream lies in that stream's lane: the stream itself takes it again with no CUDA call;
//   a block that other work may still touch lies in quarantine, in a batch with the events it waits for;
//   a block that nothing touches lies in a ready lane, one for CPU blocks and one for GPU blocks, or in the page pool.
//
// Threads: one lock, and one for each lane's front, which is what reuse on one stream takes. No CUDA call, no upstream call
// and no Python is made under them.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <span>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/spin_lock.hpp"
#include "driver/events.hpp"
#include "pages/size_class.hpp"
#include "pages/slabs.hpp"
#include "pages/upstream.hpp"
#include "pool/options.hpp"
#include "pool/process.hpp"
#include "streams/lane_table.hpp"
#include "streams/quarantine.hpp"

namespace rmm_bridge {

struct RememberedLane;

class Pool : public ForkLocks {
 public:
  // `driver` is null for memory that no device touches.
  Pool(Process& process, std::unique_ptr<Upstream> upstream, const Driver* driver, CUcontext context, const PoolOptions& options)
      : process_(process),
        upstream_(std::move(upstream)),
        chunk_bytes_(upstream_->chunk_bytes()),
        gives_zeros_(upstream_->gives_zeros()),
        parts_(upstream_->gives_parts()),
        driver_(driver),
        options_(options),
        budgeted_(options.budget && !options.debug && options.release_threshold_bytes == PoolOptions::kNoLimit) {
    if (driver_ != nullptr) events_ = std::make_unique<EventPool>(*driver_, context);
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void lock_for_fork() noexcept override {
    lock_.lock();
    lanes_.for_each_front([](Front& front) { front.lock.lock(); });
    if (events_ != nullptr) events_->lock_for_fork().lock();
  }
  void inherit() noexcept override { inherited_.store(true, std::memory_order_relaxed); }
  // The pool is that of the process which this one was forked from.
  bool inherited() const noexcept { return inherited_.load(std::memory_order_relaxed); }
  // It has closed, and upstream is gone: only what Python holds for it is left.
  bool over() const noexcept { return over_.load(std::memory_order_acquire); }
  // The process may act, and the pool is its own.
  bool acts() const noexcept { return process_.running() && !inherited(); }

  void unlock_after_fork() noexcept override {
    if (events_ != nullptr) events_->lock_for_fork().unlock();
    lanes_.for_each_front([](Front& front) { front.lock.unlock(); });
    lock_.unlock();
  }

  // True if devices use this memory, so that its blocks have an order on streams.
  bool ordered() const noexcept { return driver_ != nullptr; }

  // In stream_lookup.hpp:
  Refusal resolve(CUstream handle, KnownStream& out) const noexcept;
  bool resolve_for_free(CUstream handle, KnownStream& out) const noexcept;

  Refusal allocate(std::size_t bytes, std::size_t alignment, Side side, const KnownStream& stream, Grant& out) noexcept {
    const SizeClass size = class_of(bytes, alignment, side);
    if (Block* block = take_front(size, bytes, side, stream)) {
      out.ptr = block->start;
      out.block = block;
      return Refusal::none;
    }
    return allocate_slowly({size, side, ready_lane(side), alignment, bytes}, stream, out);
  }

  struct Freeing {
    Span* span;
    Block* block;
    std::size_t asked_bytes;   // as `allocate` was asked, and `resized` since
    std::int64_t born_ns = 0;  // by the coarse clock; 0 if nobody knows
  };

  // `freed` was live and this thread has just ended that, so no other thread frees it. `stream`: where the caller says
  // its last use is ordered; null if the framework does not say, and then it is the lane the block came from.
  [[gnu::always_inline]] void deallocate(const Freeing& freed, bool shown, const StreamRef* stream) noexcept {
    bool full = false;
    if (shown || !put_front(freed, stream, full)) [[unlikely]] {
      deallocate_slowly(freed, shown, stream);
    } else if (full) [[unlikely]] {
      turn_over();
    }
  }

  // A live block now stands for so many bytes more (or fewer) than was asked.
  void resized(std::ptrdiff_t bytes) noexcept {
    std::scoped_lock lock(lock_);
    asked_bytes_ += static_cast<std::size_t>(bytes);
    budget_.note(live_now());
  }

  // Makes a live large block of host memory larger or smaller where it lies. False if that cannot be done, and nothing has changed.
  bool resize_in_place(Span* span, Block* block, const SizeClass& size) noexcept;

  // Moves the pages of such a block to a place where it is larger, in steps: while the second goes on the block is live at neither.
  struct Move {
    Span* from = nullptr;
    Span* to = nullptr;
    Block* block() const noexcept { return &to->blocks.load(std::memory_order_relaxed)[0]; }
  };
  bool begin_move(Span* from, const SizeClass& size, std::size_t more_asked, Move& move) noexcept;
  bool end_move(const Move& move) noexcept;     // false: the kernel refuses, and the block is where it was
  void cancel_move(const Move& move) noexcept;  // instead

  // Of a block that was handed out with old bytes in it.
  void fill_with_zeros(char* ptr, std::size_t bytes) noexcept;

  static bool mark(Process& process, Block* block, std::uint8_t flag) noexcept;

  // Device work on `stream` may touch the block at `ptr`, though it was not allocated there: it is waited for when the
  // block is freed or read by the CPU. Throws std::bad_alloc.
  void record_stream(Block* block, const char* ptr, const StreamRef& stream);

  // Waits, without the GIL, until the device work that may touch the block is finished: for these events.
  Refusal synchronize(Block* block, const char* ptr);
  Refusal events_of(const Block* block, const char* ptr, std::vector<EventRef>& events, bool cautious,
                    std::uint64_t except = StreamRef::kHostKey);

  // Waits, without the GIL, for the work on every stream that is held.
  Refusal synchronize_all();

  // Makes `stream` wait for the device work that may touch the block, and notes that it will touch it too.
  Refusal order(Block* block, const char* ptr, const StreamRef& stream);

  // Gives pieces that are free as a whole back to upstream, until no more than `keep_bytes` are cached, and returns
  // their bytes. Does not wait for device work; upstream may (freeing managed memory waits for the whole device),
  // without the GIL.
  std::size_t trim(std::size_t keep_bytes = 0);

  // Moves what is finished out of quarantine, and out of lanes whose streams nobody holds. True if anything moved.
  bool poll();

  // Waits for quarantined blocks; false if there were none. Without the GIL while it waits.
  bool wait_for_oldest();

  // The same for an allocation, which does not wait for ever.
  enum class Waited { progress, nothing, timed_out };
  Waited wait_for_progress();

  // What the newest wait that took too long was for: the stream, and a block that was freed behind its work, with all that were
  // freed together with it.
  struct Stalled {
    CUstream stream = nullptr;
    const char* block = nullptr;
    std::size_t bytes = 0;
  };
  Stalled stalled() const noexcept {
    return with_lock([&] { return stalled_; });
  }

  int other_device(CUstream stream) const { return events_->other_device(stream); }

  // True on a thread that runs a CUDA host function, which may not wait nor call the driver. Asked where the pool would do either.
  bool in_host_function() const noexcept { return driver_ != nullptr && driver_->in_host_function(); }
  // Nor one that has to keep the GIL.
  bool must_not_wait() const noexcept { return KeepGil::kept() || in_host_function(); }

  // Holds the framework's stream object behind a lane. True if it was taken: the caller keeps `owner` alive until
  // `close_lane` returns it.
  bool hold(const StreamRef& stream, void* owner) {
    std::scoped_lock lock(lock_);
    Lane& lane = lanes_.get(stream);
    if (lane.held()) return false;
    lanes_.hold(lane);
    lane.owner = owner;
    return true;
  }

  bool holds(const StreamRef& stream) {
    std::scoped_lock lock(lock_);
    const Lane* lane = lanes_.find(stream.key);
    return lane != nullptr && lane->held();
  }
  bool owned_by(std::uint16_t lane, const void* owner) const noexcept {
    return with_lock([&] { return lanes_.at(lane).owner == owner; });
  }

  // True if nothing is won by holding the stream: it is held, or has no object that could end.
  bool need_not_hold(const KnownStream& stream) {
    return stream.host() || stream.legacy() || stream.handle == CU_STREAM_PER_THREAD || holds(stream);
  }

  // A hint, since the stream may be held by the time it is read.
  bool on_borrowed_lane(const Block* block) const noexcept {
    return lanes_.at(block->lane.load()).state.load() == Lane::State::borrowed;
  }

  struct Held {
    std::uint16_t lane;
    void* owner;
  };
  std::vector<Held> owners() {
    std::vector<Held> held;
    std::scoped_lock lock(lock_);
    lanes_.for_each_stream([&](Lane& lane) {
      if (lane.owner != nullptr) held.push_back({lane.index, lane.owner});
    });
    return held;
  }

  // Puts the lane's free blocks into quarantine behind an event. With `retire`, also lets the stream's object go, if that is `*retire`
  // still, no live block names the lane and nobody uses it; `*retire` is then the owner to drop, else null.
  // `last`: the bridge has the last reference to the stream's object. If that is being captured, nobody can end the capture
  // but by destroying the stream, and until then calls in its mode fail on other streams too: it is let go, and what lies in
  // the lane is lost, since no event can be had behind it.
  void close_lane(std::uint16_t index, void** retire, bool last = false);

  PoolNumbers numbers();

  // Gives everything back and lets upstream go, if no block is live; false otherwise. After that every allocation is
  // refused. Waits for quarantined blocks, unless `wait` is false: then it is false where there are any.
  bool close(bool wait = true);

  // What the bridge's own thread does for the pool from time to time; returns when it wants to be called again. And a part of that.
  BackgroundTask::Delay run_tasks() noexcept;
  BackgroundTask::Delay heed_limits();

  // Who has no memory left for the pool, in words. Throws std::bad_alloc.
  std::string refused_by() {
    std::scoped_lock lock(lock_);
    return upstream_ == nullptr ? std::string() : upstream_->refused_by();
  }

  bool debug() const noexcept { return options_.debug; }
  const PoolOptions& options() const noexcept { return options_; }

  std::size_t live_count() noexcept {
    std::scoped_lock lock(lock_);
    drain_all();
    return live_count_;
  }
  Process& process() noexcept { return process_; }
  EventPool* events() noexcept { return events_.get(); }

  // Without the pool's lock: a block of the class that `stream` freed last, or null. In front.hpp.
  Block* take_front(const SizeClass& size, std::size_t asked_bytes, Side side, const KnownStream& stream) noexcept;

 private:
  struct Want {
    SizeClass size;
    Side side;
    std::uint16_t lane;
    std::size_t alignment;
    std::size_t asked_bytes;
    bool held = true;
  };

  // Once one has begun, and while it lives, its thread has blocks or pieces in hand that are in no list: see `look_last` and `close`.
  class InHand {
   public:
    explicit InHand(Pool& pool) : pool_(pool) {}
    ~InHand() {
      if (begun_) pool_.hands_.fetch_sub(1);
    }
    InHand(const InHand&) = delete;
    InHand& operator=(const InHand&) = delete;

    // Under the lock, with what is taken out.
    void begin() noexcept {
      if (std::exchange(begun_, true)) return;
      pool_.hands_.fetch_add(1);
      pool_.hands_begun_.fetch_add(1);
    }

   private:
    Pool& pool_;
    bool begun_ = false;
  };

  // While one lives, its lanes keep their numbers, and a held one stays held: their handles may be used outside the lock. It ends
  // without the lock.
  class Pins {
   public:
    explicit Pins(Pool& pool) : pool_(pool) {}
    ~Pins() {
      if (lanes_.empty()) return;
      std::scoped_lock lock(pool_.lock_);
      for (const std::uint16_t index : lanes_) {
        --pool_.lanes_.at(index).pins;
        pool_.leave(pool_.lanes_.at(index));
      }
    }
    Pins(const Pins&) = delete;
    Pins& operator=(const Pins&) = delete;

    // Under the lock. Throws std::bad_alloc and then has changed nothing.
    void add(Lane& lane) {
      if (has(lane.index)) return;
      lanes_.push_back(lane.index);
      ++lane.pins;
    }
    bool has(std::uint16_t index) const noexcept { return std::find(lanes_.begin(), lanes_.end(), index) != lanes_.end(); }
    bool empty() const noexcept { return lanes_.empty(); }
    std::size_t size() const noexcept { return lanes_.size(); }
    auto begin() const noexcept { return lanes_.begin(); }
    auto end() const noexcept { return lanes_.end(); }

   private:
    Pool& pool_;
    std::vector<std::uint16_t> lanes_;
  };

  // The end of a live block's life, whatever became of its memory: nothing is named by it any more. Ends without the lock.
  struct Ending {
    Pool& pool;
    std::uint16_t lane;
    std::vector<std::uint16_t> uses;  // taken out of `stream_uses_` before anybody can have the block again
    ~Ending();
  };

  // Gives a grant's advice when the allocation is over and no lock is held.
  struct Advising {
    Pool& pool;
    Grant& grant;
    ~Advising() { pool.advise(grant.advice); }
  };

  template <typename Body>
  std::invoke_result_t<Body> with_lock(Body body) const {
    std::scoped_lock lock(lock_);
    return body();
  }

  SizeClass class_of(std::size_t bytes, std::size_t alignment, Side side) const noexcept {
    if (options_.debug) [[unlikely]]
      return {0, bytes};
    if (alignment <= unit_of(side)) [[likely]]
      return size_class(bytes, unit_of(side));
    return aligned_class(bytes, alignment, unit_of(side));
  }

  // Without the pool's lock. In front.hpp:
  bool put_front(const Freeing& freed, const StreamRef* stream, bool& full) noexcept;
  bool defers_cpu_frees() const noexcept { return driver_ != nullptr && options_.cautious && lanes_.any_work(); }

  void note_stalled();
  bool is_of_other_device(const KnownStream& stream) const;

  // In stream_lookup.hpp:
  bool find_held(CUstream handle, KnownStream& out) const noexcept;
  bool recall(CUstream handle, KnownStream& out) const noexcept;
  Refusal resolve_per_thread(KnownStream& out) const noexcept;
  void seen_again(std::uint16_t lane, const StreamRef& stream);

  // Under the lock. In front.hpp:
  void drain(Lane& lane) noexcept;
  void drain(Lane& lane, const SizeClass& size) noexcept;
  void drain(Lane& lane, std::uint32_t first, std::uint32_t end) noexcept;
  void refill(Lane& lane, const SizeClass& size) noexcept;
  void drain_all() noexcept;
  void close_front(Lane& lane) noexcept;

  // Under the lock. In allocate.cpp:
  bool take_idle(const Want& want, Grant& out);
  bool take_new(const Want& want, Grant& out, bool any_size);
  void hand_out(Block* block, const Want& want, bool zeroed, Grant& out) noexcept;
  void note_fresh(const Want& want, Grant& out) noexcept;
  void put(Lane& lane, const Span* span, Block* block);
  void settle(Block* block) noexcept;
  bool reserve(std::size_t bytes, bool& contended) noexcept;
  void end_reserving(std::size_t bytes, bool kept) noexcept;

  // Takes the lock itself. In allocate.cpp:
  Refusal allocate_slowly(Want want, const KnownStream& stream, Grant& out) noexcept;
  bool grow(const Want& want, Grant& out, bool* contended = nullptr);
  bool add_piece(std::size_t bytes, Side side, bool& contended);
  void advise(const Advice& advice) noexcept;
  bool advises(Side side) const noexcept { return options_.hugepages && side == Side::cpu; }

  // In tracked_pool.hpp, which knows whose the block was.
  virtual void damaged(PendingWarning::Kind kind, const char* ptr, std::size_t bytes, std::ptrdiff_t offset) noexcept = 0;
  virtual void forget_end(const char* ptr) noexcept = 0;

  // In debug.cpp:
  bool grow_debug(const Want& want, Grant& out, bool& contended);
  std::size_t release_debug(bool all);
  void check_debug(const Span* span) noexcept;

  // Under the lock. In free.cpp:
  std::vector<std::uint16_t> take_uses(const char* ptr) noexcept;
  std::size_t pin_lanes_of(std::uint16_t own, const std::vector<std::uint16_t>& uses, bool cautious, Pins& pins);
  void pin_departures(Pins& pins, std::vector<Quarantine::WaitFor>& waits);
  void quarantine(std::vector<Block*>&& blocks, std::size_t bytes, const std::vector<Quarantine::WaitFor>& waits,
                  bool deferred = false);
  void sign_all(std::span<const Quarantine::WaitFor> recorded, std::uint64_t later) noexcept;
  void unname(std::uint16_t lane) noexcept;
  void leave(Lane& lane) noexcept;
  void grow_deferred() noexcept;
  std::size_t quarantined_bytes() noexcept;

  // Takes the lock itself. In free.cpp:
  void deallocate_slowly(const Freeing& freed, bool shown, const StreamRef* stream) noexcept;
  void free_block(const Freeing& freed, bool shown, const StreamRef* stream, Ending& ending);
  void free_borrowed(const Span* span, Block* block, Lane& lane, const StreamRef& stream);
  void free_shown(const Freeing& freed, const StreamRef* stream, const Ending& ending);
  void flush_deferred() noexcept;
  void turn_over() noexcept;

  // Takes the lock itself. In synchronize.cpp:
  Refusal wait_for(const std::vector<EventRef>& events);
  Refusal synchronize_device();
  void pin_held(Pins& pins);  // under the lock
  bool steal(const Want& want, const StreamRef& stream, Grant& out);

  // In wait.cpp:
  bool poll_once(bool& moved);
  bool wait_a_while(const Want& want, Grant& out);
  Refusal look_last(const Want& want, Grant& out);
  void pause(int turn) const noexcept;
  bool fits(const Want& want) noexcept;

  // Takes the lock itself. In trim.cpp:
  std::size_t give_back(std::size_t wanted_bytes);
  void keep_cleared(Span* span) noexcept;
  std::size_t give_back_above(std::size_t keep_bytes);
  void settle_all();
  std::size_t cached_bytes() noexcept;

  std::int64_t period_ns() const noexcept {
    if (options_.recent.count() != 0) return std::chrono::nanoseconds(options_.recent).count();
    return driver_ == nullptr ? PoolBudget::kHostPeriodNs : PoolBudget::kDevicePeriodNs;
  }

  // Under the lock. In room.cpp:
  std::size_t live_now() const noexcept;
  std::size_t budget_for(std::size_t more_bytes) const noexcept;
  std::size_t above_budget(std::size_t piece_bytes, std::size_t asked) const noexcept;
  std::size_t piece_for(const Want& want) const noexcept;
  void look_at_clock(std::size_t asked) noexcept;
  void free_idle_slabs() noexcept;
  std::size_t take_large(Lane& lane, std::uint32_t first_class, std::vector<Block*>& blocks);

  // Takes the lock itself. In room.cpp:
  bool make_room(const Want& want, Grant& out);
  void settle_large_blocks();
  BackgroundTask::Delay keep_budget();
  bool nothing_runs();
  void watch(std::size_t added_bytes) noexcept;

  Process& process_;
  std::atomic<bool> inherited_{false}, over_{false};
  std::unique_ptr<Upstream> upstream_;  // goes when the pool closes
  const std::size_t chunk_bytes_;
  const bool gives_zeros_;
  const bool parts_;  // spans have no chunk: see Upstream::gives_parts
  const Driver* driver_;
  const PoolOptions options_;
  const bool budgeted_;
  std::unique_ptr<EventPool> events_;

  mutable SpinLock lock_;
  SlabStore slabs_{process_.pages, process_.block_tables, this};
  mutable LaneTable lanes_{!options_.debug};
  Quarantine quarantine_;
  std::unordered_map<const char*, std::vector<std::uint16_t>> stream_uses_;  // of live blocks, beyond their own lanes
  std::size_t reserved_bytes_ = 0;
  std::size_t adding_bytes_ = 0;  // of these, what upstream is just asked for
  std::size_t used_bytes_ = 0;    // of live blocks
  std::size_t asked_bytes_ = 0;   // of what was asked for in them
  std::size_t lost_bytes_ = 0;    // of blocks that there was no memory to put anywhere: see deallocate_slowly
  std::size_t live_count_ = 0;
  PoolBudget budget_{period_ns(), options_.spare_bytes};
  std::pair<std::size_t, std::size_t> pinned_at_{};  // see keep_budget
  EventRef gave_up_on_;                              // what the last wait at the quarantine's limit was for, in vain
  std::atomic<int> deferred_shift_{0};               // how large the next deferred batch grows: see flush_deferred
  std::vector<Span*> settled_;  // debug mode: blocks that nothing touches any more, to be checked and given back
  std::vector<Span*> unused_debug_;
  std::vector<std::unique_ptr<Block[]>> debug_tables_;
  std::int64_t looked_ns_ = 0;
  Stalled stalled_;
  std::atomic<int> hands_{0};
  std::atomic<std::uint64_t> hands_begun_{0};
  std::size_t seen_cached_bytes_ = 0;
  BackgroundTask::Delay delay_{0};
};

}  // namespace rmm_bridge
