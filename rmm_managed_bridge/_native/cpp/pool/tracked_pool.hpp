// A pool that keeps account: the ledger over the pool, for one device and one upstream.
//
// Heaps are never destroyed, only closed: blocks, RMM's copies of our resource and other modules point at them for as
// long as the process lives.
#pragma once

#include <limits>
#include <memory>
#include <optional>

#include "pool/front.hpp"
#include "pool/stream_lookup.hpp"

namespace rmm_bridge {

enum class Track : int { off, counters, sites };

// Two of the kinds of memory, numbered as in `KINDS` of core.pyx.
inline constexpr std::uint8_t kHostKind = 0, kManagedKind = 1;

struct Provenance {
  std::uint32_t site = 0;
  std::uint32_t tag = 0;
  std::uint8_t framework = 0;
};

// Filled in as it is made, in one expression: copying a part that was just put together waits for its stores.
struct Request {
  std::size_t bytes = 0;
  std::size_t alignment = 1;
  Side side = Side::cpu;
  bool host_ordered = true;
  bool may_collect = false;   // whether Python's garbage may be collected to make room: see Process::relieve
  CUstream stream = nullptr;  // unless host_ordered
  Provenance who;
};

enum class Freed : int {
  done,
  foreign,   // no range of ours
  not_live,  // inside our ranges, but not the start of a live block
  ignored,   // this process must not free: see Phase
};

class TrackedPool : public Pool, public BackgroundTask {
 public:
  static constexpr std::uint64_t kUnstated = std::numeric_limits<std::uint64_t>::max();

  struct Found {
    Span* span = nullptr;
    Block* block = nullptr;  // null in the rest of a slab, in free spans, and outside
    void* start = nullptr;
  };

  TrackedPool(Process& process, std::unique_ptr<Upstream> upstream, const Driver* driver, CUcontext context,
              const PoolOptions& options, int device, std::uint8_t kind, Track track)
      : Pool(process, std::move(upstream), driver, context, told(options, kind, track)),
        device_(static_cast<std::int16_t>(device)),
        kind_(kind),
        track_(track) {
    process.add_pool(this, this);
    if (options.release_threshold_bytes != PoolOptions::kNoLimit || process.limits.limited()) process.background.wake();
  }

  // A block, or null and the reason in `refusal`. Zero bytes are null and Refusal::none. `*zeroed` becomes true if its bytes are
  // zero. `*held` becomes false if the bridge ought to hold the stream's object: the caller may `hold` it.
  //
  // `allocate_in_place` is for the entry points of this library, so that what they know of their request is not asked for: what was
  // freed in this order last is taken again, and all else is for `allocate_slowly`.
  void* allocate(const Request& request, Refusal& refusal, bool* zeroed = nullptr, bool* held = nullptr) noexcept;
  [[gnu::always_inline]] void* allocate_in_place(const Request& request, Refusal& refusal, bool* zeroed = nullptr,
                                                 bool* held = nullptr) noexcept {
    const std::size_t unit = unit_of(request.side);
    KnownStream stream;
    refusal = Refusal::none;
    if (process().quiet(request.who.tag) && request.bytes - 1 < kLargestRequest && request.alignment <= unit &&
        (request.host_ordered || request.side == Side::gpu)) [[likely]] {
      if (!request.host_ordered) refusal = resolve(request.stream, stream);
      if (refusal == Refusal::none) [[likely]] {
        Block* block = take_front(size_class(request.bytes, unit), request.bytes, request.side, stream);
        if (block != nullptr && (track_ == Track::off || recorded(block, request, stream))) [[likely]]
          return block->start;
      }
    }
    return allocate_slowly(request, stream, refusal, zeroed, held);
  }

  // By value, here and in `give_back`: what a call might look at must be in memory, and the compiler then builds it for every block.
  //
  // `stream`, unless it is the host, and `refusal` are what is known already.
  void* allocate_slowly(Request request, KnownStream stream, Refusal& refusal, bool* zeroed, bool* held) noexcept;

  // For callers whom no hint policy in Python sees: whether the installed one is for blocks of this size, and the prefetch of one
  // that `allocate` has just given for work on `stream`. It never fails, and what became of it is counted. No lock of ours may be
  // held, and the GIL is left as it is; whoever holds it lets go of it, as around any call that enqueues work.
  bool prefetches_new(std::size_t bytes) noexcept {
    return bytes >= process().new_blocks.least_bytes.load(std::memory_order_relaxed);
  }
  // Prefetches pages that the block is the first to have, once, to where it is used.
  void populate(const FreshPages& fresh) noexcept;

