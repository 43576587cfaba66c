// Call sites of threads that do not hold the GIL, and of those that run no Python.
#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <new>
#include <string_view>

#include "entry/call_site.hpp"

namespace rmm_bridge {

namespace {

using ThreadName = char[16];  // as the kernel has it

// What one thread has for reading, made when it reads first.
#ifdef BRIDGE_READS_FRAMES
struct Reader {
  Reader(Process& process, PyInterpreterState* main, const FileRules* rules)
      : gate(process.reading), sites(process.sites, main, rules), rules(rules) {
    gate.add(flag);
  }
  ~Reader() { gate.remove(flag); }

  Gate& gate;
  Gate::Flag flag;
  CallSites<LineIdentity, NameIdentity> sites;
  const FileRules* rules;
};

// Allocations of other thread-locals' destructors come after ours: a second reader would never go.
thread_local bool over = false;

struct ThisThread {
  ~ThisThread() { over = true; }
  std::unique_ptr<Reader> reader;
};

Reader* reader_of_this_thread(Process& process, PyInterpreterState* main, const FileRules* rules) noexcept {
  if (over) return nullptr;
  static thread_local ThisThread here;
  if (here.reader == nullptr) here.reader.reset(new (std::nothrow) Reader(process, main, rules));
  return here.reader.get();
}
#endif

void read_process_name(ThreadName& name) noexcept {
  std::memset(name, 0, sizeof name);
  const int file = ::open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  const auto count = ::read(file, name, sizeof name);
  ::close(file);
  if (count > 0) name[count - 1] = 0;  // a line break
}

}  // namespace

#ifdef BRIDGE_READS_FRAMES
std::uint32_t Origin::site_without_gil() noexcept {
  PyThreadState* const thread = PyGILState_GetThisThreadState();
  if (thread != nullptr) {
    const FileRules* const rules = newest_rules.load(std::memory_order_acquire);
    Reader* const reader = reader_of_this_thread(process_, main_, rules);
    if (reader == nullptr || !process_.reading.enter(reader->flag)) return Sites::kNative;
    if (reader->rules != rules) {
      reader->rules = rules;
      reader->sites.set_rules(rules);
    }
    const std::uint32_t site = reader->sites.capture(thread);
    Gate::leave(reader->flag);
    if (site != Sites::kNative) return site;
  }
  return native_thread();
}

#else
std::uint32_t Origin::site_without_gil() noexcept { return native_thread(); }
#endif

std::uint32_t Origin::native_thread() noexcept {
  // The kernel says a name in 50 to 450 ns, so it is asked now and then: few threads change theirs while they allocate.
  constexpr unsigned kTurns = 64;
  struct Known {
    ThreadName name;
    std::uint32_t site;
    unsigned turns;
  };
  static thread_local Known known{};
  if (known.turns++ % kTurns != 0) [[likely]]
    return known.site;
  ThreadName name{};
  ::prctl(PR_GET_NAME, name);
  if (std::memcmp(name, known.name, sizeof name) == 0) [[likely]]
    return known.site;
  // Threads that nobody named have the name of the thread that made them: mostly the program's.
  ThreadName program;
  read_process_name(program);
  std::memcpy(known.name, name, sizeof name);
  const std::string_view text(name, ::strnlen(name, sizeof name));
  known.site = std::memcmp(name, program, sizeof name) == 0 ? Sites::kNative : process_.sites.intern_thread(text);
  return known.site;
}

}  // namespace rmm_bridge
