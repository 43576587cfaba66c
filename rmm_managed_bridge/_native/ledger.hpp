// The live allocations, who holds them, and who held what at the high-water mark. Standard library only; knows
// nothing of addresses but their value: finding the record of an address is the pool's work.
//
// Threads: everything may be called from any thread. Totals and peaks are exact as long as one thread at a time
// allocates and frees; otherwise each thread's one running operation may be missing from a peak.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "spin_lock.hpp"

namespace rmm_bridge {

struct HolderKey {
  std::uint32_t site = 0;
  std::uint32_t tag = 0;
  std::int16_t device = -1;
  std::uint8_t framework = 0;
  std::uint8_t kind = 0;

  bool operator==(const HolderKey&) const = default;
  std::size_t hash() const noexcept {
    std::uint64_t bits = (std::uint64_t{site} << 32 | tag) * 0x9E3779B97F4A7C15ull;
    bits ^= (std::uint64_t{static_cast<std::uint16_t>(device)} << 16 | std::uint64_t{framework} << 8 | kind) *
            0xC2B2AE3D27D4EB4Full;
    return static_cast<std::size_t>(bits ^ (bits >> 29));
  }
};

struct Usage {
  std::int64_t current_bytes = 0;
  std::int64_t current_count = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t total_bytes = 0;
  std::int64_t total_count = 0;
  std::int64_t at_peak_bytes = 0;  // what was held when the sum over all holders was highest
  std::int64_t at_peak_count = 0;
};

struct Entry {
  std::uintptr_t ptr = 0;
  std::uint64_t bytes = 0;
  std::uint64_t serial = 0;
  std::uint64_t stream = 0;
  std::int64_t time_ns = 0;
  std::uint32_t thread = 0;
  std::uint32_t holder = 0;
  std::uint32_t resized_count = 0;
};
static_assert(sizeof(Entry) <= 64, "an entry, its index and its slack stay under 128 bytes a live allocation");

class Ledger {
 public:
  using EntryId = std::uint32_t;  // 0: no entry

  Ledger() : table_(new Table(256)) {}
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // Records a live block and gives it its serial number. Throws std::bad_alloc and then has changed nothing.
  EntryId open(Entry& entry, const HolderKey& key) {
    Holder& holder = intern(key);
    entry.holder = holder.index;
    entry.serial = serial_.fetch_add(1, std::memory_order_relaxed) + 1;
    const EntryId id = store(entry);
    const auto bytes = static_cast<std::int64_t>(entry.bytes);
    current_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    change(holder, bytes, 1);
    return id;
  }

  // Forgets a live block and returns what was known of it.
  Entry close(EntryId id) noexcept {
    Shard& shard = shards_[id % kShards];
    const std::uint32_t slot = id / kShards - 1;
    Entry entry;
    {
      std::scoped_lock lock(shard.lock);
      Entry& stored = shard.at(slot);
      entry = stored;
      stored.ptr = 0;
      stored.bytes = shard.free_head;
      shard.free_head = slot + 1;
    }
    note_peak();
    const auto bytes = static_cast<std::int64_t>(entry.bytes);
    change(*holders_at(entry.holder), -bytes, -1);
    current_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    return entry;
  }

  // The block keeps its serial, site and time: it is the same allocation, larger or smaller, perhaps elsewhere.
  void resize(EntryId id, std::uintptr_t ptr, std::uint64_t bytes) noexcept {
    Shard& shard = shards_[id % kShards];
    std::uint32_t holder;
    std::int64_t delta;
    {
      std::scoped_lock lock(shard.lock);
      Entry& stored = shard.at(id / kShards - 1);
      delta = static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(stored.bytes);
      holder = stored.holder;
      stored.ptr = ptr;
      stored.bytes = bytes;
      ++stored.resized_count;
    }
    if (delta < 0) note_peak();
    current_bytes_.fetch_add(delta, std::memory_order_relaxed);
    change(*holders_at(holder), delta, 0);
  }

  // Copies the entry; false if it was closed meanwhile.
  bool read(EntryId id, Entry& out) noexcept {
    if (id == 0) return false;
    Shard& shard = shards_[id % kShards];
    std::scoped_lock lock(shard.lock);
    out = shard.at(id / kShards - 1);
    return out.ptr != 0;
  }

  // Calls `visit(entry)` for a copy of each live entry, in no order, with no lock held.
  template <typename Visit>
  void for_each(Visit visit) {
    std::vector<Entry> copy;
    for (Shard& shard : shards_) {
      copy.clear();
      {
        std::scoped_lock lock(shard.lock);
        for (std::uint32_t slot = 0; slot < shard.used; ++slot) {
          if (const Entry& entry = shard.at(slot); entry.ptr != 0) copy.push_back(entry);
        }
      }
      for (const Entry& entry : copy) visit(entry);
    }
  }

