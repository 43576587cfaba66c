// The live allocations, who holds them, and who held what at the high-water mark. Standard library only; knows
// nothing of addresses but their value: finding the record of an address is the pool's work.
//
// Threads: everything may be called from any thread. Totals are exact. Peaks are exact for one thread, and for blocks of 1 MiB
// and more; with several, a peak may be off by what each shard has not published since the last report (16 KiB each, 256 KiB
// in all), and the peak of one holder, summed over threads, may be above what it ever held at once.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ledger_types.hpp"
#include "spin_lock.hpp"

namespace rmm_bridge {

class Ledger {
 public:
  using EntryId = std::uint32_t;  // 0: no entry

  Ledger() = default;
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // Records a live block and gives it its serial number. Throws std::bad_alloc and then has changed nothing.
  // In place, so that the caller's entry need not be in memory.
  [[gnu::always_inline]] EntryId open(Entry& entry, const HolderKey& key) {
    const std::uint32_t mine = entry.thread % kShards;
    Shard& shard = shards_[mine];
    const auto bytes = static_cast<std::int64_t>(entry.bytes);
    const Locked lock(shard.lock);
    if (shard.newest == nullptr || shard.newest->key != key) [[unlikely]] {
      shard.newest = &shard.intern(key, epoch_.load(std::memory_order_relaxed));
    }
    Holder& holder = *shard.newest;
    const std::uint32_t slot = shard.take_slot();
    Entry& stored = shard.at(slot);
    if (shard.next_serial == shard.last_serial) [[unlikely]] {
      shard.next_serial = serial_.fetch_add(kSerials, std::memory_order_relaxed);
      shard.last_serial = shard.next_serial + kSerials;
    }
    entry.serial = ++shard.next_serial;
    entry.holder = holder.index * kShards + mine;
    stored.fill(entry);
    count(shard, bytes);
    Account& account = touched(holder);
    account.opened_bytes += bytes;
    ++account.opened_count;
    return (slot + 1) * kShards + mine;
  }

  // Forgets the live block at `ptr`, unless another thread has done so. `look` sees what was known of it, under the shard's
  // lock.
  template <typename Look>
  [[gnu::always_inline]] void close(EntryId id, std::uintptr_t ptr, Look look) noexcept {
    Shard& shard = shards_[id % kShards];
    const std::uint32_t slot = id / kShards - 1;
    const Locked lock(shard.lock);
    Entry& stored = shard.at(slot);
    if (stored.ptr != ptr) [[unlikely]] return;
    note_peak(seen_from(shard));
    look(std::as_const(stored));
    const std::uint32_t holder = stored.holder;
    const auto bytes = static_cast<std::int64_t>(stored.bytes);
    stored.ptr = 0;
    stored.bytes = shard.free_head;
    shard.free_head = slot + 1;
    count(shard, -bytes);
    Account& account = touched(shard.holder(holder / kShards));
    account.shrink(bytes);
    ++account.closed_count;
  }

  // Calls `action` while the live block at `ptr` cannot end; false if it has. Under the shard's lock.
  template <typename Action>
  bool while_open(EntryId id, std::uintptr_t ptr, Action action) noexcept {
    Shard& shard = shards_[id % kShards];
    std::scoped_lock lock(shard.lock);
    if (shard.at(id / kShards - 1).ptr != ptr) return false;
    action();
    return true;
  }

