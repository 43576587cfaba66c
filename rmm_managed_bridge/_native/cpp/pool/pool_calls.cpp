#include "pool/pool_calls.hpp"

namespace rmm_bridge {

Process* new_process() { return new Process(); }

TrackedPool* new_pool(Process* process, std::unique_ptr<Upstream> upstream, const Driver* driver, CUcontext context,
                      const PoolOptions& options, int device, int kind, int track) {
  // What a child does not inherit is copied before a fork, and must not go back meanwhile.
  if (kind == kManagedKind) upstream = std::make_unique<GatedUpstream>(std::move(upstream), process->forks.gate);
  return new TrackedPool(*process, std::move(upstream), driver, context, options, device, static_cast<std::uint8_t>(kind),
                         static_cast<Track>(track));
}

TrackedPool* new_host_pool(Process* process, const PoolOptions& options, int kind, int track, int device, bool ordered) {
  CUcontext context = nullptr;
  if (ordered && process->driver.primary_retain(&context, device) != CUDA_SUCCESS) throw std::bad_alloc();
  std::unique_ptr<Upstream> upstream;
  if (options.debug) {
    upstream = std::make_unique<MallocUpstream>();
  } else {
    upstream = std::make_unique<HostUpstream>(!ordered);
  }
  return new_pool(process, std::move(upstream), ordered ? &process->driver : nullptr, context, options, device, kind, track);
}

bool hold_stream(TrackedPool* pool, CUstream stream, void* owner) {
  KnownStream ref;
  if (pool->resolve(stream, ref) != Refusal::none || ref.host() || ref.legacy()) return false;
  return pool->hold(ref, owner);
}

std::vector<void*> owners(TrackedPool* pool, std::vector<unsigned short>& lanes) {
  std::vector<void*> held;
  for (const Pool::Held& each : pool->owners()) {
    lanes.push_back(each.lane);
    held.push_back(each.owner);
  }
  return held;
}

bool owns_lane(TrackedPool* pool, unsigned short lane, const void* owner) { return pool->owned_by(lane, owner); }

void* retire_lane(TrackedPool* pool, unsigned short lane, void* owner, bool last) {
  pool->close_lane(lane, &owner, last);
  return owner;
}

void copy_holders(Process* process, std::vector<HolderKey>& keys, std::vector<Usage>& usages) {
  process->ledger.for_each_holder([&](const HolderKey& key, const Usage& usage) {
    keys.push_back(key);
    usages.push_back(usage);
  });
}

void copy_entries(Process* process, std::vector<Entry>& entries) {
  process->ledger.for_each([&](const Entry& entry) { entries.push_back(entry); });
}

Recording* map_recording(Process* process, int file, const Recording::Shape& shape) {
  return Recording::map(file, shape, process->ledger, process->sites);
}

}  // namespace rmm_bridge
