#include "recording/recording.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <mutex>
#include <string>

#include "base/clock.hpp"
#include "recording/order.hpp"
#include "recording/utf8.hpp"

namespace rmm_bridge {

// The places that this thread has taken and not used.
struct Recording::Cursor {
  std::uint64_t next = 0;
  std::uint64_t end = 0;
  std::uint32_t generation = 0;  // of the recording
};

namespace {

std::atomic<std::uint32_t> generations{0};

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14, which older headers do not have

// As docs/design/recording.md has it, for those who read it elsewhere.
std::uint16_t check_of(const RecordedEvent& event, std::uint32_t sequence) noexcept {
  const auto pair = [](std::uint32_t high, std::uint32_t low) { return std::uint64_t{high} << 32 | low; };
  const std::uint32_t small = std::uint32_t{event.action} << 24 | std::uint32_t{event.framework} << 16 |
                              std::uint32_t{event.kind} << 8 | std::uint32_t{event.flags};
  // Each by a number of its own, so that the processor need not wait for one after the other.
  const std::uint64_t sum = event.serial * 0x9E3779B97F4A7C15ull ^ event.ptr * 0xC2B2AE3D27D4EB4Full ^
                            event.bytes * 0xFF51AFD7ED558CCDull ^ event.extra * 0xC4CEB9FE1A85EC53ull ^
                            event.order * 0xD6E8FEB86659FD93ull ^ pair(event.site, event.tag) * 0xA0761D6478BD642Full ^
                            pair(event.thread, sequence) * 0xE7037ED1A0B428DBull ^
                            pair(small, static_cast<std::uint16_t>(event.device)) * 0x8EBC6AF09C88C6E3ull;
  return static_cast<std::uint16_t>(sum >> 48);
}

std::uint64_t rounded(std::uint64_t bytes) noexcept { return (bytes + 7) & ~std::uint64_t{7}; }

}  // namespace

Recording* Recording::map(int file, const Shape& shape, Ledger& ledger, Sites& sites) {
  void* const base = ::mmap(nullptr, shape.file_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (base == MAP_FAILED) return nullptr;
  // A page that nobody has touched costs a microsecond or more, and 64 events fill one: better once, at the start. Where the kernel
  // is too old for it, threads pay on their way.
  ::madvise(base, kRecordingHeaderBytes + shape.event_count * sizeof(RecordedEvent), kPopulateWrite);
  try {
    return new Recording(static_cast<char*>(base), shape, ledger, sites);
  } catch (...) {
    ::munmap(base, shape.file_bytes());
    throw;
  }
}

Recording::Recording(char* base, const Shape& shape, Ledger& ledger, Sites& sites)
    : header_(*reinterpret_cast<RecordingHeader*>(base)),
      events_(reinterpret_cast<RecordedEvent*>(base + kRecordingHeaderBytes)),
      blocks_(reinterpret_cast<RecordedBlock*>(events_ + shape.event_count)),
      holders_(reinterpret_cast<RecordedHolder*>(blocks_ + shape.block_count)),
      text_(reinterpret_cast<char*>(holders_ + 2 * kRecordedHolders)),
      shape_(shape),
      generation_(generations.fetch_add(1) + 1),
      ledger_(ledger),
      sites_(sites) {
  for (auto& chunks : chunks_) chunks = std::make_unique<std::atomic<RecordedBlock*>[]>(kChunksOfShard);
  header_.version = kRecordingVersion;
  header_.header_bytes = kRecordingHeaderBytes;
  header_.file_bytes = shape.file_bytes();
  header_.events_offset = kRecordingHeaderBytes;
  header_.event_count = shape.event_count;
  header_.blocks_offset = header_.events_offset + 64 * shape.event_count;
  header_.block_count = shape.block_count;
  header_.text_offset = header_.blocks_offset + 64 * shape.block_count + 2 * kRecordedHolders * sizeof(RecordedHolder);
  header_.text_bytes = shape.text_bytes;
  header_.pid = static_cast<std::uint32_t>(::getpid());
  header_.start_time_ns = coarse_time_ns();
  header_.start_steady_ns = steady_time_ns();
  header_.start_order = order_now();
  note_clock();
  std::atomic_thread_fence(std::memory_order_release);
  header_.magic = kRecordingMagic;
}

void Recording::add(const HistoryEvent& event, Ledger::EntryId id) noexcept {
  const Entry& entry = event.entry;
  std::uint64_t extra = event.stated_bytes;
  const std::uint64_t order = order_now();
  if (event.who.site >= sites_written_.load(std::memory_order_acquire)) [[unlikely]]
    write_sites(event.who.site);
  if (event.action == Action::allocate) {
    extra = entry.stream;
    if (RecordedBlock* block = block_at(id, true)) write_block(*block, event.who, entry);
  } else if (event.action == Action::deallocate) {
    // Its place may be another block's already: then that one has its own serial there.
    std::uint64_t serial = entry.serial;
    if (RecordedBlock* block = block_at(id, false)) block->serial.compare_exchange_strong(serial, 0, std::memory_order_relaxed);
  } else if (event.action == Action::resize) {
    if (RecordedBlock* block = block_at(id, false); block != nullptr && block->serial.load() == entry.serial) {
      extra = block->bytes;
      write_block(*block, event.who, entry);
    }
  }
  write_event(event, extra, order);
}

void Recording::write_event(const HistoryEvent& from, std::uint64_t extra, std::uint64_t order) noexcept {
  static thread_local Cursor cursor;
  // Places that were taken long ago may be about to be taken again.
  if (cursor.next == cursor.end || cursor.generation != generation_ ||
      header_.taken.load(std::memory_order_relaxed) - cursor.next > shape_.event_count / 2) [[unlikely]]
    next_batch(cursor);
  const std::uint64_t place = cursor.next++;
  const auto sequence = static_cast<std::uint32_t>(place + 1);
  RecordedEvent& event = events_[place & (shape_.event_count - 1)];
  event.sequence.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  event.action = static_cast<std::uint8_t>(from.action);
  event.framework = from.who.framework;
  event.kind = from.who.kind;
  event.flags = 0;
  event.serial = from.entry.serial;
  event.ptr = from.entry.ptr;
  event.bytes = from.entry.bytes;
  event.extra = extra;
  event.order = order;
  event.site = from.who.site;
  event.tag = from.who.tag;
  event.thread = native_thread_id();
  event.device = from.who.device;
  event.check = check_of(event, sequence);
  event.sequence.store(sequence, std::memory_order_release);
}

void Recording::next_batch(Cursor& cursor) noexcept {
  if (cursor.generation != generation_) {
    char name[16] = {};
    ::prctl(PR_GET_NAME, name);
    this->name(TextKind::thread, native_thread_id(), 0, name);
  }
  cursor.next = header_.taken.fetch_add(kBatch, std::memory_order_relaxed);
  cursor.end = cursor.next + kBatch;
  cursor.generation = generation_;
  note_clock();
  // A peak that the ring is about to forget.
  const std::uint64_t quarter = shape_.event_count / 4;
  if (cursor.next / quarter != cursor.end / quarter) write_holders();
}

// One thread at a time; others leave it to that one.
void Recording::write_holders() noexcept {
  if (writes_holders_.exchange(true, std::memory_order_acquire)) return;
  try {
    const std::uint64_t half = ~header_.holders.load(std::memory_order_relaxed) & 1;
    const std::int64_t peak = ledger_.peak_bytes();
    std::uint64_t count = 0;
    ledger_.for_each_holder([&](const HolderKey& who, const Usage& usage) {
      if (usage.at_peak_count <= 0 || count == kRecordedHolders) return;
      if (who.site >= sites_written_.load(std::memory_order_acquire)) write_sites(who.site);
      holders_[half * kRecordedHolders + count++] = {usage.at_peak_bytes, usage.at_peak_count, who.site, who.tag,
                                                     who.device,          who.framework,       who.kind, 0};
    });
    header_.holders_peak_bytes[half].store(peak, std::memory_order_relaxed);
    header_.holders.store(count << 1 | half, std::memory_order_release);
  } catch (const std::bad_alloc&) {
    // The half before it stays.
  }
  writes_holders_.store(false, std::memory_order_release);
}

// One thread at a time; others leave it to that one.
void Recording::note_clock() noexcept {
  std::uint32_t version = header_.clock_version.load(std::memory_order_relaxed);
  if ((version & 1) != 0 || !header_.clock_version.compare_exchange_strong(version, version + 1, std::memory_order_acquire))
    return;
  std::atomic_thread_fence(std::memory_order_release);
  header_.clock_order.store(order_now(), std::memory_order_relaxed);
  header_.clock_steady_ns.store(steady_time_ns(), std::memory_order_relaxed);
  header_.peak_bytes.store(ledger_.published_peak_bytes(), std::memory_order_relaxed);
  header_.clock_version.store(version + 2, std::memory_order_release);
}

RecordedBlock* Recording::block_at(Ledger::EntryId id, bool make) noexcept {
  const std::uint32_t slot = Ledger::slot_of(id);
  const std::uint32_t number = slot / kChunk;
  if (number < kChunksOfShard) [[likely]] {
    std::atomic<RecordedBlock*>& known = chunks_[id % Ledger::kShards][number];
    RecordedBlock* chunk = known.load(std::memory_order_acquire);
    if (chunk == nullptr && make) [[unlikely]] {
      std::scoped_lock lock(chunk_lock_);
      chunk = known.load(std::memory_order_acquire);
      const std::uint64_t used = header_.blocks_used.load(std::memory_order_relaxed);
      if (chunk == nullptr && used + kChunk <= shape_.block_count) {
        chunk = blocks_ + used;
        header_.blocks_used.store(used + kChunk, std::memory_order_release);
        known.store(chunk, std::memory_order_release);
      }
    }
    if (chunk != nullptr) [[likely]]
      return &chunk[slot % kChunk];
  }
  if (make) header_.blocks_lost.fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

void Recording::write_block(RecordedBlock& block, const HolderKey& who, const Entry& entry) noexcept {
  block.serial.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  block.ptr = entry.ptr;
  block.bytes = entry.bytes;
  block.stream = entry.stream;
  block.time_ns = entry.time_ns;
  block.site = who.site;
  block.tag = who.tag;
  block.thread = entry.thread;
  block.device = who.device;
  block.framework = who.framework;
  block.kind = who.kind;
  block.resized_count = entry.resized_count;
  block.serial.store(entry.serial, std::memory_order_release);
}

void Recording::add_live() noexcept {
  ledger_.for_each_held([&](Ledger::EntryId id, const Entry& entry, const HolderKey& who) {
    if (who.site >= sites_written_.load(std::memory_order_acquire)) write_sites(who.site);
    RecordedBlock* block = block_at(id, true);
    if (block != nullptr && block->serial.load(std::memory_order_acquire) != entry.serial) write_block(*block, who, entry);
  });
}

void Recording::write_sites(std::uint32_t last) noexcept {
  std::scoped_lock lock(text_lock_);
  std::uint32_t next = sites_written_.load(std::memory_order_relaxed);
  try {
    std::string file, function;
    for (; next <= last; ++next) {
      const Sites::Site site = sites_.at(next);
      to_utf8(site.file, file);
      to_utf8(site.function, function);
      RecordedText record{};
      record.kind = TextKind::site;
      record.id = next;
      record.line = site.line;
      record.file_bytes = static_cast<std::uint32_t>(file.size());
      record.via = site.via;
      record.flags = site.library ? kLibraryLine : 0;
      write_text(record, file, function);
      sites_written_.store(next + 1, std::memory_order_release);
    }
  } catch (const std::bad_alloc&) {
    header_.text_lost.fetch_add(1, std::memory_order_relaxed);
  }
}

void Recording::name(TextKind kind, std::uint32_t id, std::uint32_t outer, std::string_view text) noexcept {
  std::scoped_lock lock(text_lock_);
  RecordedText record{};
  record.kind = kind;
  record.id = id;
  record.outer = outer;
  write_text(record, text, {});
}

// Under the lock.
void Recording::write_text(const RecordedText& from, std::string_view text, std::string_view more) noexcept {
  const std::uint64_t used = header_.text_used.load(std::memory_order_relaxed);
  const std::uint64_t bytes = text.size() + more.size();
  if (bytes > std::numeric_limits<std::uint32_t>::max() || sizeof(RecordedText) + rounded(bytes) > shape_.text_bytes - used) {
    header_.text_lost.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  RecordedText record = from;
  record.bytes = static_cast<std::uint32_t>(bytes);
  char* out = text_ + used;
  std::memcpy(out, &record, sizeof record);
  std::memcpy(out + sizeof record, text.data(), text.size());
  std::memcpy(out + sizeof record + text.size(), more.data(), more.size());
  header_.text_used.store(used + sizeof record + rounded(bytes), std::memory_order_release);
}

void Recording::end() noexcept {
  add_live();
  write_holders();
  note_clock();
  header_.current_bytes.store(ledger_.current_bytes());
  header_.peak_bytes.store(ledger_.peak_bytes());
  header_.end_time_ns.store(coarse_time_ns());
  header_.ended.store(1);
  // Threads that are inside `add` keep an address to write to, and the file stays as it is. Where that fails, they write to the file.
  ::mmap(&header_, shape_.file_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace rmm_bridge