  void prefetch_new(void* ptr, std::size_t bytes, CUstream stream) noexcept;

  // The pool whose range `ptr` lies in, or null.
  static TrackedPool* of(Process& process, const void* ptr) noexcept {
    Span* span = process.pages.find(ptr);
    return span == nullptr ? nullptr : static_cast<TrackedPool*>(span->pool);
  }

  // Frees a block of any pool of this process, once, to the pool that gave it. Anything else is counted and recorded
  // and goes nowhere. `stream` is where the last use is ordered; null if the caller does not say.
  static Freed deallocate(Process& process, void* ptr, std::uint64_t stated_bytes, const CUstream* stream,
                          const Provenance& who) noexcept;

  // The same, for a caller that has looked the address up.
  [[gnu::always_inline]] static Freed deallocate_in_place(Process& process, const Found& found, void* ptr,
                                                          std::uint64_t stated_bytes, const CUstream* stream,
                                                          const Provenance& who) noexcept {
    if (process.may_not_act() && !acts_on(process, found)) [[unlikely]]
      return Freed::ignored;
    if (found.block == nullptr || found.start != ptr) [[unlikely]] {
      return refuse_free(process, found.span == nullptr ? Freed::foreign : Freed::not_live, ptr, stated_bytes, who);
    }
    Block& block = *found.block;
    auto* pool = static_cast<TrackedPool*>(found.span->pool);
    std::uint64_t bytes = found.span->block_bytes;
    std::int64_t born_ns = 0;
    std::uint8_t flags = 0;
    // Two frees at once: the ledger lets one of them close the entry, whose lock the flags are under; see Pool::mark.
    if (const auto id = block.entry.load(std::memory_order_acquire); id != 0) [[likely]] {
      std::optional<Entry> told;  // for whoever has asked to know of it
      process.ledger.close(id, reinterpret_cast<std::uintptr_t>(ptr), [&](const Entry& entry, const HolderKey& key) {
        flags = block.flags.load(std::memory_order_relaxed);
        block.flags.store(0, std::memory_order_relaxed);
        block.entry.store(0, std::memory_order_release);
        bytes = entry.bytes;
        born_ns = entry.time_ns;
        if (!process.quiet(key.tag) || pool->debug() || (stated_bytes != kUnstated && stated_bytes != bytes)) [[unlikely]]
          told = entry;
      });
      if (told) [[unlikely]]
        pool->tell_end(*told, id, stated_bytes);
    } else {
      flags = block.flags.exchange(0, std::memory_order_acq_rel);
    }
    if ((flags & Block::kLive) == 0) [[unlikely]]
      return refuse_free(process, Freed::not_live, ptr, stated_bytes, who);
    end(found, bytes, born_ns, flags, stream);
    return Freed::done;
  }

  // Makes a CPU block larger or smaller: in place where its class allows, else in a new block of the same pool with the
  // contents copied, after the device work on the old one. On failure the old block is untouched and null is returned;
  // `refusal` says why where no memory could be had for a new one. In resize.cpp.
  static void* reallocate(Process& process, void* ptr, std::size_t bytes, Refusal& refusal) noexcept;
  static void* reallocate(Process& process, void* ptr, std::size_t bytes) noexcept {
    Refusal refusal;
    return reallocate(process, ptr, bytes, refusal);
  }

  [[gnu::always_inline]] static Found find(Process& process, const void* ptr) noexcept {
    Found found;
    found.span = process.pages.find(ptr);
    if (found.span == nullptr || found.span->state.load(std::memory_order_acquire) != Span::State::blocks) return found;
    const std::uint32_t index = found.span->index_of(ptr);
    if (index >= found.span->block_count) return found;
    found.block = &found.span->blocks.load(std::memory_order_acquire)[index];
    found.start = found.span->block_at(index);
    return found;
  }

  // Whether blocks there may be taken and freed.
  static bool acts_on(Process& process, const Found& found) noexcept {
    return process.running() && (found.span == nullptr || !static_cast<TrackedPool*>(found.span->pool)->inherited());
  }

  // The bridge's own thread looks after the pool.
  Delay run() noexcept override;

