// What the whole process shares, once: page map, ledger, history, driver, and whether the process may still act.
//
// The one instance is made by the module `process`, and the others get its address from there. It is never destroyed: blocks
// outlive modules and the interpreter.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "base/background_thread.hpp"
#include "base/clock.hpp"
#include "base/gate.hpp"
#include "base/memory_limits.hpp"
#include "base/spin_lock.hpp"
#include "driver/driver.hpp"
#include "hints/hint_table.hpp"
#include "ledger/budgets.hpp"
#include "ledger/history.hpp"
#include "ledger/ledger.hpp"
#include "ledger/pending_warnings.hpp"
#include "ledger/sites.hpp"
#include "pages/block_tables.hpp"
#include "pages/hugepages.hpp"
#include "pages/page_map.hpp"
#include "pool/fork_state.hpp"
#include "recording/recording.hpp"

namespace rmm_bridge {

enum class Phase : int {
  running,
  forked,   // this is a child of the process that made the pools, and has made none of its own: see `is_child`
  exiting,  // interpreter shutdown has begun: no CUDA call, no free
};

class ForkLocks {
 public:
  virtual void lock_for_fork() noexcept = 0;
  virtual void unlock_after_fork() noexcept = 0;
  // In the child: what is here is the parent's.
  virtual void inherit() noexcept = 0;

 protected:
  ~ForkLocks() = default;
};

struct Process {
  PageMap pages;
  BlockTables block_tables;
  Ledger ledger;
  Sites sites;
  Gate reading;  // of Python frames without the GIL: closes before the interpreter ends
  Budgets budgets;
  History history;
  std::atomic<Recording*> recording{nullptr};  // the file that events go to
  PendingWarnings warnings;
  BackgroundThread background;
  MemoryLimits limits;
  Driver driver;
  HintTable hints;
  HugepageAdvice hugepages;
  ForkState forks;
  std::atomic<std::uint64_t> foreign_frees{0};
  std::atomic<std::uint64_t> size_mismatches{0};
  std::atomic<std::uint64_t> failures{0};
  std::atomic<std::uint64_t> given_back{0};     // pieces, or parts of them, to upstream
  std::atomic<std::uint64_t> beyond_budget{0};  // growth that passed a pool's budget: see Pool::make_room
  // Smaller blocks of GPU frameworks are of no interest to any hint policy: the adapters need not ask.
  std::atomic<std::size_t> least_hinted_bytes{~std::size_t{0}};
  NewBlocks new_blocks;
  // For prefetches that no work waits for; made when the device's first is due, and never destroyed.
  std::array<std::atomic<CUstream>, kDevices> populating{};
  std::atomic<std::uint64_t> populated{0}, populated_bytes{0};

  // The GIL is the outermost lock, and a thread that waits for the device while it holds it never wakes if a Python
  // callback is queued on the stream. Set by `connect_interpreter`; both are no-ops on a thread that does not hold the GIL.
  void* (*release_gil)() = nullptr;
  void (*restore_gil)(void*) = nullptr;
  // Asks the interpreter to let go of pools that have ended, or to warn of new warnings: soon, and from a safe place.
  // Callable with and without the GIL.
  void (*on_closed)() = nullptr;
  void (*on_warning)() = nullptr;
  // Lets Python make room for a request that failed: collect garbage if `may_collect`, ask the user. True if another
  // try is worth it. Does nothing on a thread that does not hold the GIL.
  bool (*relieve)(std::size_t bytes, int attempt, bool may_collect) = nullptr;

  // A pool, which outlives everything, once nothing of its making can fail. Throws std::bad_alloc and then knows nothing of it: a fork
  // would lock what is no pool.
  void add_pool(ForkLocks* pool, BackgroundTask* task) {
    std::scoped_lock guard(locks_lock_);
    locks_.reserve(locks_.size() + 1);
    background.add(task);
    locks_.push_back(pool);
    had_pools_ = true;
  }

