// The live allocations, who holds them, and who held what at the high-water mark. Standard library only; knows
// nothing of addresses but their value: finding the record of an address is the pool's work.
//
// Threads: everything may be called from any thread. Totals are exact. Peaks, of all and of each holder, are exact for one thread,
// and for blocks of 1 MiB and more; with several, a peak may be off by what each shard has not published since the last report
// (16 KiB each, 256 KiB in all).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/spin_lock.hpp"
#include "ledger/shard.hpp"
#include "ledger/types.hpp"

namespace rmm_bridge {

class Ledger {
 public:
  using EntryId = std::uint32_t;  // 0: no entry
  static constexpr std::uint32_t kShards = 16;
  static std::uint32_t slot_of(EntryId id) noexcept { return id / kShards - 1; }  // of the shard id % kShards

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
      shard.newest = &shard.intern(key, epoch_.load(std::memory_order_relaxed), levels_);
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
    Account& account = touched(holder);
    account.opened_bytes += bytes;
    ++account.opened_count;
    if (shard.count(account, bytes)) [[unlikely]]
      publish(shard, account, *holder.level);
    return (slot + 1) * kShards + mine;
  }

  // Forgets the live block at `ptr`, unless another thread has done so. `look` sees what was known of it and whose it was, under
  // the shard's lock.
  template <typename Look>
  [[gnu::always_inline]] void close(EntryId id, std::uintptr_t ptr, Look look) noexcept {
    Shard& shard = shards_[id % kShards];
    const std::uint32_t slot = id / kShards - 1;
    const Locked lock(shard.lock);
    Entry& stored = shard.at(slot);
    if (stored.ptr != ptr) [[unlikely]]
      return;
    Holder& holder = shard.holder(stored.holder / kShards);
    note_peaks(shard, holder);
    look(std::as_const(stored), std::as_const(holder.key));
    const auto bytes = static_cast<std::int64_t>(stored.bytes);
    stored.ptr = 0;
    stored.bytes = shard.free_head;
    shard.free_head = slot + 1;
    Account& account = touched(holder);
    account.closed_bytes += bytes;
    ++account.closed_count;
    if (shard.count(account, -bytes)) [[unlikely]]
      publish(shard, account, *holder.level);
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
    Holder& holder = shard.holder(stored.holder / kShards);
    note_peaks(shard, holder);
    const std::int64_t delta = static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(stored.bytes);
    stored.ptr = to;
    stored.bytes = bytes;
    ++stored.resized_count;
    Account& account = touched(holder);
    (delta < 0 ? account.closed_bytes : account.opened_bytes) += std::abs(delta);
    shard.count(account, delta);
    publish(shard, account, *holder.level);  // always: many small steps of a large block would add up
    moved();
    return true;
  }

