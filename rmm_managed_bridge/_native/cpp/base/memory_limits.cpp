#include "base/memory_limits.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/clock.hpp"

namespace rmm_bridge {

namespace {

// The file's text; empty if it cannot be read.
std::string read_all(const std::string& path) {
  std::string text;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return text;
  char part[4096];
  for (ssize_t count; (count = ::read(file, part, sizeof(part))) > 0;) text.append(part, static_cast<std::size_t>(count));
  ::close(file);
  return text;
}

// A number at the start of a text; kNone for "max", for none, and for what does not fit.
std::uint64_t number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} ? value : MemoryLimits::kNone;
}

std::uint64_t read_number(const std::string& path) { return number(read_all(path)); }

// Calls `visit(line)` for each.
template <typename Visit>
void for_each_line(std::string_view text, Visit visit) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    visit(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// Cuts a part off the front of a line.
std::string_view take(std::string_view& line, char until) {
  const std::size_t end = std::min(line.find(until), line.size());
  const std::string_view part = line.substr(0, end);
  line.remove_prefix(std::min(end + 1, line.size()));
  return part;
}

bool lists(std::string_view names, std::string_view wanted) {
  while (!names.empty()) {
    if (take(names, ',') == wanted) return true;
  }
  return false;
}

// The sum of the lines "name number" that have one of `names`.
template <std::size_t kNames>
std::uint64_t sum_of(std::string_view text, const std::string_view (&names)[kNames]) {
  std::uint64_t sum = 0;
  for_each_line(text, [&](std::string_view line) {
    const std::string_view name = take(line, ' ');
    if (std::find(std::begin(names), std::end(names), name) == std::end(names)) return;
    if (const std::uint64_t value = number(line); value != MemoryLimits::kNone) sum += value;
  });
  return sum;
}

// Where a hierarchy is mounted, and what it shows there: a container sees its own group at the mount point, and perhaps reads
// in /proc/self/cgroup where that lies on the host.
struct Mount {
  std::string shows = "/";
  std::string point;
};

// `controller` empty: version 2.
Mount mount_of(std::string_view mountinfo, std::string_view controller, const std::string& groups) {
  constexpr std::string_view kUsual = "/sys/fs/cgroup";
  Mount mount{"/", controller.empty() ? groups : groups + "/" + std::string(controller)};
  for_each_line(mountinfo, [&](std::string_view line) {
    for (int field = 0; field < 3; ++field) take(line, ' ');
    const std::string_view shows = take(line, ' ');
    std::string_view point = take(line, ' ');
    const std::size_t dash = line.find(" - ");
    if (dash == line.npos) return;
    line.remove_prefix(dash + 3);
    const std::string_view type = take(line, ' ');
    take(line, ' ');
    if (controller.empty() ? type != "cgroup2" : type != "cgroup" || !lists(line, controller)) return;
    if (!point.starts_with(kUsual)) return;
    point.remove_prefix(kUsual.size());
    mount = {std::string(shows), groups + std::string(point)};
  });
  return mount;
}

// The path below the mount point; "" where the group lies outside of what can be seen: then only the mount's own can be read.
std::string below(std::string_view path, std::string_view shows) {
  if (!path.starts_with('/') || path.find("/..") != path.npos) return {};
  if (shows != "/") {
    if (path == shows) return {};
    if (path.starts_with(shows) && path[shows.size()] == '/') return std::string(path.substr(shows.size()));
  }
  return path == "/" ? std::string() : std::string(path);
}

bool is_folder(const std::string& path) {
  struct stat found;
  return ::stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

struct Names {
  const char *limit, *soft_limit, *usage, *events;
  std::string_view inactive;
};
constexpr Names kUnified{"/memory.max", "/memory.high", "/memory.current", "/memory.events", "inactive_file"};
constexpr Names kLegacy{"/memory.limit_in_bytes", nullptr, "/memory.usage_in_bytes", "/memory.failcnt", "total_inactive_file"};
// What version 1 says for "no limit" is the largest whole page.
constexpr std::uint64_t kLeastUnlimited = std::uint64_t{1} << 62;

std::uint64_t limit_in(const std::string& path) {
  const std::uint64_t bytes = read_number(path);
  return bytes < kLeastUnlimited ? bytes : MemoryLimits::kNone;
}

// Above the soft one the kernel slows the group down to a crawl: for a program that is as good as the end.
std::uint64_t limit_of(const std::string& folder, bool unified) {
  const Names& names = unified ? kUnified : kLegacy;
  const std::uint64_t hard = limit_in(folder + names.limit);
  return names.soft_limit == nullptr ? hard : std::min(hard, limit_in(folder + names.soft_limit));
}

}  // namespace

std::vector<MemoryLimits::Group> MemoryLimits::groups_of(const std::string& proc, const std::string& groups,
                                                         std::string_view controller) {
  const std::string mountinfo = read_all(proc + "/self/mountinfo");
  std::vector<Group> found;
  for_each_line(read_all(proc + "/self/cgroup"), [&](std::string_view line) {
    take(line, ':');
    const std::string_view controllers = take(line, ':');
    const bool unified = controllers.empty();
    if (!unified && !lists(controllers, controller)) return;
    const Mount mount = mount_of(mountinfo, unified ? "" : controller, groups);
    std::string path = below(line, mount.shows);
    for (;;) {
      if (std::string folder = mount.point + path; is_folder(folder)) found.push_back({std::move(folder), unified});
      if (path.empty()) break;
      path.resize(path.rfind('/'));
    }
  });
  return found;
}

void MemoryLimits::find(const std::string& proc, const std::string& groups) {
  std::vector<Group> found = groups_of(proc, groups, "memory");
  std::uint64_t most = kNone;
  for (const Group& group : groups_of(proc, groups, "cpu")) most = std::min(most, processors_of(group));
  most_processors_.store(most, std::memory_order_relaxed);
  seen_events_.store(events_of(found), std::memory_order_relaxed);
  heed_until_ns_.store(0, std::memory_order_relaxed);
  limited_.store(std::ranges::any_of(found, [](const Group& group) { return limit_of(group.folder, group.unified) != kNone; }),
                 std::memory_order_relaxed);
  std::scoped_lock lock(lock_);
  groups_ = std::move(found);
}

// A quota of so much time in each period, of all threads together.
std::uint64_t MemoryLimits::processors_of(const Group& group) {
  std::uint64_t quota = kNone, period = kNone;
  if (group.unified) {
    const std::string text = read_all(group.folder + "/cpu.max");
    std::string_view rest = text;
    quota = number(take(rest, ' '));
    period = number(rest);
  } else {
    quota = read_number(group.folder + "/cpu.cfs_quota_us");
    period = read_number(group.folder + "/cpu.cfs_period_us");
  }
  if (quota == kNone || period == kNone || period == 0) return kNone;
  return std::max<std::uint64_t>(quota / period, 1);
}

std::size_t MemoryLimits::processors() const noexcept {
  cpu_set_t set;
  const int bound = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  const std::uint64_t count = std::min(static_cast<std::uint64_t>(bound), most_processors_.load(std::memory_order_relaxed));
  return std::max<std::size_t>(static_cast<std::size_t>(count), 1);
}

// What the kernel has counted at them: version 2, when a limit was reached and memory taken back; version 1, when it was reached.
std::uint64_t MemoryLimits::events_of(const std::vector<Group>& groups) {
  std::uint64_t events = 0;
  for (const Group& group : groups) {
    const std::string text = read_all(group.folder + (group.unified ? kUnified : kLegacy).events);
    if (group.unified) {
      events += sum_of(text, {"high", "max", "oom", "oom_kill"});
    } else if (const std::uint64_t failures = number(text); failures != kNone) {
      events += failures;
    }
  }
  return events;
}

std::vector<MemoryLimits::Group> MemoryLimits::groups() const {
  std::scoped_lock lock(lock_);
  return groups_;
}

MemoryLimits::Limit MemoryLimits::smallest() const {
  Limit least;
  for (const Group& group : groups()) {
    std::string file = group.folder + (group.unified ? kUnified : kLegacy).limit;
    if (const std::uint64_t bytes = limit_in(file); bytes < least.bytes) least = {bytes, Who::group, std::move(file)};
  }
  for (const auto& [resource, who] : {std::pair{RLIMIT_AS, Who::address_space}, std::pair{RLIMIT_DATA, Who::data_segment}}) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < least.bytes) {
      least = {limit.rlim_cur, who, {}};
    }
  }
  return least;
}