  // The block at `from` keeps its serial, site and time: it is the same allocation, larger or smaller, perhaps elsewhere. False,
  // and nothing changed, if it has ended. `moved` is called under the shard's lock.
  template <typename Moved>
  bool resize(EntryId id, std::uintptr_t from, std::uintptr_t to, std::uint64_t bytes, Moved moved) noexcept {
    Shard& shard = shards_[id % kShards];
    std::scoped_lock lock(shard.lock);
    Entry& stored = shard.at(id / kShards - 1);
    if (stored.ptr != from) return false;
    note_peak(seen_from(shard));
    const std::int64_t delta = static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(stored.bytes);
    stored.ptr = to;
    stored.bytes = bytes;
    ++stored.resized_count;
    count(shard, delta);
    Account& account = touched(shard.holder(stored.holder / kShards));
    if (delta < 0) {
      account.shrink(-delta);
    } else {
      account.opened_bytes += delta;
    }
    moved();
    return true;
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

  // Calls `visit(key, usage)` once for each holder ever seen: the sum over its shards.
  template <typename Visit>
  void for_each_holder(Visit visit) {
    note_peak(current_bytes());
    const std::uint64_t epoch = epoch_.load(std::memory_order_relaxed);
    std::unordered_map<HolderKey, Usage, HolderKey::Hash> sums;
    for (Shard& shard : shards_) {
      std::scoped_lock lock(shard.lock);
      for (const Holder& holder : shard.holders) {
        sums[holder.key] += holder.account.usage(holder.epoch != epoch);
      }
    }
    for (const auto& [key, usage] : sums) visit(key, usage);
  }

  HolderKey key_of(std::uint32_t holder) noexcept {
    Shard& shard = shards_[holder % kShards];
    std::scoped_lock lock(shard.lock);
    return shard.holders[holder / kShards].key;
  }

  // Exact but for what changes meanwhile, and so is every peak from here on until a second thread allocates. Not the sum over
  // the shards, which would count what moves from one to another while it is taken.
  std::int64_t current_bytes() noexcept {
    for (Shard& shard : shards_) {
      std::scoped_lock lock(shard.lock);
      publish(shard);
    }
    return published_bytes_.load(std::memory_order_relaxed);
  }
  std::int64_t peak_bytes() noexcept {
    note_peak(current_bytes());
    return peak_bytes_.load(std::memory_order_relaxed);
  }

  void reset_peak() noexcept {
    peak_bytes_.store(current_bytes(), std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_relaxed);
    for (Shard& shard : shards_) {
      std::scoped_lock lock(shard.lock);
      for (Holder& holder : shard.holders) holder.account.peak_bytes = holder.account.current_bytes();
    }
  }

  // A peak of its own, from now until `close_scope`. At most 64 at a time; returns -1 for one more.
  int open_scope() noexcept {
    const std::int64_t now = std::max<std::int64_t>(current_bytes(), 0);
    std::scoped_lock lock(scope_lock_);
    for (int scope = 0; scope < static_cast<int>(scope_peaks_.size()); ++scope) {
      if (scope_peaks_[scope] >= 0) continue;
      scope_peaks_[scope] = now;
      scope_count_.fetch_add(1, std::memory_order_relaxed);
      return scope;
    }
    return -1;
  }
  std::int64_t read_scope(int scope) noexcept {
    note_peak(current_bytes());
    std::scoped_lock lock(scope_lock_);
    return scope_peaks_[scope];
  }
  void close_scope(int scope) noexcept {
    std::scoped_lock lock(scope_lock_);
    scope_peaks_[scope] = -1;
    scope_count_.fetch_sub(1, std::memory_order_relaxed);
  }

  // Every lock of the ledger, for `Process::lock_for_fork`.
  template <typename Visit>
  void for_each_lock(Visit visit) noexcept {
    for (Shard& shard : shards_) visit(shard.lock);
    visit(scope_lock_);
  }

  // Host bytes that the ledger itself uses.
  std::size_t overhead_bytes() noexcept {
    std::size_t bytes = sizeof(*this);
    for (Shard& shard : shards_) {
      std::scoped_lock lock(shard.lock);
      bytes += shard.chunks.size() * kChunk * sizeof(Entry) + shard.holders.size() * sizeof(Holder) +
               shard.table.size() * sizeof(std::uint32_t);
    }
    return bytes;
  }

 private:
  static constexpr std::uint32_t kShards = 16;
  static constexpr std::uint32_t kChunk = 1024;
  static constexpr std::uint64_t kSerials = 64;  // taken at a time by a shard
  static constexpr std::int64_t kUnpublished = 16 << 10;  // a counter that all threads write costs each of them 20 to 200 ns
  // A program that makes call sites or tags without end: what comes after is counted under its framework alone.
  static constexpr std::uint32_t kHolders = std::uint32_t{1} << 20;

  // What a Usage is made from: two sums each way, so that a block changes two numbers when it comes and two when it goes.
  struct Account {
    std::int64_t opened_bytes = 0;
    std::int64_t opened_count = 0;
    std::int64_t closed_bytes = 0;
    std::int64_t closed_count = 0;
    std::int64_t peak_bytes = 0;  // as of the last time that bytes went
    std::int64_t at_peak_bytes = 0;
    std::int64_t at_peak_count = 0;

    std::int64_t current_bytes() const noexcept { return opened_bytes - closed_bytes; }
    std::int64_t current_count() const noexcept { return opened_count - closed_count; }

    // As `Ledger::note_peak`: what is held only grows between two of these.
    void shrink(std::int64_t bytes) noexcept {
      peak_bytes = std::max(peak_bytes, current_bytes());
      closed_bytes += bytes;
    }

    void save_at_peak() noexcept {
      at_peak_bytes = current_bytes();
      at_peak_count = current_count();
    }

    Usage usage(bool unchanged_since_peak) const noexcept {
      Account now = *this;
      if (unchanged_since_peak) now.save_at_peak();
      return {.current_bytes = current_bytes(), .current_count = current_count(),
              .peak_bytes = std::max(peak_bytes, current_bytes()), .total_bytes = opened_bytes, .total_count = opened_count,
              .at_peak_bytes = now.at_peak_bytes, .at_peak_count = now.at_peak_count};
    }
  };

  struct Holder {
    HolderKey key;
    std::uint32_t index = 0;
    std::uint64_t epoch = 0;
    Account account;
  };

  // A thread opens entries in one shard (the same in all modules, each of which has thread-local variables of its own), with
  // the holders of that shard: one lock covers both, and threads seldom meet.
  struct alignas(64) Shard {
    SpinLock lock;
    std::vector<std::unique_ptr<Entry[]>> chunks;  // never moved or freed: an id stays readable
    std::uint64_t free_head = 0;  // slot + 1 of the first free entry, linked through `bytes`
    std::uint32_t used = 0;
    std::uint64_t next_serial = 0;
    std::uint64_t last_serial = 0;
    std::int64_t unpublished_bytes = 0;  // of its entries, what `published_bytes_` has not seen
    std::deque<Holder> holders;
    Holder* newest = nullptr;  // of the last entry: a program allocates at one place again and again
    std::vector<std::uint32_t> table;  // open addressing: holder index + 1

    // A program frees what it has just allocated, again and again.
    Holder& holder(std::uint32_t index) {
      if (newest->index == index) [[likely]] return *newest;
      return holders[index];
    }

    Entry& at(std::uint32_t slot) { return chunks[slot / kChunk][slot % kChunk]; }

    std::uint32_t take_slot() {
      if (free_head != 0) [[likely]] {
        const auto slot = static_cast<std::uint32_t>(free_head - 1);
        free_head = at(slot).bytes;
        return slot;
      }
      if (used == chunks.size() * kChunk) chunks.push_back(std::make_unique<Entry[]>(kChunk));
      return used++;
    }

    [[gnu::noinline]] Holder& intern(HolderKey key, std::uint64_t epoch) {
      if (table.empty()) table.assign(64, 0);
      std::size_t slot = probe(key);
      if (table[slot] != 0) return holders[table[slot] - 1];
      if (holders.size() >= kHolders) {
        key.site = key.tag = 0;
        slot = probe(key);
        if (table[slot] != 0) return holders[table[slot] - 1];
      }
      if ((holders.size() + 1) * 2 > table.size()) {
        std::vector<std::uint32_t> grown(table.size() * 2, 0);
        table.swap(grown);
        for (const Holder& holder : holders) table[probe(holder.key)] = holder.index + 1;
        slot = probe(key);
      }
      const auto index = static_cast<std::uint32_t>(holders.size());
      holders.push_back({key, index, epoch, Account{}});
      table[slot] = index + 1;
      return holders.back();
    }

    // Where `key` is, or would go.
    std::size_t probe(const HolderKey& key) const {
      const std::size_t mask = table.size() - 1;
      std::size_t slot = HolderKey::Hash{}(key) & mask;
      while (table[slot] != 0 && holders[table[slot] - 1].key != key) slot = (slot + 1) & mask;
      return slot;
    }
  };

  // The high-water mark is only looked for when bytes are about to go: between two frees the live bytes only grow,
  // so the highest point of a run of allocations is its end (the way memray's high-water aggregator sees it).
  void note_peak(std::int64_t now) noexcept {
    const bool news = now > peak_bytes_.load(std::memory_order_relaxed) || scope_count_.load(std::memory_order_relaxed) != 0;
    if (news) [[unlikely]] raise_peak(now);
  }

  [[gnu::noinline]] void raise_peak(std::int64_t now) noexcept {
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

  // The live bytes of all shards, as far as the others have published theirs. Under the shard's lock.
  std::int64_t seen_from(const Shard& shard) const noexcept {
    return published_bytes_.load(std::memory_order_relaxed) + shard.unpublished_bytes;
  }

  // Under the shard's lock.
  void count(Shard& shard, std::int64_t bytes) noexcept {
    shard.unpublished_bytes += bytes;
    if (std::abs(shard.unpublished_bytes) > kUnpublished) [[unlikely]] publish(shard);
  }

  void publish(Shard& shard) noexcept {
    published_bytes_.fetch_add(std::exchange(shard.unpublished_bytes, 0), std::memory_order_relaxed);
  }

  // A holder that did not change since the peak still has its value of then; the first change after it saves that.
  [[gnu::always_inline]] Account& touched(Holder& holder) noexcept {
    if (const std::uint64_t epoch = epoch_.load(std::memory_order_relaxed); holder.epoch != epoch) [[unlikely]] {
      holder.epoch = epoch;
      holder.account.save_at_peak();
    }
    return holder.account;
  }

  std::array<Shard, kShards> shards_;
  std::atomic<std::int64_t> published_bytes_{0};
  std::atomic<std::int64_t> peak_bytes_{0};
  std::atomic<std::uint64_t> epoch_{1};
  std::atomic<std::uint64_t> serial_{0};

  SpinLock scope_lock_;
  std::atomic<int> scope_count_{0};
  std::array<std::int64_t, 64> scope_peaks_ = all_closed();
  static constexpr std::array<std::int64_t, 64> all_closed() {
    std::array<std::int64_t, 64> closed{};
    closed.fill(-1);
    return closed;
  }
};

}  // namespace rmm_bridge
