// What a recording's file consists of: docs/design/recording.md says what each field means. Little-endian, as it lies in memory.
// Every number that others read while it changes is one aligned store.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rmm_bridge {

inline constexpr std::uint64_t kRecordingMagic = 0x31434552424D4D52ull;  // "RMMBREC1"
inline constexpr std::uint32_t kRecordingVersion = 1;
inline constexpr std::size_t kRecordingHeaderBytes = 4096;

// A place of the ring. `sequence`, the place's number since the start plus one, is published last; `check` tells a place that two
// writers met in, or a disk has damaged.
struct RecordedEvent {
  std::atomic<std::uint32_t> sequence;  // its lower half; zero while the place is written
  std::uint8_t action;
  std::uint8_t framework;
  std::uint8_t kind;
  std::uint8_t flags;
  std::uint64_t serial;
  std::uint64_t ptr;
  std::uint64_t bytes;
  std::uint64_t extra;  // resize: bytes before; a wrong free: what the caller stated; an allocation: the stream
  std::uint64_t order;
  std::uint32_t site;
  std::uint32_t tag;
  std::uint32_t thread;
  std::int16_t device;
  std::uint16_t check;
};
static_assert(sizeof(RecordedEvent) == 64 && sizeof(std::atomic<std::uint32_t>) == 4);

// A live block. `serial` is published last, and is zero in a place that is empty or being written.
struct RecordedBlock {
  std::atomic<std::uint64_t> serial;
  std::uint64_t ptr;
  std::uint64_t bytes;
  std::uint64_t stream;
  std::int64_t time_ns;  // since the epoch
  std::uint32_t site;
  std::uint32_t tag;
  std::uint32_t thread;
  std::int16_t device;
  std::uint8_t framework;
  std::uint8_t kind;
  std::uint32_t resized_count;
  std::uint32_t reserved;
};
static_assert(sizeof(RecordedBlock) == 64);

// What one holder had when the most was live.
struct RecordedHolder {
  std::int64_t bytes;
  std::int64_t count;
  std::uint32_t site;
  std::uint32_t tag;
  std::int16_t device;
  std::uint8_t framework;
  std::uint8_t kind;
  std::uint32_t reserved;
};
static_assert(sizeof(RecordedHolder) == 32);
inline constexpr std::uint64_t kRecordedHolders = 8192;  // in each of two halves: one is whole while the other is written

enum class TextKind : std::uint32_t { end, site, tag, framework, thread, about };

// Before each text; the next record begins at the next multiple of eight.
struct RecordedText {
  std::uint32_t bytes;  // of the text behind this
  TextKind kind;
  std::uint32_t id;
  std::int32_t line;         // site
  std::uint32_t file_bytes;  // site: the text is file and function
  std::uint32_t via;         // site: the library's line that it went through, a site of its own; zero: none
  std::uint32_t flags;       // site: kLibraryLine
  std::uint32_t outer;       // tag: the tag around it
};
static_assert(sizeof(RecordedText) == 32);
inline constexpr std::uint32_t kLibraryLine = 1;  // of an installed package, and no line of the program's

struct RecordingHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint64_t file_bytes;
  std::uint64_t events_offset, event_count;  // a power of two
  std::uint64_t blocks_offset, block_count;  // a multiple of 1024
  std::uint64_t text_offset, text_bytes;     // behind the two halves of holders
  std::uint32_t pid;
  std::uint32_t reserved;
  std::uint64_t start_order;
  std::int64_t start_time_ns;  // since the epoch
  std::int64_t start_steady_ns;

  // What changes, each on a cache line of its own.
  alignas(64) std::atomic<std::uint64_t> taken;        // places, in all
  alignas(64) std::atomic<std::uint64_t> text_used;    // bytes
  std::atomic<std::uint64_t> text_lost;                // records for which there was no room
  alignas(64) std::atomic<std::uint64_t> blocks_used;  // places, in chunks
  std::atomic<std::uint64_t> blocks_lost;              // allocations for which there was no place
  // A pair of `order` and the steady clock, whose scale follows from it and the start's. Odd while it is written.
  alignas(64) std::atomic<std::uint32_t> clock_version;
  std::atomic<std::uint64_t> clock_order;
  std::atomic<std::int64_t> clock_steady_ns;
  // The newest half of holders: their number, times two, and which half. Zero: none is written.
  alignas(64) std::atomic<std::uint64_t> holders;
  std::atomic<std::int64_t> holders_peak_bytes[2];  // the peak that each half is of
  // As the ledger had it, at the last batch and at the end.
  alignas(64) std::atomic<std::uint64_t> ended;  // 1: by `stop`, or at exit
  std::atomic<std::int64_t> end_time_ns;
  std::atomic<std::int64_t> current_bytes;
  std::atomic<std::int64_t> peak_bytes;  // since the process began, or `reset_peak`
};
static_assert(sizeof(RecordingHeader) <= kRecordingHeaderBytes);

}  // namespace rmm_bridge