  // Copies the entry; false if it was closed meanwhile.
  bool read(EntryId id, Entry& out) noexcept {
    if (id == 0) return false;
    Shard& shard = shards_[id % kShards];
    std::scoped_lock lock(shard.lock);
    const std::uint32_t slot = id / kShards - 1;
    if (slot < shard.inherited) return false;
    out = shard.at(slot);
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
        for (std::uint32_t slot = shard.inherited; slot < shard.used; ++slot) {
          if (const Entry& entry = shard.at(slot); entry.ptr != 0) copy.push_back(entry);
        }
      }
      for (const Entry& entry : copy) visit(entry);
    }
  }

  // Calls `visit(id, entry, key)` for each live entry, which cannot end meanwhile: under its shard's lock.
  template <typename Visit>
  void for_each_held(Visit visit) noexcept {
    for (std::uint32_t mine = 0; mine < kShards; ++mine) {
      Shard& shard = shards_[mine];
      std::scoped_lock lock(shard.lock);
      for (std::uint32_t slot = shard.inherited; slot < shard.used; ++slot) {
        const Entry& entry = shard.at(slot);
        if (entry.ptr != 0) visit((slot + 1) * kShards + mine, entry, shard.holders[entry.holder / kShards].key);
      }
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
      for (Holder& holder : shard.holders) {
        holder.level->publish(holder.account.unpublished_bytes);
        sums[holder.key] += holder.account.usage(holder.epoch != epoch);
      }
    }
    levels_.for_each([&](const HolderKey& key, Level& level) {
      level.raise(level.bytes.load(std::memory_order_relaxed));
      // No less than what is held now, which may have changed since.
      if (auto found = sums.find(key); found != sums.end()) {
        found->second.peak_bytes = std::max(level.peak_bytes.load(std::memory_order_relaxed), found->second.current_bytes);
      }
    });
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
      all_.publish(shard.unpublished_bytes);
    }
    return all_.bytes.load(std::memory_order_relaxed);
  }
  std::int64_t peak_bytes() noexcept {
    note_peak(current_bytes());
    return all_.peak_bytes.load(std::memory_order_relaxed);
  }

  // Without what shards have not published.
  std::int64_t published_peak_bytes() const noexcept { return all_.peak_bytes.load(std::memory_order_relaxed); }

  void reset_peak() noexcept {
    const auto reset = [](Level& level) { level.peak_bytes.store(level.bytes.load()); };
    current_bytes();
    for (Shard& shard : shards_) {
      std::scoped_lock lock(shard.lock);
      for (Holder& holder : shard.holders) holder.level->publish(holder.account.unpublished_bytes);
    }
    reset(all_);
    epoch_.fetch_add(1, std::memory_order_relaxed);
    levels_.for_each([&](const HolderKey&, Level& level) { reset(level); });
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

  // In a forked child, before it has a second thread: nothing is live, and nothing ever was. Open scopes stay open.
  void forget() noexcept {
    const auto reset = [](Level& level) {
      level.bytes.store(0);
      level.peak_bytes.store(0);
    };
    for (Shard& shard : shards_) shard.forget();
    reset(all_);
    levels_.for_each([&](const HolderKey&, Level& level) { reset(level); });
    for (std::int64_t& scope : scope_peaks_) scope = std::min<std::int64_t>(scope, 0);
  }

  // Every lock of the ledger, for `Process::lock_for_fork`.
  template <typename Visit>
  void for_each_lock(Visit visit) noexcept {
    for (Shard& shard : shards_) visit(shard.lock);
    visit(scope_lock_);
    visit(levels_.lock_for_fork());
  }

  // Host bytes that the ledger itself uses.
  std::size_t overhead_bytes() noexcept {
    std::size_t bytes = sizeof(*this);
    for (Shard& shard : shards_) {
      std::scoped_lock lock(shard.lock);
      bytes += shard.overhead_bytes();
    }
    return bytes;
  }

 private:
  static constexpr std::uint64_t kSerials = 64;  // taken at a time by a shard

  // The high-water mark is only looked for when bytes are about to go: between two frees the live bytes only grow,
  // so the highest point of a run of allocations is its end (the way memray's high-water aggregator sees it).
  // Under the shard's lock.
  [[gnu::always_inline]] void note_peaks(const Shard& shard, const Holder& holder) noexcept {
    const std::int64_t quiet = all_.below_peak(shard.unpublished_bytes) |
                               holder.level->below_peak(holder.account.unpublished_bytes) |
                               -std::int64_t{scope_count_.load(std::memory_order_relaxed)};
    if (quiet < 0) [[unlikely]]
      raise_peaks(shard, holder);
  }

  [[gnu::noinline]] void raise_peaks(const Shard& shard, const Holder& holder) noexcept {
    note_peak(all_.bytes.load(std::memory_order_relaxed) + shard.unpublished_bytes);
    holder.level->raise(holder.level->bytes.load(std::memory_order_relaxed) + holder.account.unpublished_bytes);
  }

  void note_peak(std::int64_t now) noexcept {
    if (all_.raise(now)) epoch_.fetch_add(1, std::memory_order_relaxed);
    if (scope_count_.load(std::memory_order_relaxed) == 0) return;
    std::scoped_lock lock(scope_lock_);
    for (std::int64_t& scope : scope_peaks_) {
      if (scope >= 0) scope = std::max(scope, now);
    }
  }

  [[gnu::noinline]] void publish(Shard& shard, Account& account, Level& level) noexcept {
    all_.publish(shard.unpublished_bytes);
    level.publish(account.unpublished_bytes);
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
  Level all_;
  Levels levels_;
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
