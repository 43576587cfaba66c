// What each shard of the ledger has: entries, and its part of each holder's account. Standard library only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/spin_lock.hpp"
#include "ledger/types.hpp"

namespace rmm_bridge {

// Live bytes as far as all shards have published theirs, and the most they were. A counter that all threads write costs each of
// them 20 to 200 ns, so shards publish in steps.
struct Level {
  static constexpr std::int64_t kUnpublished = 16 << 10;

  std::atomic<std::int64_t> bytes{0};
  std::atomic<std::int64_t> peak_bytes{0};

  // By how much a level with so many bytes more would be below the peak; negative for a new peak.
  std::int64_t below_peak(std::int64_t unpublished_bytes) const noexcept {
    return peak_bytes.load(std::memory_order_relaxed) - bytes.load(std::memory_order_relaxed) - unpublished_bytes;
  }

  // True if it was one.
  bool raise(std::int64_t now) noexcept {
    std::int64_t peak = peak_bytes.load(std::memory_order_relaxed);
    while (now > peak) {
      if (peak_bytes.compare_exchange_weak(peak, now, std::memory_order_relaxed)) return true;
    }
    return false;
  }

  void publish(std::int64_t& unpublished_bytes) noexcept {
    if (unpublished_bytes != 0) bytes.fetch_add(std::exchange(unpublished_bytes, 0), std::memory_order_relaxed);
  }
};

// One for each holder ever seen, whatever shards it is in. Never freed.
class Levels {
 public:
  SpinLock& lock_for_fork() noexcept { return lock_; }

  // Throws std::bad_alloc.
  Level& of(const HolderKey& key) {
    std::scoped_lock lock(lock_);
    return levels_[key];
  }

  // With the lock held: `visit` calls nothing.
  template <typename Visit>
  void for_each(Visit visit) {
    std::scoped_lock lock(lock_);
    for (auto& [key, level] : levels_) visit(key, level);
  }

 private:
  SpinLock lock_;
  std::unordered_map<HolderKey, Level, HolderKey::Hash> levels_;  // whose elements never move
};

// A holder's part in one shard: two sums each way, from which all else follows, so that a block changes few numbers when it comes
// and when it goes.
struct Account {
  std::int64_t opened_bytes = 0;
  std::int64_t opened_count = 0;
  std::int64_t closed_bytes = 0;
  std::int64_t closed_count = 0;
  std::int64_t unpublished_bytes = 0;  // what the holder's level has not seen
  std::int64_t at_peak_bytes = 0;
  std::int64_t at_peak_count = 0;

  void save_at_peak() noexcept {
    at_peak_bytes = opened_bytes - closed_bytes;
    at_peak_count = opened_count - closed_count;
  }

  // Without the peak.
  Usage usage(bool unchanged_since_peak) const noexcept {
    Account now = *this;
    if (unchanged_since_peak) now.save_at_peak();
    return {.current_bytes = opened_bytes - closed_bytes,
            .current_count = opened_count - closed_count,
            .total_bytes = opened_bytes,
            .total_count = opened_count,
            .at_peak_bytes = now.at_peak_bytes,
            .at_peak_count = now.at_peak_count};
  }
};

struct Holder {
  HolderKey key;
  std::uint32_t index = 0;
  std::uint64_t epoch = 0;
  Level* level = nullptr;
  Account account;
};

// A thread opens entries in one shard (the same in all modules, each of which has thread-local variables of its own), with
// the holders of that shard: one lock covers both, and threads seldom meet.
struct alignas(64) Shard {
  static constexpr std::uint32_t kChunk = 1024;
  // A program that makes call sites or tags without end: what comes after is counted under its framework alone.
  static constexpr std::uint32_t kHolders = std::uint32_t{1} << 20;

  SpinLock lock;
  std::vector<std::unique_ptr<Entry[]>> chunks;  // never moved or freed: an id stays readable
  std::uint64_t free_head = 0;                   // slot + 1 of the first free entry, linked through `bytes`
  std::uint64_t next_serial = 0;
  std::uint64_t last_serial = 0;
  std::int64_t unpublished_bytes = 0;  // of its entries, what the ledger's level has not seen
  Holder* newest = nullptr;            // of the last entry: a program allocates at one place again and again
  std::uint32_t used = 0;
  std::uint32_t inherited = 0;  // entries before this one are those of the process that this was forked from
  std::deque<Holder> holders;
  std::vector<std::uint32_t> table;  // open addressing: holder index + 1

  // A program frees what it has just allocated, again and again.
  Holder& holder(std::uint32_t index) {
    if (newest->index == index) [[likely]]
      return *newest;
    return holders[index];
  }

  Entry& at(std::uint32_t slot) { return chunks[slot / kChunk][slot % kChunk]; }

  // In a forked child.
  void forget() noexcept {
    inherited = used;
    free_head = 0;
    unpublished_bytes = 0;
    newest = nullptr;
    holders.clear();
    std::fill(table.begin(), table.end(), 0);
  }

  [[gnu::always_inline]] std::uint32_t take_slot() {
    if (free_head == 0) [[unlikely]]
      return new_slot();
    const auto slot = static_cast<std::uint32_t>(free_head - 1);
    free_head = at(slot).bytes;
    return slot;
  }

  // Throws std::bad_alloc.
  [[gnu::noinline]] std::uint32_t new_slot() {
    if (used == chunks.size() * kChunk) chunks.push_back(std::make_unique<Entry[]>(kChunk));
    return used++;
  }

  // Changes the live bytes. True if that is more than may stay unpublished.
  [[gnu::always_inline]] bool count(Account& account, std::int64_t bytes) noexcept {
    constexpr auto kMost = static_cast<std::uint64_t>(Level::kUnpublished);
    const auto above_least = [](std::int64_t unpublished) { return static_cast<std::uint64_t>(unpublished) + kMost; };
    unpublished_bytes += bytes;
    account.unpublished_bytes += bytes;
    return (above_least(unpublished_bytes) | above_least(account.unpublished_bytes)) >= 2 * kMost;
  }

  [[gnu::noinline]] Holder& intern(HolderKey key, std::uint64_t epoch, Levels& levels) {
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
    holders.push_back({key, index, epoch, &levels.of(key), Account{}});
    table[slot] = index + 1;
    return holders.back();
  }

  std::size_t overhead_bytes() const noexcept {
    return chunks.size() * kChunk * sizeof(Entry) + holders.size() * (sizeof(Holder) + sizeof(Level)) +
           table.size() * sizeof(std::uint32_t);
  }

 private:
  // Where `key` is, or would go.
  std::size_t probe(const HolderKey& key) const {
    const std::size_t mask = table.size() - 1;
    std::size_t slot = HolderKey::Hash{}(key)&mask;
    while (table[slot] != 0 && holders[table[slot] - 1].key != key) slot = (slot + 1) & mask;
    return slot;
  }
};

}  // namespace rmm_bridge
