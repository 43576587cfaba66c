// One recording: events and live blocks of this process, in a file that is mapped and whole at every moment. docs/design/recording.md
// has the reasons.
//
// Threads: everything may be called from any thread that holds no lock of the ledger's, the sites' or the history's. No recording is
// ever destroyed: a thread may be inside when it ends, and what that writes goes to memory that nobody reads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/spin_lock.hpp"
#include "ledger/history.hpp"
#include "ledger/ledger.hpp"
#include "ledger/sites.hpp"
#include "recording/format.hpp"

namespace rmm_bridge {

class Recording {
 public:
  struct Shape {
    std::uint64_t event_count = 0;
    std::uint64_t block_count = 0;
    std::uint64_t text_bytes = 0;

    std::size_t file_bytes() const noexcept {
      return kRecordingHeaderBytes + (event_count + block_count) * 64 + 2 * kRecordedHolders * sizeof(RecordedHolder) +
             static_cast<std::size_t>(text_bytes);
    }
  };

  // Over an empty file of `shape.file_bytes()`, all of whose blocks the file system has given. Null, and the reason in `errno`, if it
  // cannot be mapped. Throws std::bad_alloc.
  static Recording* map(int file, const Shape& shape, Ledger& ledger, Sites& sites);

  // `extra` is what the caller of a free stated.
  void add(const HistoryEvent& event, Ledger::EntryId id) noexcept;

  // Every block that is live and not in the table yet. Once the recording hears of all others.
  void add_live() noexcept;

  // A tag, framework or fact by its number: before an event refers to it.
  void name(TextKind kind, std::uint32_t id, std::uint32_t outer, std::string_view text) noexcept;

  // Writes the last figures. Nobody may call `add` from now on; who is in the midst of it writes to memory of no file.
  void end() noexcept;

 private:
  static constexpr std::uint64_t kBatch = 64;
  static constexpr std::uint32_t kChunk = 1024;
  static constexpr std::uint32_t kChunksOfShard = 4096;

  Recording(char* base, const Shape& shape, Ledger& ledger, Sites& sites);

  struct Cursor;
  void next_batch(Cursor& cursor) noexcept;
  void write_event(const HistoryEvent& event, std::uint64_t extra, std::uint64_t order) noexcept;
  RecordedBlock* block_at(Ledger::EntryId id, bool make) noexcept;
  void write_block(RecordedBlock& block, const HolderKey& who, const Entry& entry) noexcept;
  void write_sites(std::uint32_t last) noexcept;
  void write_text(const RecordedText& record, std::string_view text, std::string_view more) noexcept;
  void note_clock() noexcept;
  void write_holders() noexcept;

  RecordingHeader& header_;
  RecordedEvent* const events_;
  RecordedBlock* const blocks_;
  RecordedHolder* const holders_;
  char* const text_;
  const Shape shape_;
  const std::uint32_t generation_;
  Ledger& ledger_;
  Sites& sites_;
  std::atomic<std::uint32_t> sites_written_{0};  // all before this one are in the file
  // Where each 1024 entries of a shard lie: a program of one thread uses one shard.
  std::array<std::unique_ptr<std::atomic<RecordedBlock*>[]>, Ledger::kShards> chunks_;
  SpinLock chunk_lock_;
  std::atomic<bool> writes_holders_{false};
  SpinLock text_lock_;  // and then the sites'
};

}  // namespace rmm_bridge
