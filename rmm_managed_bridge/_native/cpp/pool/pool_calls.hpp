// Calls about one pool, or the ledger of all, that Cython cannot spell.
#pragma once

#include <memory>
#include <vector>

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

Process* new_process();

// Over an upstream of any kind; throws std::bad_alloc.
TrackedPool* new_pool(Process* process, std::unique_ptr<Upstream> upstream, const Driver* driver, CUcontext context,
                      const PoolOptions& options, int device, int kind, int track);
TrackedPool* new_host_pool(Process* process, const PoolOptions& options, int kind, int track, int device, bool ordered);
bool hold_stream(TrackedPool* pool, CUstream stream, void* owner);
std::vector<void*> owners(TrackedPool* pool, std::vector<unsigned short>& lanes);
// Whether the pool keeps `owner` for the lane, which may be another stream's by now.
bool owns_lane(TrackedPool* pool, unsigned short lane, const void* owner);
// What to drop: `owner`, or null if it is kept.
void* retire_lane(TrackedPool* pool, unsigned short lane, void* owner, bool last);
void copy_holders(Process* process, std::vector<HolderKey>& keys, std::vector<Usage>& usages);
void copy_entries(Process* process, std::vector<Entry>& entries);
Recording* map_recording(Process* process, int file, const Recording::Shape& shape);

}  // namespace rmm_bridge
