// Allocate-and-free pairs from C++ threads through an RMM resource, one stream each: what RMM's users in C++ see.
#include <cuda_runtime_api.h>

#include <rmm/aligned.hpp>
#include <rmm/mr/per_device_resource.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

// Nanoseconds a pair and thread, on the resource that is RMM's current one for device 0. `streams` are handles.
extern "C" double bench_pairs(int threads, long pairs, std::size_t bytes, const std::uintptr_t* streams) {
  auto resource = rmm::mr::get_per_device_resource_ref(rmm::cuda_device_id{0});
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> workers;
  for (int index = 0; index < threads; ++index) {
    workers.emplace_back([&, index] {
      cuda::stream_ref stream{reinterpret_cast<cudaStream_t>(streams[index])};
      for (int warm = 0; warm < 100; ++warm) {
        resource.deallocate(stream, resource.allocate(stream, bytes, rmm::CUDA_ALLOCATION_ALIGNMENT), bytes,
                            rmm::CUDA_ALLOCATION_ALIGNMENT);
      }
      ready.fetch_add(1);
      while (!go.load()) {
      }
      for (long pair = 0; pair < pairs; ++pair) {
        void* ptr = resource.allocate(stream, bytes, rmm::CUDA_ALLOCATION_ALIGNMENT);
        resource.deallocate(stream, ptr, bytes, rmm::CUDA_ALLOCATION_ALIGNMENT);
      }
    });
  }
  while (ready.load() != threads) {
  }
  const auto start = std::chrono::steady_clock::now();
  go.store(true);
  for (auto& worker : workers) worker.join();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  return took.count() / static_cast<double>(pairs);
}
