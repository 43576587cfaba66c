// biased_lock.hpp alone: an owner that goes in and out all the time, and others that come in between.
#include "base/biased_lock.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

using namespace rmm_bridge;

namespace {

int problems = 0;

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s\n", what);
  ++problems;
}

struct Guarded {
  BiasedLock lock;
  long count = 0;  // plain: what two threads add at once is lost, and ThreadSanitizer sees it

  void add() {
    const Locked locked(lock);
    const long now = *const_cast<volatile long*>(&count);
    *const_cast<volatile long*>(&count) = now + 1;
  }
  void settle() {
    for (int turn = 0; turn < 64; ++turn) add();
  }
};

// Each lock is taken from its owner a few times, in the midst of the owner's turns.
void others_come_at_any_time(int locks) {
  for (int number = 0; number < locks; ++number) {
    Guarded guarded;
    std::atomic<bool> ready{false}, over{false};
    long mine = 0;
    std::thread owner([&] {
      while (!over.load(std::memory_order_relaxed)) {
        guarded.add();
        if (++mine == 64) ready.store(true);
      }
    });
    while (!ready.load()) std::this_thread::yield();
    for (int turn = 0; turn < 200; ++turn) guarded.add();
    over.store(true);
    owner.join();
    check(guarded.count == mine + 200, "two threads were inside at once");
  }
}

void many_threads(int threads, int turns) {
  Guarded guarded;
  std::vector<std::thread> all;
  for (int number = 0; number < threads; ++number) {
    all.emplace_back([&] {
      for (int turn = 0; turn < turns; ++turn) guarded.add();
    });
  }
  for (std::thread& each : all) each.join();
  check(guarded.count == long{threads} * turns, "many threads lost count");
}

void who_has_the_right() {
  Guarded guarded;
  guarded.settle();
  check(guarded.lock.biased() == Fence::available(), "the owner alone does not get the right");
  guarded.settle();
  std::thread([&] { guarded.add(); }).join();
  check(!guarded.lock.biased(), "another thread leaves the owner its right");
  guarded.settle();
  check(guarded.lock.biased() == Fence::available(), "the owner does not get its right again");
  std::thread([&] {
    for (int turn = 0; turn < 10'000; ++turn) guarded.add();
    check(!guarded.lock.biased(), "another thread becomes the owner");
  }).join();
  std::thread([&] { guarded.add(); }).join();
  check(guarded.count == 3 * 64 + 10'002, "turns are lost");

  Guarded looked_at;  // by somebody who only reads now and then, such as the bridge's own thread
  std::thread([&] {
    for (int turn = 0; turn < 1000; ++turn) {
      looked_at.lock.lock();
      looked_at.lock.unlock();
    }
  }).join();
  looked_at.settle();
  check(looked_at.lock.biased() == Fence::available(), "whoever looks first becomes the owner");
}

// The owner takes the lock as a fork does while another thread waits, and forks: in the child that thread is gone.
void a_fork(int turns) {
  for (int turn = 0; turn < turns; ++turn) {
    Guarded guarded;
    guarded.settle();
    std::atomic<bool> over{false};
    std::thread other([&] {
      while (!over.load()) guarded.add();
    });
    guarded.lock.lock();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const pid_t child = ::fork();
    guarded.lock.unlock();
    if (child == 0) {
      ::alarm(60);
      guarded.settle();
      guarded.lock.lock();
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    over.store(true);
    other.join();
    check(status == 0, "a forked child waits for a thread that it has not");
  }
}

}  // namespace

int main(int, char** arguments) {
  who_has_the_right();
  a_fork(20);
  others_come_at_any_time(std::atoi(arguments[1]));
  many_threads(4, 20'000);
  std::printf("%d problems\n", problems);
}