  // Calls `visit(key, usage)` for each holder ever seen.
  template <typename Visit>
  void for_each_holder(Visit visit) {
    note_peak();
    const std::uint64_t epoch = epoch_.load(std::memory_order_relaxed);
    const std::uint32_t count = holder_count_.load(std::memory_order_acquire);
    for (std::uint32_t index = 0; index < count; ++index) {
      Holder& holder = *holders_at(index);
      Usage usage;
      {
        std::scoped_lock lock(holder.lock);
        usage = holder.usage;
        if (holder.epoch != epoch) {
          usage.at_peak_bytes = usage.current_bytes;
          usage.at_peak_count = usage.current_count;
        }
      }
      visit(holder.key, usage);
    }
  }

  HolderKey key_of(std::uint32_t holder) const noexcept { return holders_at(holder)->key; }
  std::int64_t current_bytes() const noexcept { return current_bytes_.load(std::memory_order_relaxed); }
  std::int64_t peak_bytes() noexcept {
    note_peak();
    return peak_bytes_.load(std::memory_order_relaxed);
  }

  void reset_peak() noexcept {
    peak_bytes_.store(current_bytes(), std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_relaxed);
    const std::uint32_t count = holder_count_.load(std::memory_order_acquire);
    for (std::uint32_t index = 0; index < count; ++index) {
      Holder& holder = *holders_at(index);
      std::scoped_lock lock(holder.lock);
      holder.usage.peak_bytes = holder.usage.current_bytes;
    }
  }

  // A peak of its own, from now until `close_scope`. At most 64 at a time; returns -1 for one more.
  int open_scope() noexcept {
    std::scoped_lock lock(scope_lock_);
    for (int scope = 0; scope < static_cast<int>(scope_peaks_.size()); ++scope) {
      if (scope_peaks_[scope] >= 0) continue;
      scope_peaks_[scope] = std::max<std::int64_t>(current_bytes(), 0);
      scope_count_.fetch_add(1, std::memory_order_relaxed);
      return scope;
    }
    return -1;
  }
  std::int64_t read_scope(int scope) noexcept {
    note_peak();
    std::scoped_lock lock(scope_lock_);
    return scope_peaks_[scope];
  }
  void close_scope(int scope) noexcept {
    std::scoped_lock lock(scope_lock_);
    scope_peaks_[scope] = -1;
    scope_count_.fetch_sub(1, std::memory_order_relaxed);
  }

  // Host bytes that the ledger itself uses.
  std::size_t overhead_bytes() noexcept {
    std::size_t bytes = sizeof(*this) + table_.load()->slots.size() * sizeof(void*);
    bytes += holder_count_.load() * sizeof(Holder);
    for (Shard& shard : shards_) {
      std::scoped_lock lock(shard.lock);
      bytes += shard.chunks.size() * kChunk * sizeof(Entry);
    }
    return bytes;
  }

 private:
  static constexpr std::uint32_t kShards = 16;
  static constexpr std::uint32_t kChunk = 1024;
  static constexpr std::uint32_t kHolderChunk = 256;
  static constexpr std::uint32_t kHolderChunks = 4096;

  struct alignas(64) Shard {
    SpinLock lock;
    std::vector<std::unique_ptr<Entry[]>> chunks;  // never moved or freed: an id stays readable
    std::uint32_t used = 0;
    std::uint64_t free_head = 0;  // slot + 1 of the first free entry, linked through `bytes`
    Entry& at(std::uint32_t slot) { return chunks[slot / kChunk][slot % kChunk]; }
  };

  struct alignas(64) Holder {
    HolderKey key;
    std::uint32_t index = 0;
    SpinLock lock;
    std::uint64_t epoch = 0;
    Usage usage;
  };

  // Readers probe a table without a lock; a grown table replaces it and the old one stays for those still reading.
  struct Table {
    explicit Table(std::size_t size) : slots(size) {}
    std::vector<std::atomic<Holder*>> slots;
  };

  Holder* holders_at(std::uint32_t index) const noexcept {
    return &holder_chunks_[index / kHolderChunk].load(std::memory_order_acquire)[index % kHolderChunk];
  }

  static Holder* find(const Table& table, const HolderKey& key) noexcept {
    const std::size_t mask = table.slots.size() - 1;
    for (std::size_t slot = key.hash() & mask;; slot = (slot + 1) & mask) {
      Holder* holder = table.slots[slot].load(std::memory_order_acquire);
      if (holder == nullptr || holder->key == key) return holder;
    }
  }

  static void insert(Table& table, Holder* holder) noexcept {
    const std::size_t mask = table.slots.size() - 1;
    std::size_t slot = holder->key.hash() & mask;
    while (table.slots[slot].load(std::memory_order_relaxed) != nullptr) slot = (slot + 1) & mask;
    table.slots[slot].store(holder, std::memory_order_release);
  }

