// Calls about a block that is known by an address only: what lies there, and the device work that may touch it.
#pragma once

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

std::uint32_t entry_of(Process* process, const void* ptr);
bool live_block(Process* process, const void* ptr, std::uintptr_t& start, std::size_t& bytes);
TrackedPool* pool_of(Process* process, const void* ptr);

// 0: done; 1: no live block there; 2: the driver does not know the stream; 3: it is being captured and not known from before,
// unless `lose_it`: then the block is done with when it is freed.
int record_stream_use(Process* process, const void* ptr, CUstream stream, bool lose_it = false);
bool order_block(Process* process, const void* ptr, CUstream stream, Refusal& refusal);
Refusal synchronize_block(Process* process, const void* ptr);
Freed free_block(Process* process, void* ptr, std::uint64_t stated, bool has_stream, CUstream stream, const Provenance& who);

// What the driver says of an address, as `device` sees it (-1: any); false if it knows nothing of it. Makes no context:
// a device without one can have been given access to nothing. Harmless during captures, and touches no data.
bool pointer_attribute(Process* process, std::uintptr_t ptr, int which, int device, std::uint64_t& value);

// Whether a device may read and write memory of another one that is not managed: what peer access, or the memory pool that `ptr`
// is from, says now. Not CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, which says yes whatever is set (docs/design/measured.md).
bool reaches(Process* process, std::uintptr_t ptr, int device);
int current_device_of(Process* process);

}  // namespace rmm_bridge
