// C++ that uses the resource as RMM's C++ users do: from threads that Python knows nothing of, in stream order and with
// the synchronous pair.
#include <rmm/aligned.hpp>
#include <rmm/mr/per_device_resource.hpp>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace {
auto resource_of(int device) { return rmm::mr::get_per_device_resource_ref(rmm::cuda_device_id{device}); }
}  // namespace

// Returns how many blocks were handed out; each is written and checked. Blocks of one thread are freed by the next.
extern "C" long use_from_threads(int threads, long steps) {
  auto resource = resource_of(0);
  std::atomic<long> count{0};
  std::vector<std::atomic<std::uint64_t*>> handed(threads);
  std::vector<std::thread> workers;
  for (int index = 0; index < threads; ++index) {
    workers.emplace_back([&, index] {
      cuda::stream_ref stream{cudaStream_t{nullptr}};
      for (long step = 0; step < steps; ++step) {
        auto* block = static_cast<std::uint64_t*>(resource.allocate(stream, 1024, rmm::CUDA_ALLOCATION_ALIGNMENT));
        block[0] = block[127] = reinterpret_cast<std::uintptr_t>(block);
        ++count;
        std::uint64_t* other = handed[(index + 1) % threads].exchange(block);
        if (other == nullptr) continue;
        if (other[0] != reinterpret_cast<std::uintptr_t>(other) || other[127] != other[0]) count = -1'000'000'000;
        resource.deallocate(stream, other, 1024, rmm::CUDA_ALLOCATION_ALIGNMENT);
      }
    });
  }
  for (auto& worker : workers) worker.join();
  for (auto& last : handed) {
    if (auto* block = last.load()) resource.deallocate(cuda::stream_ref{cudaStream_t{nullptr}}, block, 1024, 256);
  }
  return count;
}

extern "C" void* allocate_sync(std::size_t bytes, std::size_t alignment) {
  return resource_of(0).allocate_sync(bytes, alignment);
}

extern "C" void deallocate_sync(void* ptr, std::size_t bytes, std::size_t alignment) {
  resource_of(0).deallocate_sync(ptr, bytes, alignment);
}