  Holder& intern(const HolderKey& key) {
    if (Holder* holder = find(*table_.load(std::memory_order_acquire), key)) return *holder;
    std::scoped_lock lock(intern_mutex_);
    Table* table = table_.load(std::memory_order_relaxed);
    if (Holder* holder = find(*table, key)) return *holder;
    const std::uint32_t index = holder_count_.load(std::memory_order_relaxed);
    if (index >= kHolderChunk * kHolderChunks) {
      // Programs that generate code without end: what comes now is counted, without its site and tag.
      return intern_locked_fallback(key, *table);
    }
    if (index % kHolderChunk == 0) holder_chunks_[index / kHolderChunk].store(new Holder[kHolderChunk]);
    if ((index + 1) * 2 > table->slots.size()) {
      auto grown = std::make_unique<Table>(table->slots.size() * 2);
      for (std::uint32_t old = 0; old < index; ++old) insert(*grown, holders_at(old));
      old_tables_.emplace_back(table);
      table = grown.release();
      table_.store(table, std::memory_order_release);
    }
    Holder* holder = holders_at(index);
    holder->key = key;
    holder->index = index;
    holder->epoch = epoch_.load(std::memory_order_relaxed);
    insert(*table, holder);
    holder_count_.store(index + 1, std::memory_order_release);
    return *holder;
  }

  Holder& intern_locked_fallback(HolderKey key, const Table& table) noexcept {
    key.site = 0;
    key.tag = 0;
    Holder* holder = find(table, key);
    return holder != nullptr ? *holder : *holders_at(0);
  }

  EntryId store(const Entry& entry) {
    static std::atomic<std::uint32_t> next_thread{0};
    static thread_local const std::uint32_t mine = next_thread.fetch_add(1, std::memory_order_relaxed) % kShards;
    Shard& shard = shards_[mine];
    std::scoped_lock lock(shard.lock);
    std::uint32_t slot;
    if (shard.free_head != 0) {
      slot = static_cast<std::uint32_t>(shard.free_head - 1);
      shard.free_head = shard.at(slot).bytes;
    } else {
      if (shard.used == shard.chunks.size() * kChunk) shard.chunks.push_back(std::make_unique<Entry[]>(kChunk));
      slot = shard.used++;
    }
    shard.at(slot) = entry;
    return (slot + 1) * kShards + mine;
  }

  // The high-water mark is only looked for when bytes are about to go: between two frees the live bytes only grow,
  // so the highest point of a run of allocations is its end (the way memray's high-water aggregator sees it).
  void note_peak() noexcept {
    const std::int64_t now = current_bytes_.load(std::memory_order_relaxed);
    std::int64_t peak = peak_bytes_.load(std::memory_order_relaxed);
    while (now > peak) {
      if (!peak_bytes_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) continue;
      epoch_.fetch_add(1, std::memory_order_relaxed);
      break;
    }
    if (scope_count_.load(std::memory_order_relaxed) == 0) return;
    std::scoped_lock lock(scope_lock_);
    for (std::int64_t& scope : scope_peaks_) {
      if (scope >= 0) scope = std::max(scope, now);
    }
  }

  // A holder that did not change since the peak still has its value of then; the first change after it saves that.
  void change(Holder& holder, std::int64_t bytes, int count) noexcept {
    std::scoped_lock lock(holder.lock);
    Usage& usage = holder.usage;
    if (const std::uint64_t epoch = epoch_.load(std::memory_order_relaxed); holder.epoch != epoch) {
      holder.epoch = epoch;
      usage.at_peak_bytes = usage.current_bytes;
      usage.at_peak_count = usage.current_count;
    }
    usage.current_bytes += bytes;
    usage.current_count += count;
    if (bytes > 0) usage.total_bytes += bytes;
    if (count > 0) ++usage.total_count;
    usage.peak_bytes = std::max(usage.peak_bytes, usage.current_bytes);
  }

  std::array<Shard, kShards> shards_;
  std::atomic<std::int64_t> current_bytes_{0};
  std::atomic<std::int64_t> peak_bytes_{0};
  std::atomic<std::uint64_t> epoch_{1};
  std::atomic<std::uint64_t> serial_{0};

  std::atomic<Table*> table_;
  std::vector<std::unique_ptr<Table>> old_tables_;
  std::mutex intern_mutex_;
  std::atomic<std::uint32_t> holder_count_{0};
  std::array<std::atomic<Holder*>, kHolderChunks> holder_chunks_ = {};

  SpinLock scope_lock_;
  std::atomic<int> scope_count_{0};
  std::array<std::int64_t, 64> scope_peaks_ = make_closed();
  static constexpr std::array<std::int64_t, 64> make_closed() {
    std::array<std::int64_t, 64> closed{};
    closed.fill(-1);
    return closed;
  }
};

}  // namespace rmm_bridge
