// Calls about a block that is known by an address only: what lies there, and the device work that may touch it.
#pragma once

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

std::uint32_t entry_of(Process* process, const void* ptr);

// What is known of the live block that an address lies in.
struct LiveBlock {
  TrackedPool* pool;
  std::uintptr_t start;
  std::size_t bytes;
  bool borrowed;  // it was made on a stream whose object nobody holds
};
bool live_block(Process* process, const void* ptr, LiveBlock& out);
TrackedPool* pool_of(Process* process, const void* ptr);

// Whether the pool holds the stream's object, or need not; true also for a stream that it cannot know.
bool holds_stream(TrackedPool* pool, CUstream stream);

// 0: done; 1: no live block there; 2: the driver does not know the stream; 3: it is being captured and not known from before,
// unless `lose_it`: then the block is done with when it is freed.
int record_stream_use(Process* process, const void* ptr, CUstream stream, bool lose_it = false);
bool order_block(Process* process, const void* ptr, CUstream stream, Refusal& refusal);
Refusal synchronize_block(Process* process, const void* ptr);

// A hand-over of a block: the streams are handles, null where none is named.
struct HandOver {
  const CUstream* used;  // the framework that has the block is on it now
  const CUstream* user;  // it shall come after all work on the block
  bool cpu;              // the CPU shall: the call waits, without the GIL
  bool any_stream;       // also with streams that nobody holds
};
enum class HandedOver : std::uint8_t { done, not_live, used_not_held, user_not_held, used_unknown, used_capturing, refused };

// Notes and orders, in one look at the block. Of `used_not_held` and `user_not_held` it is told before anything is done, so that the
// caller may hold the stream's object and ask again. `refusal` is the reason of `refused`: what was noted by then stays, which only
// makes the block wait longer.
HandedOver hand_over(Process* process, const void* ptr, const HandOver& what, Refusal& refusal);
Freed free_block(Process* process, void* ptr, std::uint64_t stated, bool has_stream, CUstream stream, const Provenance& who);

// What the driver says of an address, as `device` sees it (-1: any); false if it knows nothing of it. Makes no context:
// a device without one can have been given access to nothing. Harmless during captures, and touches no data.
bool pointer_attribute(Process* process, std::uintptr_t ptr, int which, int device, std::uint64_t& value);

// Whether a device may read and write memory of another one that is not managed: what peer access, or the memory pool that `ptr`
// is from, says now. Not CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, which says yes whatever is set (docs/design/measured.md).
bool reaches(Process* process, std::uintptr_t ptr, int device);
int current_device_of(Process* process);

}  // namespace rmm_bridge
