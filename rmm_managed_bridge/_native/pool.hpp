// Slabs and bins between the ledger and upstream: hands out blocks that are safe for whoever asked, at once where it
// can. docs/design/pool.md has the reasons; in short:
//
//   a block freed on a stream lies in that stream's lane: the stream itself takes it again with no CUDA call;
//   a block that other work may still touch lies in quarantine, in a batch with the events it waits for;
//   a block that nothing touches lies in a ready lane, one for CPU blocks and one for GPU blocks, or in the page heap.
//
// Threads: one lock, and one for each lane's front, which is what reuse on one stream takes. No CUDA call, no upstream call and no Python is made under them.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "lanes.hpp"
#include "page_heap.hpp"
#include "process.hpp"
#include "size_class.hpp"
#include "spin_lock.hpp"
#include "upstream.hpp"

namespace rmm_bridge {

enum class Refusal : int {
  none,
  out_of_memory,
  capturing,  // the stream is being captured: managed memory cannot be had on it now
  bad_stream,  // the driver does not know the stream, or a call on it failed
  unheld_stream,  // the block was used on a stream whose object nobody gave us: its work cannot be waited for
};

struct Grant {
  char* ptr = nullptr;
  Span* span = nullptr;
  Block* block = nullptr;
  bool zeroed = false;
  bool held = true;  // the bridge holds the stream's object, or need not: see Pool::adopt
};

struct PoolNumbers {
  std::size_t reserved_bytes = 0;
  std::size_t used_bytes = 0;
  std::size_t quarantined_bytes = 0;
  std::size_t largest_free_bytes = 0;
  std::size_t lane_count = 0;
};

class Pool : public ForkLocks {
 public:
  // `driver` is null for memory that no device touches. `limit_bytes` bounds what is reserved from upstream.
  Pool(Process& process, std::unique_ptr<Upstream> upstream, const Driver* driver, CUcontext context,
       std::size_t limit_bytes)
      : process_(process),
        upstream_(std::move(upstream)),
        chunk_bytes_(upstream_->chunk_bytes()),
        gives_zeros_(upstream_->gives_zeros()),
        driver_(driver),
        limit_bytes_(limit_bytes) {
    if (driver_ != nullptr) events_ = std::make_unique<EventPool>(*driver_, context);
    process_.add_locks(this);
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void lock_for_fork() noexcept override {
    lock_.lock();
    lanes_.for_each_front([](Front& front) { front.lock.lock(); });
    if (events_ != nullptr) events_->lock_for_fork().lock();
  }
  void unlock_after_fork() noexcept override {
    if (events_ != nullptr) events_->lock_for_fork().unlock();
    lanes_.for_each_front([](Front& front) { front.lock.unlock(); });
    lock_.unlock();
  }

  // True if devices use this memory, so that its blocks have an order on streams.
  bool ordered() const noexcept { return driver_ != nullptr; }

  // What stream a handle means now. Refuses a capturing stream before anything else is asked of the driver.
  Refusal resolve(CUstream handle, StreamRef& out) const {
    if (driver_ == nullptr) return Refusal::none;
    if (!process_.running()) return Refusal::bad_stream;
    if (handle == nullptr || handle == CU_STREAM_LEGACY) {
      out = {StreamRef::kLegacyKey, nullptr};
      return Refusal::none;
    }
    if (events_->capture_status(handle) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;
    const std::uint64_t id = events_->id_of(handle);
    if (id == 0) return Refusal::bad_stream;
    out = {id, handle};
    return Refusal::none;
  }

  Refusal allocate(std::size_t bytes, std::size_t alignment, Side side, const StreamRef& stream, Grant& out) noexcept {
    try {
      const std::size_t unit = side == Side::cpu ? kCpuUnit : kGpuUnit;
      const SizeClass wanted = alignment <= unit ? size_class(bytes, unit) : aligned_class(bytes, alignment, unit);
      if (take_front(wanted, side, stream, out)) return Refusal::none;
      Want want{wanted, side, ready_lane(side)};
      {
        std::scoped_lock lock(lock_);
        if (!stream.host()) {
          Lane& lane = lanes_.get(stream);
          want.lane = lane.index;
          want.held = lane.owned;
          if (lane.owned) remember(stream.key, lane);
        }
        if (take_idle(want, out)) return Refusal::none;
        ++lanes_.at(want.lane).users;
      }
      const LaneUse use(*this, want.lane);
      if (poll() && with_lock([&] { return take_idle(want, out); })) return Refusal::none;
      if (with_lock([&] { return take_new(want, out, false); })) return Refusal::none;
      if (!stream.host() && steal(want, stream, out)) return Refusal::none;
      if (grow(want, out)) return Refusal::none;
      if (trim() != 0 && grow(want, out)) return Refusal::none;
      // Last, what other work still holds: wait for it, oldest first.
      while (wait_for_oldest()) {
        if (with_lock([&] { return take_idle(want, out) || take_new(want, out, true); })) return Refusal::none;
        if (trim() != 0 && grow(want, out)) return Refusal::none;
      }
    } catch (const std::bad_alloc&) {
    }
    return Refusal::out_of_memory;
  }

  // `block` was live and this thread has just ended that, so no other thread frees it. `stream`: where the caller says
  // its last use is ordered; null if the framework does not say, and then it is the lane the block came from.
  void deallocate(Span* span, Block* block, char* ptr, bool exposed, const StreamRef* stream) noexcept {
    try {
      if (!exposed && put_front(span, block, ptr, stream)) return;
      free_block(span, block, ptr, exposed, stream);
    } catch (const std::bad_alloc&) {
      // No memory for our own lists: the block is lost until the pool ends. A leak, never a dangling pointer.
      std::scoped_lock lock(lock_);
      lost_bytes_ += span->block_bytes;
      --live_count_;
    }
  }

  // Device work on `stream` may touch the block at `ptr`, though it was not allocated there: it is waited for when the
  // block is freed or read by the CPU. Throws std::bad_alloc.
  void expose(Block* block, const char* ptr, const StreamRef& stream) {
    if (driver_ == nullptr || stream.host()) return;
    std::scoped_lock lock(lock_);
    Lane& lane = lanes_.get(stream);
    auto& seen = exposures_[ptr];
    if (std::find(seen.begin(), seen.end(), lane.index) == seen.end()) {
      seen.push_back(lane.index);
      ++lane.live_count;
    }
    block->flags.fetch_or(Block::kExposed);
  }

  // Waits, without the GIL, until the device work that may touch the block is finished.
  Refusal synchronize(Block* block, const char* ptr) {
    if (driver_ == nullptr) return Refusal::none;
    std::vector<EventRef> events;
    Refusal refusal = events_of(block, ptr, events, true);
    if (refusal != Refusal::none) return refusal;
    WithoutGil without(process_);
    for (const EventRef& event : events) {
      if (!events_->synchronize(event)) refusal = Refusal::bad_stream;
    }
    return refusal;
  }

  // Makes `stream` wait for the device work that may touch the block, and notes that it will touch it too.
  Refusal order(Block* block, const char* ptr, const StreamRef& stream) {
    if (driver_ == nullptr || stream.host()) return Refusal::none;
    std::vector<EventRef> events;
    const Refusal refusal = events_of(block, ptr, events, false, stream.key);
    if (refusal != Refusal::none) return refusal;
    for (const EventRef& event : events) {
      if (!events_->stream_waits(stream, event)) return Refusal::capturing;
    }
    expose(block, ptr, stream);
    return Refusal::none;
  }

  // Gives pieces that are free as a whole back to upstream and returns their bytes. Does not wait for device work;
  // upstream may (freeing managed memory waits for the whole device), without the GIL.
  std::size_t trim() {
    if (!process_.running()) return 0;
    std::vector<std::uint16_t> open;
    with_lock([&] {
      lanes_.for_each_stream([&](Lane& lane) {
        drain(lane);
        if (lane.free_bytes != 0) open.push_back(lane.index);
      });
    });
    for (std::uint16_t index : open) close_lane(index, nullptr);
    poll();
    std::vector<Chunk*> chunks;
    {
      std::scoped_lock lock(lock_);
      for (Side side : {Side::cpu, Side::gpu}) release_idle_slabs(side);
      for (PageHeap* heap : {&cpu_heap_, &gpu_heap_}) {
        for (Chunk* chunk : heap->take_free_chunks()) chunks.push_back(chunk);
      }
    }
    if (chunks.empty()) return 0;
    WithoutGil without(process_);
    std::size_t bytes = 0;
    for (Chunk* chunk : chunks) {
      bytes += chunk->upstream_bytes;
      upstream_->deallocate(chunk->upstream_base, chunk->upstream_bytes);
      delete chunk;
    }
    // Only now: `close` lets upstream go once nothing is reserved.
    std::scoped_lock lock(lock_);
    reserved_bytes_ -= bytes;
    return bytes;
  }

  // Moves what is finished out of quarantine, and out of lanes whose streams nobody holds. True if anything moved.
  bool poll();

  // Waits for quarantined blocks; false if there were none. Without the GIL while it waits.
  bool wait_for_oldest() {
    if (driver_ == nullptr) return false;
    if (poll()) return true;
    EventRef event;
    {
      std::scoped_lock lock(lock_);
      for (const Batch& batch : quarantine_) {
        for (const Wait& wait : batch.waits) {
          if (event == nullptr && !wait.done) event = wait.event;
        }
      }
    }
    if (event == nullptr) return false;
    {
      WithoutGil without(process_);
      if (!events_->synchronize(event)) return false;
    }
    poll();
    return true;
  }

  // The framework's stream object behind a lane. True if it was taken: the caller keeps `owner` alive until
  // `close_lane` returns it.
  bool adopt(const StreamRef& stream, void* owner) {
    std::scoped_lock lock(lock_);
    Lane& lane = lanes_.get(stream);
    if (lane.owned) return false;
    lanes_.own(lane);
    lane.owner = owner;
    return true;
  }

  bool holds(const StreamRef& stream) {
    std::scoped_lock lock(lock_);
    const Lane* lane = lanes_.find(stream.key);
    return lane != nullptr && lane->owned;
  }

  struct Owned {
    std::uint16_t lane;
    void* owner;
  };
  std::vector<Owned> owners() {
    std::vector<Owned> owned;
    std::scoped_lock lock(lock_);
    lanes_.for_each_stream([&](Lane& lane) { if (lane.owner != nullptr) owned.push_back({lane.index, lane.owner}); });
    return owned;
  }

  // Puts the lane's free blocks into quarantine behind an event. With `retire`, also forgets the lane, if no live block
  // names it and nobody uses it; `*retire` is then the owner to drop, else null.
  void close_lane(std::uint16_t index, void** retire) {
    StreamRef stream;
    bool record;
    Batch batch;
    Lane& lane = lanes_.at(index);
    {
      std::scoped_lock lock(lock_);
      if (!lane.in_use) return;
      drain(lane);
      if (retire != nullptr && (lane.users != 0 || lane.live_count != 0)) return;
      stream = lane.stream;
      record = lane.owned;
      // Before the event: what is freed from now on may have work behind it.
      for (auto& bin : lane.bins) {
        batch.blocks.insert(batch.blocks.end(), bin.begin(), bin.end());
        bin.clear();
      }
      batch.bytes = lane.free_bytes;
      lane.free_bytes = 0;
      if (!record) {
        for (const EventRef& each : lane.events) batch.waits.push_back({index, each, false});
      }
      ++lane.users;
    }
    EventRef event;
    const Recorded recorded = record ? events_->record(stream, event) : Recorded::done;
    std::scoped_lock lock(lock_);
    --lane.users;
    if (retire != nullptr) close_front(lane);
    const bool idle = lane.users == 0 && lane.live_count == 0 && lane.free_bytes == 0;
    if (record) batch.waits.push_back({index, recorded == Recorded::done ? event : nullptr, false});
    quarantine(std::move(batch));
    if (recorded != Recorded::done || (retire != nullptr && !idle)) {
      if (retire != nullptr && record) lanes_.own(lane);
      return;
    }
    // Its events are all there: nothing in quarantine needs the handle any more, only the number must not come back.
    if (retire != nullptr) {
      *retire = lane.owner;
      lane.owner = nullptr;
      lane.owned = false;
      tidy(lane);
    }
  }

  PoolNumbers numbers() {
    std::scoped_lock lock(lock_);
    drain_all();
    return {reserved_bytes_, used_bytes_, quarantined_bytes_ + lost_bytes_,
            std::max(cpu_heap_.largest_free_bytes(), gpu_heap_.largest_free_bytes()), lanes_.size()};
  }

  // Gives everything back and lets upstream go, if no block is live; false otherwise. Waits for quarantined blocks.
  // After that every allocation is refused.
  bool close() {
    if (live_count() != 0) return false;
    trim();  // closes the lanes
    while (wait_for_oldest()) {
    }
    trim();
    std::unique_ptr<Upstream> ended;
    {
      std::scoped_lock lock(lock_);
      if (reserved_bytes_ != 0) return false;
      ended = std::move(upstream_);
    }
    WithoutGil without(process_);
    ended.reset();
    return true;
  }

  std::size_t live_count() noexcept {
    std::scoped_lock lock(lock_);
    drain_all();
    return live_count_;
  }
  Process& process() noexcept { return process_; }
  std::uint64_t id_of(CUstream stream) const { return events_->id_of(stream); }
  EventPool* events() noexcept { return events_.get(); }

 private:
  struct Want {
    SizeClass size;
    Side side;
    std::uint16_t lane;
    bool held = true;
  };

  // While one lives, the lane keeps its number.
  struct LaneUse {
    LaneUse(Pool& pool, std::uint16_t lane) : pool_(pool), lane_(lane) {}
    ~LaneUse() {
      std::scoped_lock lock(pool_.lock_);
      Lane& lane = pool_.lanes_.at(lane_);
      --lane.users;
      pool_.tidy(lane);
    }
    LaneUse(const LaneUse&) = delete;
    LaneUse& operator=(const LaneUse&) = delete;
    Pool& pool_;
    std::uint16_t lane_;
  };

  template <typename Body>
  std::invoke_result_t<Body> with_lock(Body body) {
    std::scoped_lock lock(lock_);
    return body();
  }

  // Without the pool's lock. In pool_front.hpp:
  bool take_front(const SizeClass& size, Side side, const StreamRef& stream, Grant& out) noexcept;
  bool put_front(Span* span, Block* block, char* ptr, const StreamRef* stream) noexcept;
  void remember(std::uint64_t key, Lane& lane) noexcept;

  // Under the lock. In pool_front.hpp:
  void drain(Lane& lane) noexcept;
  void drain_all() noexcept;
  void close_front(Lane& lane) noexcept;

  PageHeap& heap(Side side) noexcept { return side == Side::cpu ? cpu_heap_ : gpu_heap_; }

  // Under the lock. In pool_blocks.hpp:
  bool take_idle(const Want& want, Grant& out);
  bool take_new(const Want& want, Grant& out, bool any_size);
  void prepare(Span* span, const Want& want);
  void hand_out(char* ptr, Span* span, std::uint32_t index, const Want& want, bool zeroed, Grant& out) noexcept;
  void put(Lane& lane, const Span* span, char* ptr);
  void settle(char* ptr) noexcept;
  void release_idle_slabs(Side side);

  // Takes the lock itself. In pool_blocks.hpp:
  bool grow(const Want& want, Grant& out);
  bool add_piece(std::size_t bytes, Side side);

  // Under the lock. In pool_order.hpp:
  std::vector<std::uint16_t> lanes_of(std::uint16_t own, const char* ptr, std::size_t& required);
  void hold(const std::vector<std::uint16_t>& lanes) noexcept;
  void release(const std::vector<std::uint16_t>& lanes) noexcept;
  void quarantine(Batch&& batch);
  void ended(std::uint16_t lane) noexcept;
  void tidy(Lane& lane) noexcept;

  // Takes the lock itself. In pool_order.hpp:
  void free_block(Span* span, Block* block, char* ptr, bool exposed, const StreamRef* stream);
  void free_borrowed(Span* span, char* ptr, std::uint16_t own, Lane& lane, const StreamRef& stream);
  void free_exposed(Span* span, char* ptr, std::uint16_t own, const StreamRef* stream);
  Refusal events_of(const Block* block, const char* ptr, std::vector<EventRef>& events, bool cautious,
                    std::uint64_t except = StreamRef::kHostKey);
  bool steal(const Want& want, const StreamRef& stream, Grant& out);

  Process& process_;
  std::unique_ptr<Upstream> upstream_;  // goes when the pool closes
  const std::size_t chunk_bytes_;
  const bool gives_zeros_;
  const Driver* driver_;
  const std::size_t limit_bytes_;
  std::unique_ptr<EventPool> events_;

  SpinLock lock_;
  PageHeap cpu_heap_{process_.pages, Side::cpu};
  PageHeap gpu_heap_{process_.pages, Side::gpu};
  LaneTable lanes_;
  std::vector<Span*> filling_[2];  // by side and class: the slab whose rest was never handed out
  std::deque<Batch> quarantine_;   // oldest first
  std::unordered_map<const char*, std::vector<std::uint16_t>> exposures_;
  std::vector<std::unique_ptr<Block[]>> block_tables_;
  std::uint64_t next_batch_ = 0;
  std::size_t reserved_bytes_ = 0;
  std::size_t used_bytes_ = 0;
  std::size_t quarantined_bytes_ = 0;
  std::size_t lost_bytes_ = 0;
  std::size_t live_count_ = 0;
};

}  // namespace rmm_bridge

#include "pool_blocks.hpp"
#include "pool_front.hpp"
#include "pool_order.hpp"
