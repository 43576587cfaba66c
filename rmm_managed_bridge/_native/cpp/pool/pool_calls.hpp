// Calls about one pool, or the ledger of all, that Cython cannot spell.
#pragma once

#include <memory>
#include <vector>

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

// Over an upstream of any kind; throws std::bad_alloc.
Heap* new_heap(Process* process, std::unique_ptr<Upstream> upstream, const Driver* driver, CUcontext context,
               const PoolOptions& options, int device, int kind, int track);
Heap* new_host_heap(Process* process, const PoolOptions& options, int kind, int track, int device,
                           bool ordered);
bool holds_stream(Heap* heap, CUstream stream);
bool hold_stream(Heap* heap, CUstream stream, void* owner);
std::vector<void*> owners(Heap* heap, std::vector<unsigned short>& lanes);
void* retire_lane(Heap* heap, unsigned short lane, bool last);
void copy_holders(Process* process, std::vector<HolderKey>& keys, std::vector<Usage>& usages);
void copy_entries(Process* process, std::vector<Entry>& entries);

}  // namespace rmm_bridge
