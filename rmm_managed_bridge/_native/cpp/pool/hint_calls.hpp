// Hints of live blocks, and the scope in which driver calls made from Python are made as native code makes them.
#pragma once

#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

bool note_advice(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high, std::uint8_t advice,
                 std::uint64_t accessors);
bool note_placement(Process* process, const void* ptr, std::int16_t placement);
void take_back_advice(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high, std::uint8_t advice,
                      std::uint64_t accessors);
Hinted hints_of(Process* process, const void* ptr);
// How many live blocks other than the one at `ptr` have bytes in [low, high), which are whole pages around bytes of that
// block. Spans are whole granules, which are whole pages, so only blocks of the same slab can.
std::size_t count_sharing(Process* process, const void* ptr, std::uintptr_t low, std::uintptr_t high);

// What the stream is now, seen by the pool of `ptr`: good, capturing, or unknown to the driver.
Refusal stream_state(Process* process, const void* ptr, CUstream stream);

// The pool's context made current and the capture mode relaxed, as for all our own calls; null without a driver.
DriverScope* open_scope(Process* process, const void* ptr);

void set_least_hinted(Process* process, std::size_t bytes);
void set_least_prefetched(Process* process, std::size_t bytes);
std::uint64_t take_count(Process* process, int outcome);

}  // namespace rmm_bridge
