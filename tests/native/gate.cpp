// gate.hpp alone: threads that pass all the time, and the end of what is behind it.
//   gate ROUNDS
#include "base/gate.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

using namespace rmm_bridge;

namespace {

std::atomic<int> problems{0};

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s\n", what);
  ++problems;
}

// What is behind it is freed once it is closed, as an interpreter's frames are. Threads come and go meanwhile.
void nobody_is_inside_once_it_is_closed(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    Gate gate;
    auto behind = std::make_unique<std::vector<int>>(100, 7);
    int* const data = behind->data();
    std::atomic<int> passed{0};
    std::atomic<bool> closed{false};
    std::vector<std::thread> threads;
    for (int each = 0; each < 3; ++each) {
      threads.emplace_back([&] {
        while (!closed.load()) {
          Gate::Flag flag;
          gate.add(flag);
          for (int turn = 0; turn < 1000 && gate.enter(flag); ++turn) {
            int sum = 0;
            for (int index = 0; index < 100; ++index) sum += *const_cast<volatile int*>(data + index);
            check(sum == 700, "somebody is inside after it was closed");
            Gate::leave(flag);
            ++passed;
          }
          gate.remove(flag);
        }
      });
    }
    while (passed.load() < 3000) std::this_thread::yield();
    check(gate.close(), "somebody never came out");
    for (int& each : *behind) each = 0;
    behind.reset();
    closed = true;
    for (std::thread& each : threads) each.join();
  }
}

void a_child_waits_for_no_thread_of_its_parents() {
  Gate gate;
  std::atomic<int> stage{0};
  std::thread other([&] {
    Gate::Flag flag;
    gate.add(flag);
    check(gate.enter(flag), "closed from the start");
    stage = 1;
    while (stage.load() != 2) std::this_thread::yield();
    Gate::leave(flag);
    gate.remove(flag);
  });
  while (stage.load() != 1) std::this_thread::yield();
  gate.lock_for_fork().lock();
  const pid_t child = ::fork();
  gate.lock_for_fork().unlock();
  if (child == 0) {
    gate.forget_in_child();
    Gate::Flag mine;
    gate.add(mine);
    const bool passed = gate.enter(mine);
    Gate::leave(mine);
    ::_exit(passed && gate.close() && !gate.enter(mine) ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child waits for what it does not have");
  check(!gate.close(), "it was closed on somebody inside");
  stage = 2;
  other.join();
}

}  // namespace

int main(int count, char** arguments) {
  nobody_is_inside_once_it_is_closed(count > 1 ? std::atoi(arguments[1]) : 100);
  a_child_waits_for_no_thread_of_its_parents();
  std::printf("%d problems\n", problems.load());
}