  // Another task of the bridge's thread, which outlives everything. Throws std::bad_alloc.
  void add_task(BackgroundTask* task) {
    std::scoped_lock guard(locks_lock_);
    background.add(task);
  }

  // One that has ended: nobody needs its locks any more, and a fork would write to each.
  void remove_pool(ForkLocks* pool) noexcept {
    std::scoped_lock guard(locks_lock_);
    std::erase(locks_, pool);
  }

  // Plain numbers, for Cython.
  std::uint64_t foreign_free_count() const noexcept { return foreign_frees.load(); }
  std::uint64_t size_mismatch_count() const noexcept { return size_mismatches.load(); }
  std::uint64_t failure_count() const noexcept { return failures.load(); }
  std::uint64_t given_back_count() const noexcept { return given_back.load(); }
  std::uint64_t beyond_budget_count() const noexcept { return beyond_budget.load(); }
  std::uint64_t populated_count() const noexcept { return populated.load(); }
  std::uint64_t populated_byte_count() const noexcept { return populated_bytes.load(); }
  int phase_number() const noexcept { return static_cast<int>(phase()); }

  bool had_pools() const noexcept { return had_pools_; }

  // Around a fork the forking thread holds every lock, so that the child inherits whole data and no lock of a thread that
  // it does not have. Otherwise a thread holds one at most, or a pool's and then one of its lanes' or events', or one of a
  // ledger's shards' and then the peak scopes' or the levels'.
  void lock_for_fork() noexcept {
    reading.lock_for_fork().lock();
    locks_lock_.lock();
    for (ForkLocks* pool : locks_) pool->lock_for_fork();
    ledger.for_each_lock([](auto& lock) { lock.lock(); });
    sites.lock_for_fork().lock();
    history.lock_for_fork().lock();
    warnings.lock_for_fork().lock();
    pages.lock_for_fork().lock();
    hints.lock_for_fork().lock();
    limits.lock_for_fork().lock();
    forks.mirror.lock_for_fork().lock();
  }
  void unlock_after_fork() noexcept {
    forks.mirror.lock_for_fork().unlock();
    limits.lock_for_fork().unlock();
    hints.lock_for_fork().unlock();
    pages.lock_for_fork().unlock();
    warnings.lock_for_fork().unlock();
    history.lock_for_fork().unlock();
    sites.lock_for_fork().unlock();
    ledger.for_each_lock([](auto& lock) { lock.unlock(); });
    for (ForkLocks* pool : locks_) pool->unlock_after_fork();
    locks_lock_.unlock();
    reading.lock_for_fork().unlock();
  }

  // In a forked child of a process with pools or a driver, before it has a second thread. The pools that there are stay the
  // parent's: nothing is taken from them or freed to them. All figures are the child's.
  void become_child() noexcept {
    state_.fetch_or(kForked | kChild);
    parent_had_driver_ = parent_had_driver_ || driver.loaded;
    for (ForkLocks* pool : locks_) pool->inherit();
    ledger.forget();
    budgets.forget();
    history.forget();
    for (auto* each : {&foreign_frees, &size_mismatches, &failures, &given_back, &beyond_budget, &populated, &populated_bytes}) {
      each->store(0);
    }
  }
  // The child makes a pool of its own. The driver's state is of no use in a child, for good.
  void begin_again() noexcept {
    if (parent_had_driver_) driver.loaded = false;
    state_.fetch_and(~kForked);
  }
  bool is_child() const noexcept { return (state_.load(std::memory_order_relaxed) & kChild) != 0; }
  bool parent_had_driver() const noexcept { return parent_had_driver_; }
  // Whether a pool that is about to give or get a block may be somebody else's, or the process may not act: one look for the hot
  // paths.
  bool may_not_act() const noexcept { return (state_.load(std::memory_order_relaxed) & (kForked | kExiting | kChild)) != 0; }