MemoryLimits::Pressure MemoryLimits::look() noexcept {
  constexpr std::uint64_t kLargestMargin = std::uint64_t{1} << 30;
  constexpr std::int64_t kHeedNs = 2'000'000'000;
  Pressure pressure;
  try {
    const std::vector<Group> all = groups();
    const std::uint64_t events = events_of(all);
    const std::int64_t now = steady_time_ns();
    if (seen_events_.exchange(events, std::memory_order_relaxed) < events) heed_until_ns_.store(now + kHeedNs);
    const bool noted = now < heed_until_ns_.load();
    for (const Group& group : all) {
      const Names& names = group.unified ? kUnified : kLegacy;
      const std::uint64_t limit = limit_of(group.folder, group.unified);
      const std::uint64_t usage = read_number(group.folder + names.usage);
      if (limit == kNone || usage == kNone || usage < limit / 4 * 3) continue;
      // Files that were read lately fill a group up to its limit; the kernel drops them by itself. The list is long, so it is read
      // only now.
      const std::uint64_t files = sum_of(read_all(group.folder + "/memory.stat"), {names.inactive});
      const std::uint64_t used = usage - std::min(usage, files);
      const std::uint64_t margin = std::min(limit / 10, kLargestMargin);
      const std::uint64_t most = limit - (noted ? 2 * margin : margin);
      if (used >= limit / 4 * 3) pressure.near = true;
      if (used > most) pressure.excess_bytes = std::max(pressure.excess_bytes, used - most);
    }
  } catch (const std::bad_alloc&) {
  }
  return pressure;
}

}  // namespace rmm_bridge
