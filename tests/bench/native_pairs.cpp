// Allocate-and-free pairs straight on a host pool: the hot path without Python and without CUDA.
//   native_pairs THREADS PAIRS off|counters|recorded
#include <fcntl.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "pool/tracked_pool.hpp"

using namespace rmm_bridge;

namespace {

// Into a file that is gone when the program ends.
void record(Process& process) {
  const Recording::Shape shape{1 << 20, 1 << 16, 1 << 20};
  char path[] = "/tmp/native_pairs.XXXXXX";
  const int file = mkstemp(path);
  if (file < 0 || posix_fallocate(file, 0, static_cast<off_t>(shape.file_bytes())) != 0) std::exit(3);
  unlink(path);
  process.begin_recording(Recording::map(file, shape, process.ledger, process.sites));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int threads = std::atoi(argv[1]);
  const long pairs = std::atol(argv[2]);
  auto& process = *new Process();
  auto& pool = *new TrackedPool(process, std::make_unique<HostUpstream>(), nullptr, nullptr, PoolOptions{}, -1, 0,
                                std::strcmp(argv[3], "off") == 0 ? Track::off : Track::counters);
  if (std::strcmp(argv[3], "recorded") == 0) record(process);
  const auto work = [&] {
    Request request;
    request.bytes = 1024;
    request.alignment = 64;
    Refusal refusal;
    for (long pair = 0; pair < pairs; ++pair) {
      void* ptr = pool.allocate_in_place(request, refusal);
      TrackedPool::deallocate_in_place(process, TrackedPool::find(process, ptr), ptr, 1024, nullptr, {});
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int index = 1; index < threads; ++index) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  std::printf("%.2f\n", took.count() / static_cast<double>(pairs));
}
