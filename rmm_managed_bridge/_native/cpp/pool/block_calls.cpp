#include "pool/block_calls.hpp"

namespace rmm_bridge {

std::uint32_t entry_of(Process* process, const void* ptr) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  return found.block == nullptr ? 0 : found.block->entry.load(std::memory_order_acquire);
}

namespace {

bool live(const TrackedPool::Found& found) { return found.block != nullptr && (found.block->flags.load() & Block::kLive) != 0; }

// A stream to be noted, also while it is being captured: that costs no call which could break the capture. 0, 2 or 3 of
// `record_stream_use`; 0 with a host stream where nothing has an order.
int resolve_use(Process* process, TrackedPool* pool, CUstream stream, bool lose_it, KnownStream& out) {
  if (!pool->acts() || !pool->resolve_for_free(stream, out)) return pool->ordered() ? 2 : 0;
  return out.key == StreamRef::kUnseenKey && !lose_it ? 3 : 0;
}

}  // namespace

bool live_block(Process* process, const void* ptr, LiveBlock& out) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (!live(found)) return false;
  auto* pool = static_cast<TrackedPool*>(found.span->pool);
  out = {pool, reinterpret_cast<std::uintptr_t>(found.start), found.span->block_bytes, pool->on_borrowed_lane(found.block)};
  return true;
}

bool holds_stream(TrackedPool* pool, CUstream stream) {
  KnownStream ref;
  return pool->resolve(stream, ref) != Refusal::none || pool->need_not_hold(ref);
}

TrackedPool* pool_of(Process* process, const void* ptr) { return TrackedPool::of(*process, ptr); }

int record_stream_use(Process* process, const void* ptr, CUstream stream, bool lose_it) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (!live(found)) return 1;
  auto* pool = static_cast<TrackedPool*>(found.span->pool);
  KnownStream ref;
  const int problem = resolve_use(process, pool, stream, lose_it, ref);
  if (problem == 0) pool->record_stream(found.block, static_cast<const char*>(found.start), ref);
  return problem;
}

bool order_block(Process* process, const void* ptr, CUstream stream, Refusal& refusal) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (!live(found)) return false;
  auto* pool = static_cast<TrackedPool*>(found.span->pool);
  KnownStream ref;
  refusal = pool->resolve(stream, ref);
  if (refusal == Refusal::none) refusal = pool->order(found.block, static_cast<const char*>(found.start), ref);
  return true;
}

Refusal synchronize_block(Process* process, const void* ptr) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (found.block == nullptr || !TrackedPool::acts_on(*process, found)) return Refusal::none;
  return static_cast<TrackedPool*>(found.span->pool)->synchronize(found.block, static_cast<const char*>(found.start));
}

HandedOver hand_over(Process* process, const void* ptr, const HandOver& what, Refusal& refusal) {
  const TrackedPool::Found found = TrackedPool::find(*process, ptr);
  if (!live(found)) return HandedOver::not_live;
  auto* pool = static_cast<TrackedPool*>(found.span->pool);
  const auto* start = static_cast<const char*>(found.start);
  if (what.cpu && pool->inherited()) return HandedOver::done;  // no device works on what a forked child has
  KnownStream used, user;
  refusal = what.user == nullptr ? Refusal::none : pool->resolve(*what.user, user);
  if (refusal != Refusal::none) return HandedOver::refused;
  const int problem = what.used == nullptr ? 0 : resolve_use(process, pool, *what.used, false, used);
  if (problem != 0) return problem == 2 ? HandedOver::used_unknown : HandedOver::used_capturing;
  if (!what.any_stream) {
    if (!pool->need_not_hold(used)) return HandedOver::used_not_held;
    if (!pool->need_not_hold(user)) return HandedOver::user_not_held;
  }
  pool->record_stream(found.block, start, used);  // a host stream is nothing to note
  if (what.cpu && pool->acts()) {
    const std::uint8_t flags = found.block->flags.load(std::memory_order_relaxed);
    if (found.span->side == Side::gpu && (flags & Block::kOnCpu) == 0) Pool::mark(*process, found.block, Block::kOnCpu);
    refusal = pool->synchronize(found.block, start);
  }
  if (what.user != nullptr) refusal = pool->order(found.block, start, user);
  return refusal == Refusal::none ? HandedOver::done : HandedOver::refused;
}

Freed free_block(Process* process, void* ptr, std::uint64_t stated, bool has_stream, CUstream stream, const Provenance& who) {
  if (ptr == nullptr) return Freed::done;
  return TrackedPool::deallocate_in_place(*process, TrackedPool::find(*process, ptr), ptr, stated, has_stream ? &stream : nullptr,
                                          who);
}

bool pointer_attribute(Process* process, std::uintptr_t ptr, int which, int device, std::uint64_t& value) {
  Driver& driver = process->driver;
  if (!driver.loaded || !process->running() || device >= driver.devices) return false;
  CUcontext context = nullptr;
  if (device >= 0) {
    unsigned flags;
    int active = 0;
    if (driver.primary_state(device, &flags, &active) != CUDA_SUCCESS || active == 0) return false;
    if (driver.primary_retain(&context, device) != CUDA_SUCCESS) return false;  // never released: blocks may need it
  }
  DriverScope scope(&driver, context);
  value = 0;
  return driver.pointer_attribute(&value, static_cast<CUpointer_attribute>(which), ptr) == CUDA_SUCCESS;
}

bool reaches(Process* process, std::uintptr_t ptr, int device) {
  std::uint64_t found = 0;
  if (!pointer_attribute(process, ptr, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, -1, found) || found == 0) {
    return pointer_attribute(process, ptr, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, device, found);
  }
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return process->driver.mem_pool_access(&flags, reinterpret_cast<CUmemoryPool>(found), &location) == CUDA_SUCCESS &&
         flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

int current_device_of(Process* process) {
  CUdevice device = -1;
  if (!process->driver.loaded || process->driver.ctx_device(&device) != CUDA_SUCCESS) return -1;
  return device;
}

}  // namespace rmm_bridge
