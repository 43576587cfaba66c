// The tables of blocks that pools have had: the next pool takes them again, so that a program which makes pools without end does not
// grow. They are never freed, since a wrong free may look into one at any time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/spin_lock.hpp"
#include "pages/span.hpp"

namespace rmm_bridge {

struct BlockTable {
  std::unique_ptr<Block[]> blocks;
  std::uint32_t capacity = 0;
};

// From any thread. Not among the locks of a fork: a child makes no blocks.
class BlockTables {
 public:
  // The smallest idle one that has room for so many and not for more than twice as many, else a new one. Throws std::bad_alloc.
  BlockTable take(std::uint32_t count) {
    {
      std::scoped_lock lock(lock_);
      auto best = idle_.end();
      for (auto table = idle_.begin(); table != idle_.end(); ++table) {
        const bool fits = table->capacity >= count && table->capacity / 2 <= count;
        if (fits && (best == idle_.end() || table->capacity < best->capacity)) best = table;
        if (fits && table->capacity == count) break;
      }
      if (best != idle_.end()) {
        BlockTable found = std::move(*best);
        *best = std::move(idle_.back());
        idle_.pop_back();
        return found;
      }
    }
    return {std::make_unique<Block[]>(count), count};
  }

  // Of a pool that has ended.
  void give(std::vector<BlockTable>&& tables) noexcept {
    std::scoped_lock lock(lock_);
    try {
      idle_.reserve(idle_.size() + tables.size());
    } catch (const std::bad_alloc&) {
      for (BlockTable& table : tables) static_cast<void>(table.blocks.release());
      tables.clear();
      return;
    }
    std::move(tables.begin(), tables.end(), std::back_inserter(idle_));
    tables.clear();
  }

 private:
  SpinLock lock_;
  std::vector<BlockTable> idle_;
};

}  // namespace rmm_bridge