  void warn(const PendingWarning& warning) noexcept {
    if (warnings.add(warning) && on_warning != nullptr) on_warning();
  }

  // The process may act, and nobody wants to know of blocks that have this tag: one look for the hot paths.
  bool quiet(std::uint32_t tag) const noexcept {
    const unsigned state = state_.load(std::memory_order_relaxed);
    return state == 0 || (state == kBudgets && tag == 0);
  }

  bool running() const noexcept { return (state_.load(std::memory_order_relaxed) & (kForked | kExiting)) == 0; }
  bool exiting() const noexcept { return (state_.load() & kExiting) != 0; }  // also if it was forked
  Phase phase() const noexcept { return exiting() ? Phase::exiting : running() ? Phase::running : Phase::forked; }
  void begin_exit() noexcept { state_.fetch_or(kExiting); }

  // Whether somebody wants to know of every allocation and free.
  bool noting() const noexcept { return (state_.load(std::memory_order_relaxed) & (kRecording | kWriting)) != 0; }
  // Into the history, and into the file. `id` of the entry, where there is one.
  void note(const HistoryEvent& event, Ledger::EntryId id = 0) noexcept {
    const bool plain = event.action == Action::allocate || event.action == Action::deallocate || event.action == Action::resize;
    if (!plain || (state_.load(std::memory_order_relaxed) & kRecording) != 0) history.add(event);
    if (Recording* file = recording.load(std::memory_order_acquire)) file->add(event, id);
  }
  void begin_recording(Recording* file) noexcept {
    recording.store(file, std::memory_order_release);
    state_.fetch_or(kWriting);
    file->add_live();
  }
  void end_recording() noexcept {
    state_.fetch_and(~kWriting);
    if (Recording* file = recording.exchange(nullptr)) file->end();
  }
  // In a forked child: the file is the parent's.
  void leave_recording() noexcept {
    state_.fetch_and(~kWriting);
    recording.store(nullptr);
  }
  void record_all_events(bool on) noexcept {
    if (on) {
      state_.fetch_or(kRecording);
    } else {
      state_.fetch_and(~kRecording);
    }
  }

  // As Budgets::add. For good, as tags are.
  bool add_budget(std::uint32_t tag, std::uint32_t outer, std::int64_t limit_bytes) {
    const bool added = budgets.add(tag, outer, limit_bytes);
    if (budgets.any()) state_.fetch_or(kBudgets);
    return added;
  }

 private:
  static constexpr unsigned kForked = 1, kExiting = 2, kRecording = 4, kBudgets = 8, kChild = 16, kWriting = 32;
  std::atomic<unsigned> state_{0};
  bool parent_had_driver_ = false;  // written in a child before it has a second thread
  SpinLock locks_lock_;
  bool had_pools_ = false;
  std::vector<ForkLocks*> locks_;
};

// While one lives, its thread neither lets go of the GIL, which it holds, nor makes a call that may take long: the caller has a lock
// that others want with the GIL.
class KeepGil {
 public:
  explicit KeepGil(bool keep) noexcept : before_(std::exchange(kept_, kept_ || keep)) {}
  ~KeepGil() { kept_ = before_; }
  KeepGil(const KeepGil&) = delete;
  KeepGil& operator=(const KeepGil&) = delete;

  static bool kept() noexcept { return kept_; }

 private:
  static inline thread_local bool kept_ = false;
  const bool before_;
};

// Without the GIL inside, if this thread held it. Around each call of the driver that may take long: besides waits all that enqueues
// something, since a stream with some 1,021 operations waiting takes no more until one of them has ended (docs/design/measured.md).
class WithoutGil {
 public:
  explicit WithoutGil(Process& process)
      : process_(process), state_(process.release_gil == nullptr || KeepGil::kept() ? nullptr : process.release_gil()) {}
  ~WithoutGil() {
    if (state_ != nullptr) process_.restore_gil(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  Process& process_;
  void* state_;
};

}  // namespace rmm_bridge
