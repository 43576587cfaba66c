// What `core` needs in C++: hooks between the process and the interpreter, and small calls that Cython cannot spell.
#pragma once

#include <Python.h>
#include <pthread.h>

#include "entry/call_site.hpp"
#include "pool/tracked_pool.hpp"

namespace rmm_bridge {

inline Process* hooked_process = nullptr;
inline void (*closed_callback)() = nullptr;
inline void (*notice_callback)() = nullptr;
inline bool (*relieve_callback)(std::size_t, int, bool) = nullptr;

inline void* release_gil() {
  // During shutdown a thread that lets go of the GIL may never get it back.
  if (hooked_process->exiting() || !PyGILState_Check()) return nullptr;
  return PyEval_SaveThread();
}

inline void restore_gil(void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }

// `Callback` on the main thread, between two of its instructions: soon on Python 3.13; before that, when the main thread
// takes the GIL the next time, which may be never (CPython's COMPUTE_EVAL_BREAKER looks at the thread that asks:
// Python/ceval_gil.c). So whoever reports on what the callback does must do it first.
template <auto& Callback>
inline void call_soon() {
  Py_AddPendingCall(
      [](void*) {
        Callback();
        return 0;
      },
      nullptr);
}

inline bool relieve(std::size_t bytes, int attempt, bool may_collect) {
  if (!PyGILState_Check()) return false;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const bool again = relieve_callback(bytes, attempt, may_collect);
  PyErr_Restore(type, value, traceback);
  return again;
}

inline void install_hooks(Process* process, void (*closed)(), void (*notice)(), bool (*relieve_python)(std::size_t, int, bool)) {
  hooked_process = process;
  closed_callback = closed;
  notice_callback = notice;
  relieve_callback = relieve_python;
  process->release_gil = release_gil;
  process->restore_gil = restore_gil;
  process->on_closed = call_soon<closed_callback>;
  process->on_notice = call_soon<notice_callback>;
  process->relieve = relieve;
  // A child shares our pages but not our threads. Python's own at-fork hooks would miss forks made by native code.
  pthread_atfork([] { hooked_process->lock_for_fork(); }, [] { hooked_process->unlock_after_fork(); },
                 [] {
                   hooked_process->unlock_after_fork();
                   // Without a pool there is nothing of the parent's to keep clear of: the child may start its own.
                   if (hooked_process->has_pools() || hooked_process->driver.loaded) {
                     hooked_process->enter(Phase::forked);
                   }
                 });
}

inline void set_phase(Process* process, int phase) { process->enter(static_cast<Phase>(phase)); }
inline int phase_of(Process* process) { return static_cast<int>(process->phase()); }
inline void record_all_events(Process* process, bool on) { process->record_all_events(on); }
inline std::uint64_t foreign_frees(Process* process) { return process->foreign_frees.load(); }
inline std::uint64_t size_mismatches(Process* process) { return process->size_mismatches.load(); }
inline std::uint64_t failures(Process* process) { return process->failures.load(); }
inline void wake_keeper(Process* process) { process->keeper.wake(); }
// The keeper may be giving memory back to an upstream in Python, which needs the GIL: call it without.
inline void stop_keeper(Process* process) { process->keeper.stop(std::chrono::seconds(5)); }
inline std::uint64_t damaged_blocks(Process* process) { return process->notices.damaged_count(); }
inline std::int64_t advised_bytes(Process* process) { return process->hugepages.advised_bytes.load(); }
inline std::uint64_t advice_calls(Process* process) { return process->hugepages.calls.load(); }
inline std::uint64_t advice_failures(Process* process) { return process->hugepages.failures.load(); }

// Asks this function instead of the kernel, for tests; null: the kernel again.
inline void replace_madvise(Process* process, std::uintptr_t function) {
  process->hugepages.function.store(function == 0 ? ::madvise : reinterpret_cast<HugepageAdvice::Function>(function));
}

inline constexpr std::uint64_t unstated = Heap::kUnstated;

inline void copy_holders(Process* process, std::vector<HolderKey>& keys, std::vector<Usage>& usages) {
  process->ledger.for_each_holder([&](const HolderKey& key, const Usage& usage) {
    keys.push_back(key);
    usages.push_back(usage);
  });
}

inline void copy_entries(Process* process, std::vector<Entry>& entries) {
  process->ledger.for_each([&](const Entry& entry) { entries.push_back(entry); });
}

inline std::uint32_t entry_of(Process* process, const void* ptr) {
  const Heap::Found found = Heap::find(*process, ptr);
  return found.block == nullptr ? 0 : found.block->entry.load(std::memory_order_acquire);
}

inline bool live_block(Process* process, const void* ptr, std::uintptr_t& start, std::size_t& bytes) {
  const Heap::Found found = Heap::find(*process, ptr);
  if (found.block == nullptr || (found.block->flags.load() & Block::kLive) == 0) return false;
  start = reinterpret_cast<std::uintptr_t>(found.start);
  bytes = found.span->block_bytes;
  return true;
}

inline Heap* heap_of(Process* process, const void* ptr) { return Heap::of(*process, ptr); }

// 0: done; 1: no live block there; 2: the driver does not know the stream; 3: it is being captured and not known from before,
// unless `lose_it`: then the block is done with when it is freed.
inline int expose_block(Process* process, const void* ptr, CUstream stream, bool lose_it = false) {
  const Heap::Found found = Heap::find(*process, ptr);
  if (found.block == nullptr || (found.block->flags.load() & Block::kLive) == 0) return 1;
  auto* heap = static_cast<Heap*>(found.span->pool);
  StreamRef ref;
  // Also while the stream is being captured: the note costs no call that could break that.
  if (!process->running() || !heap->resolve_for_free(stream, ref)) return heap->ordered() ? 2 : 0;
  if (ref.key == StreamRef::kUnseenKey && !lose_it) return 3;
  heap->expose(found.block, static_cast<const char*>(found.start), ref);
  return 0;
}

inline bool order_block(Process* process, const void* ptr, CUstream stream, Refusal& refusal) {
  const Heap::Found found = Heap::find(*process, ptr);
  if (found.block == nullptr || (found.block->flags.load() & Block::kLive) == 0) return false;
  auto* heap = static_cast<Heap*>(found.span->pool);
  StreamRef ref;
  refusal = heap->resolve(stream, ref);
  if (refusal == Refusal::none) refusal = heap->order(found.block, static_cast<const char*>(found.start), ref);
  return true;
}

// What the driver says of an address, as `device` sees it (-1: any); false if it knows nothing of it. Makes no context:
// a device without one can have been given access to nothing. Harmless during captures, and touches no data.
inline bool pointer_attribute(Process* process, std::uintptr_t ptr, int which, int device, std::uint64_t& value) {
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

// Whether a device may read and write memory of another one that is not managed: what peer access, or the memory pool that `ptr`
// is from, says now. Not CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, which says yes whatever is set (docs/design/measured.md).
inline bool reaches(Process* process, std::uintptr_t ptr, int device) {
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

inline int current_device_of(Process* process) {
  CUdevice device = -1;
  if (!process->driver.loaded || process->driver.ctx_device(&device) != CUDA_SUCCESS) return -1;
  return device;
}

inline Refusal synchronize_block(Process* process, const void* ptr) {
  const Heap::Found found = Heap::find(*process, ptr);
  if (found.block == nullptr || !process->running()) return Refusal::none;
  return static_cast<Heap*>(found.span->pool)->synchronize(found.block, static_cast<const char*>(found.start));
}

inline Freed free_block(Process* process, void* ptr, std::uint64_t stated, bool has_stream, CUstream stream,
                        const Provenance& who) {
  return Heap::deallocate(*process, ptr, stated, has_stream ? &stream : nullptr, who);
}

inline bool holds_stream(Heap* heap, CUstream stream) {
  StreamRef ref;
  return heap->resolve(stream, ref) != Refusal::none || ref.host() || ref.legacy() ||
         ref.handle == CU_STREAM_PER_THREAD || heap->holds(ref);
}

inline bool adopt_stream(Heap* heap, CUstream stream, void* owner) {
  StreamRef ref;
  if (heap->resolve(stream, ref) != Refusal::none || ref.host() || ref.legacy()) return false;
  return heap->adopt(ref, owner);
}

inline std::vector<void*> owners(Heap* heap, std::vector<unsigned short>& lanes) {
  std::vector<void*> held;
  for (const Pool::Owned& owned : heap->owners()) {
    lanes.push_back(owned.lane);
    held.push_back(owned.owner);
  }
  return held;
}

inline void* retire_lane(Heap* heap, unsigned short lane, bool last) {
  void* owner = nullptr;
  heap->close_lane(lane, &owner, last);
  return owner;
}

// What a pool stood on may free managed memory as it goes, on a thread that is in the midst of somebody's capture.
inline void drop_relaxed(Process* process, PyObject* object) {
  const DriverScope scope(process->driver.loaded ? &process->driver : nullptr, nullptr);
  Py_DECREF(object);
}

inline Heap* new_host_heap(Process* process, const PoolOptions& options, int kind, int track, int device,
                           bool ordered) {
  CUcontext context = nullptr;
  if (ordered && process->driver.primary_retain(&context, device) != CUDA_SUCCESS) throw std::bad_alloc();
  std::unique_ptr<Upstream> upstream;
  if (options.alone) {
    upstream = std::make_unique<MallocUpstream>();
  } else {
    upstream = std::make_unique<HostUpstream>();
  }
  return new Heap(*process, std::move(upstream), ordered ? &process->driver : nullptr, context, options, device, static_cast<std::uint8_t>(kind),
                  static_cast<Track>(track));
}

inline Origin* new_origin(Process* process, PyObject* tag_variable) {
  auto* origin = new Origin(process);
  Py_INCREF(tag_variable);
  origin->tag_variable = tag_variable;
  return origin;
}

inline void set_internal(Origin* origin, std::vector<std::string> prefixes) {
  origin->sites.set_internal(std::move(prefixes));
}

inline void site_parts(Origin* origin, std::uint32_t site, PyObject** code, int* line) {
  const Site& found = origin->sites.at(site);
  *code = reinterpret_cast<PyObject*>(found.code);
  *line = found.line;
}

}  // namespace rmm_bridge