  void retire() noexcept { retired_.store(true, std::memory_order_release); }
  bool retired() const noexcept { return retired_.load(std::memory_order_acquire); }
  // As asked for; without a ledger nobody knows at a free what that was, and blocks count as large as they are.
  std::size_t live_bytes() {
    const PoolNumbers now = numbers();
    return track_ == Track::off ? now.used_bytes : now.asked_bytes;
  }
  int device() const noexcept { return device_; }
  std::uint8_t kind() const noexcept { return kind_; }
  Track track() const noexcept { return track_; }

 private:
  // False, and the block is given back, if there is no memory for the record.
  [[gnu::always_inline]] bool recorded(Block* block, const Request& request, const StreamRef& stream) noexcept {
    try {
      Entry entry = entry_for(request, block->start);
      block->entry.store(process().ledger.open(entry, key_for(request.who)), std::memory_order_release);
      return true;
    } catch (const std::bad_alloc&) {
      give_back(block, request.bytes, false, stream);
      return false;
    }
  }

  // What is the same however a block's life ended: it was live until `flags` were taken from it, and the ledger has forgotten it.
  [[gnu::always_inline]] static void end(const Found& found, std::size_t bytes, std::int64_t born_ns, std::uint8_t flags,
                                         const CUstream* stream) noexcept {
    auto* pool = static_cast<TrackedPool*>(found.span->pool);
    if ((flags & Block::kHinted) != 0) [[unlikely]]
      pool->end_hints(found.start);
    KnownStream known;
    const StreamRef* given = stream != nullptr && pool->resolve_for_free(*stream, known) ? &known : nullptr;
    pool->Pool::deallocate({found.span, found.block, bytes, born_ns}, (flags & Block::kShown) != 0, given);
    if (pool->retired_.load(std::memory_order_acquire)) [[unlikely]]
      pool->close_soon(bytes);
  }

  static PoolOptions told(PoolOptions options, std::uint8_t kind, Track track) noexcept {
    options.counts_asked = track != Track::off;
    options.populate = options.populate && kind == kManagedKind && !options.device_wait && !options.debug;
    return options;
  }

  // Of a block that nobody has seen yet.
  void give_back(Block* block, std::size_t bytes, bool shown, StreamRef stream) noexcept;

  // One try: a block with its record, or a refusal and nothing changed.
  Refusal take(const Request& request, const KnownStream& stream, Grant& grant) noexcept;

  // True if another try is worth it: Python made room.
  bool relieved(std::size_t bytes, int attempt, bool may_collect) noexcept;

  HolderKey key_for(const Provenance& who) const noexcept { return {who.site, who.tag, device_, who.framework, kind_}; }

  Entry entry_for(const Request& request, const void* ptr) const noexcept {
    Entry entry;
    entry.ptr = reinterpret_cast<std::uintptr_t>(ptr);
    entry.bytes = request.bytes;
    entry.stream = request.host_ordered ? 0 : reinterpret_cast<std::uintptr_t>(request.stream);
    entry.time_ns = coarse_time_ns();
    entry.thread = native_thread_id();
    return entry;
  }

  // In hint_calls.cpp:
  NewBlocks::Outcome try_prefetch(void* ptr, std::size_t bytes, CUstream stream) noexcept;
  void end_hints(void* ptr) noexcept;

  void close_soon(std::size_t freed_bytes) noexcept;
  void tell_end(const Entry& entry, Ledger::EntryId id, std::uint64_t stated_bytes) noexcept;
  void remember_end(const Entry& entry) noexcept;
  void forget_end(const char* ptr) noexcept override;
  void damaged(PendingWarning::Kind kind, const char* ptr, std::size_t bytes, std::ptrdiff_t offset) noexcept override;
  static Freed refuse_free(Process& process, Freed why, void* ptr, std::uint64_t stated_bytes, const Provenance& who) noexcept;

  // In resize.cpp:
  bool copy_when_finished(const Found& found, char* to, std::size_t bytes) noexcept;
  void* move_pages(const Found& found, Ledger::EntryId id, std::size_t old_bytes, std::size_t bytes, bool& ended) noexcept;
  void record_resize(Ledger::EntryId id) noexcept;
  template <typename Moved>
  bool account_resize(Ledger::EntryId id, void* from, void* to, std::size_t bytes, Moved moved) noexcept;

  const std::int16_t device_;
  const std::uint8_t kind_;
  const Track track_;
  std::atomic<bool> retired_{false};
  Delay retry_{25};  // of the background thread
  SpinLock ended_lock_;
  std::unordered_map<std::uintptr_t, Entry> endings_;  // debug mode
};

}  // namespace rmm_bridge
