// TrackedPool, the part about hints: what is asked of the driver when a block is made, and taken back when it ends.
#include "pool/hint_calls.hpp"

#include <unistd.h>

#include <algorithm>

namespace rmm_bridge {

namespace {

// Calls `note` with the start of the live block at `ptr`, to write something into the table of hints that ends with the block.
// False if no block lives there. May throw std::bad_alloc, as `note` may.
template <typename Note>
bool note_hint(Process& process, const void* ptr, Note note) {
  const TrackedPool::Found found = TrackedPool::find(process, ptr);
  if (found.block == nullptr || (found.block->flags.load() & Block::kLive) == 0) return false;
  const auto start = reinterpret_cast<std::uintptr_t>(found.start);
  note(start);
  if (Pool::mark(process, found.block, Block::kHinted)) return true;
  process.hints.end(start);
  return false;
}

}  // namespace

void TrackedPool::prefetch_new(void* ptr, std::size_t bytes, CUstream stream) noexcept {
  if (ptr == nullptr || KeepGil::kept()) return;
  const WithoutGil without(process());
  process().new_blocks.counts[try_prefetch(ptr, bytes, stream)].fetch_add(1, std::memory_order_relaxed);
}

NewBlocks::Outcome TrackedPool::try_prefetch(void* ptr, std::size_t bytes, CUstream stream) noexcept {
  if (kind_ == kHostKind) return NewBlocks::host;
  if (kind_ != kManagedKind || !ordered()) return NewBlocks::not_managed;
  if (options().device_wait) return NewBlocks::no_concurrent_access;
  const Driver& driver = process().driver;
  std::size_t memory = 0;
  if (driver.device_memory(&memory, device_) == CUDA_SUCCESS && bytes > memory) return NewBlocks::larger_than_device;
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<std::uintptr_t>(ptr);
  const std::uintptr_t low = start / page * page, high = (start + bytes + page - 1) / page * page;
  CUmemLocation here{};
  here.type = CU_MEM_LOCATION_TYPE_DEVICE;
  here.id = device_;
  {
    DriverScope scope(&driver, events()->context());
    // `allocate` does not ask about the legacy stream, which a capture of any blocking stream bars.
    if (events()->capture_status(stream) != CU_STREAM_CAPTURE_STATUS_NONE) return NewBlocks::capturing;
    if (driver.mem_prefetch(low, high - low, here, 0, stream) != CUDA_SUCCESS) return NewBlocks::refused;
  }
  try {
    note_hint(process(), ptr, [&](std::uintptr_t block) { process().hints.place(block, device_); });
  } catch (const std::bad_alloc&) {  // then nobody can tell where the block was asked to be
  }
  return NewBlocks::done;
}

// The pages are the caller's, and nobody else's yet. It needs no order to be right: no stream waits for it, least of all one that is
// being captured, and work that comes first takes the faults that this would have spared.
void TrackedPool::populate(const FreshPages& fresh) noexcept {
  if (fresh.bytes == 0 || !acts() || KeepGil::kept()) return;
  WithoutGil without(process());
  const Driver& driver = process().driver;
  DriverScope scope(&driver, events()->context());
  std::size_t free_bytes = 0, total_bytes = 0;
  if (driver.memory_info(&free_bytes, &total_bytes) != CUDA_SUCCESS) return;
  // A card that is nearly full would throw out what others have there.
  if (free_bytes < fresh.bytes + total_bytes / 10) return;
  std::atomic<CUstream>& slot = process().populating[static_cast<std::size_t>(device_)];
  CUstream stream = slot.load();
  if (stream == nullptr) {
    if (driver.stream_create(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return;
    CUstream first = nullptr;
    if (!slot.compare_exchange_strong(first, stream)) stream = first;  // the other one is lost: two threads began at once
  }
  CUmemLocation here{};
  here.type = CU_MEM_LOCATION_TYPE_DEVICE;
  here.id = device_;
  if (driver.mem_prefetch(reinterpret_cast<CUdeviceptr>(fresh.base), fresh.bytes, here, 0, stream) != CUDA_SUCCESS) return;
  process().populated.fetch_add(1, std::memory_order_relaxed);
  process().populated_bytes.fetch_add(fresh.bytes, std::memory_order_relaxed);
}

// The block is nobody's, and nobody may have it yet: its next owner inherits no advice. Does not wait for the device.
// A call that the driver refuses leaves the advice: it changes speed, never contents.
void TrackedPool::end_hints(void* ptr) noexcept {
  const Hinted ended = process().hints.end(reinterpret_cast<std::uintptr_t>(ptr));
  // From a host function the driver takes no advice: what was given stays on the pages.
  if (ended.low == ended.high || events() == nullptr || in_host_function()) return;
  const Driver& driver = process().driver;
  DriverScope scope(&driver, events()->context());
  auto undo = [&](CUmem_advise advice, int place) {
    CUmemLocation location{};
    location.type = place < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = std::max(place, 0);
    driver.mem_advise(ended.low, ended.high - ended.low, advice, location);
  };
  if ((ended.advice & Hinted::kReadMostly) != 0) undo(CU_MEM_ADVISE_UNSET_READ_MOSTLY, -1);
  if ((ended.advice & Hinted::kPreferred) != 0) undo(CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, -1);
  for (unsigned bit = 0; bit <= Hinted::kCpuBit; ++bit) {
    if ((ended.accessors >> bit & 1) == 0) continue;
    undo(CU_MEM_ADVISE_UNSET_ACCESSED_BY, bit == Hinted::kCpuBit ? -1 : static_cast<int>(bit));
  }
}

bool note_advice(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high, std::uint8_t advice,
                 std::uint64_t accessors) {
  return note_hint(*process, ptr, [&](std::uintptr_t start) { process->hints.advise(start, low, high, advice, accessors); });
}

bool note_placement(Process* process, const void* ptr, std::int16_t placement) {
  return note_hint(*process, ptr, [&](std::uintptr_t start) { process->hints.place(start, placement); });
}

void take_back_advice(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high, std::uint8_t advice,
                      std::uint64_t accessors) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (found.block == nullptr) return;
  process->hints.take_back(reinterpret_cast<std::uintptr_t>(found.start), low, high, advice, accessors);
}

Hinted hints_of(Process* process, const void* ptr) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (found.block == nullptr || (found.block->flags.load() & Block::kHinted) == 0) return {};
  return process->hints.read(reinterpret_cast<std::uintptr_t>(found.start));
}

std::size_t count_sharing(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (found.block == nullptr || found.span->block_count == 1) return 0;
  const auto base = reinterpret_cast<std::uintptr_t>(found.span->base);
  Block* blocks = found.span->blocks.load(std::memory_order_acquire);
  const std::uint32_t own = found.span->index_of(ptr);
  const std::uint32_t last = std::min(found.span->index_of(reinterpret_cast<const void*>(high - 1)), found.span->block_count - 1);
  std::size_t count = 0;
  for (std::uint32_t index = found.span->index_of(reinterpret_cast<const void*>(std::max(low, base))); index <= last; ++index) {
    if (index != own && (blocks[index].flags.load() & Block::kLive) != 0) ++count;
  }
  return count;
}

Refusal stream_state(Process* process, const void* ptr, CUstream stream) {
  TrackedPool* pool = TrackedPool::of(*process, ptr);
  if (pool == nullptr || !pool->ordered() || !pool->acts()) return Refusal::bad_stream;
  DriverScope scope(&process->driver, pool->events()->context());
  if (pool->events()->capture_status(stream) != CU_STREAM_CAPTURE_STATUS_NONE) return Refusal::capturing;
  KnownStream ref;
  return pool->resolve(stream, ref);
}

DriverScope* open_scope(Process* process, const void* ptr) {
  TrackedPool* pool = TrackedPool::of(*process, ptr);
  if (pool == nullptr || !pool->ordered() || !pool->acts()) return nullptr;
  return new DriverScope(&process->driver, pool->events()->context());
}

void set_least_hinted(Process* process, std::size_t bytes) { process->least_hinted_bytes.store(bytes); }

void set_least_prefetched(Process* process, std::size_t bytes) { process->new_blocks.least_bytes.store(bytes); }

std::uint64_t take_count(Process* process, int outcome) { return process->new_blocks.counts[outcome].exchange(0); }

}  // namespace rmm_bridge
