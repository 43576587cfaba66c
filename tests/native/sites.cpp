// The table of call sites alone, against a model: from many threads, up to its bounds, and with memory that fails at each place.
//   sites random SEED | threads COUNT | bounds | memory
#include "failing_new.hpp"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "ledger/sites.hpp"

using namespace rmm_bridge;

namespace {

int problems = 0;

void expect(bool right, const char* what) {
  if (right) return;
  if (++problems <= 20) std::fprintf(stderr, "%s\n", what);
}

struct Line {
  std::string file;
  int file_width;
  std::string function;
  int function_width;
  int line;
  auto operator<=>(const Line&) const = default;
};

Text text(const std::string& bytes, int width) { return {bytes, width}; }

std::uint32_t intern(Sites& sites, const Line& line) {
  // The caller's characters are gone when it returns.
  std::string file = line.file, function = line.function;
  const std::uint32_t id = sites.intern(text(file, line.file_width), text(function, line.function_width), line.line);
  file.assign(file.size(), '!');
  function.assign(function.size(), '!');
  return id;
}

void expect_text(Sites& sites, std::uint32_t id, const Line& line) {
  const Sites::Site site = sites.at(id);
  expect(site.file == text(line.file, line.file_width), "another file");
  expect(site.function == text(line.function, line.function_width), "another function");
  expect(site.line == line.line, "another line");
  expect(site.via == Sites::kNative, "a line by itself went through another");
}

// Few enough that most come again. Equal bytes of another width are other text.
Line random_line(std::mt19937& random) {
  const auto name = [&](const char* letters) {
    const int width = 1 << random() % 3;
    return std::pair{std::string(static_cast<std::size_t>(width) * (1 + random() % 2), letters[random() % 3]), width};
  };
  auto [file, file_width] = name("abc");
  auto [function, function_width] = name("abd");
  return {file, file_width, function, function_width, static_cast<int>(random() % 4) - 1};
}

void random_program(unsigned seed) {
  Sites sites;
  std::mt19937 random(seed);
  std::map<Line, std::uint32_t> model;
  std::map<std::uint32_t, Line> lines;
  for (int step = 0; step < 20000; ++step) {
    const Line line = random_line(random);
    const std::uint32_t id = intern(sites, line);
    expect(id != Sites::kNative && id != Sites::kOther, "no room, though there is");
    expect(model.try_emplace(line, id).first->second == id, "one line, two numbers");
    expect(lines.try_emplace(id, line).first->second == line, "one number, two lines");
    expect_text(sites, id, line);
    const std::uint32_t library = sites.intern(text(line.file, line.file_width), text("l", 1), line.line, true);
    expect(library != id && sites.at(library).library && !sites.at(id).library, "a library's line is the program's");
    const std::uint32_t via = sites.intern_via(id, library);
    expect(via != id && via != library && via == sites.intern_via(id, library), "another pair");
    expect(sites.at(via).via == library && sites.at(via).line == line.line, "a pair of other lines");
    expect(sites.intern_via(Sites::kOther, library) == Sites::kOther, "a pair of no line");
    expect(sites.intern_via(id, Sites::kOther) == id, "a pair without a library's line");
  }
}

void threads(int count) {
  Sites sites;
  std::vector<std::map<Line, std::uint32_t>> seen(static_cast<std::size_t>(count));
  std::vector<std::thread> running;
  for (int index = 0; index < count; ++index) {
    running.emplace_back([&, index] {
      std::mt19937 random(static_cast<unsigned>(index));
      auto& mine = seen[static_cast<std::size_t>(index)];
      for (int step = 0; step < 5000; ++step) {
        const Line line = random_line(random);
        mine.try_emplace(line, intern(sites, line));
        if (step % 64 == 0) sites.at(mine[line]);
      }
    });
  }
  for (std::thread& each : running) each.join();
  for (const auto& mine : seen) {
    for (const auto& [line, id] : mine) {
      expect(intern(sites, line) == id, "threads had two numbers for one line");
      expect_text(sites, id, line);
    }
  }
}

void bounds() {
  {
    Sites sites;
    std::size_t given = 0;
    std::map<std::uint32_t, Line> lines;
    // All of these are in one generated file and then in one of the user's: only the lines are counted.
    for (const char* file : {"<made>", "/user.py"}) {
      const std::size_t before = given;
      for (int line = 0; line < 10000; ++line) {
        const Line each{file, 1, "f", 1, line};
        const std::uint32_t id = intern(sites, each);
        if (id == Sites::kOther) continue;
        ++given;
        lines.emplace(id, each);
      }
      expect(given - before == (before == 0 ? Sites::kMostGenerated : Sites::kMost - Sites::kMostGenerated), "another bound");
    }
    expect(lines.size() == given, "a number was given twice");
    const std::size_t full = sites.overhead_bytes();
    for (int line = 0; line < 10000; ++line) {
      expect(intern(sites, {"/late" + std::to_string(line), 1, "g", 1, 1}) == Sites::kOther, "room in a full table");
    }
    expect(sites.overhead_bytes() == full, "a full table grows");
    for (const auto& [id, line] : lines) {
      expect(intern(sites, line) == id, "what was known is not any more");
      expect_text(sites, id, line);
    }
  }
  {
    Sites sites;
    std::vector<std::uint32_t> own, library, pairs;
    for (int line = 0; line < 3000; ++line) {
      const std::uint32_t id = sites.intern(text("/lib.py", 1), text("f", 1), line, true);
      if (id != Sites::kOther) library.push_back(id);
      own.push_back(intern(sites, {"/user.py", 1, "f", 1, line}));
      if (sites.intern_via(own.back(), library.back()) != own.back()) pairs.push_back(own.back());
    }
    expect(library.size() == Sites::kMostLibrary, "another bound of libraries' lines");
    expect(pairs.size() == Sites::kMostPairs, "another bound of pairs");
    expect(own.back() != Sites::kOther && sites.at(own.back()).line == 2999, "libraries took the room of the program's lines");
  }
  {
    Sites sites;
    const std::uint32_t first = sites.intern_thread("worker-0");
    for (int number = 1; number < 1000; ++number) {
      const std::uint32_t id = sites.intern_thread("worker-" + std::to_string(number));
      expect((id != Sites::kNative) == (number < static_cast<int>(Sites::kMostThreads)), "another bound of threads");
    }
    expect(sites.intern_thread("worker-0") == first, "what was known is not any more");
    expect(sites.at(first).file == text("native thread worker-0", 1), "another name");
  }
  Sites sites;
  expect(intern(sites, {std::string(Sites::kLongestText + 1, 'x'), 1, "f", 1, 1}) == Sites::kOther, "a name without end");
  expect(intern(sites, {"f", 1, std::string(Sites::kLongestText + 1, 'x'), 1, 1}) == Sites::kOther, "a function without end");
  expect(sites.intern({}, text("f", 1), 1) == Sites::kOther, "a name that cannot be read");
  std::size_t kept = 0;
  for (int number = 0; number < 3000; ++number) {
    std::string name = std::to_string(number);
    name.resize(Sites::kLongestText, 'x');
    if (intern(sites, {name, 1, "f", 1, 1}) != Sites::kOther) kept += Sites::kLongestText;
  }
  expect(kept <= Sites::kMostText && kept > Sites::kMostText - 2 * Sites::kLongestText, "another bound of text");
}

void memory() {
  // Long enough for memory of their own, and so many that the tables grow.
  for (int number = 0; number < 300; ++number) {
    for (long place = 0;; ++place) {
      static Sites sites;
      static std::map<Line, std::uint32_t> model;
      const Line line{"/a/file/with/a/long/name/" + std::to_string(number) + "/" + std::to_string(place), 1,
                      "a function with a long name " + std::to_string(number % 7) + "/" + std::to_string(place), 1, number};
      const Text file = text(line.file, 1), function = text(line.function, 1);
      std::uint32_t id = 0;
      failing::survives(place, [&] { id = sites.intern(file, function, line.line); });
      const bool failed = failing::failed;
      if (failed) {
        expect(id == Sites::kOther, "a number without memory for its line");
        id = intern(sites, line);
      }
      expect(id != Sites::kOther && id != Sites::kNative, "what failed once fails for ever");
      expect(model.emplace(line, id).second, "known before");
      if (number % 4 == 0) {
        const std::uint32_t before = model.begin()->second;
        std::uint32_t pair = id;
        failing::survives(place, [&] { pair = sites.intern_via(before, id); });
        if (failing::failed) {
          expect(pair == before, "a pair without memory has another number");
          pair = sites.intern_via(before, id);
        }
        expect(sites.at(pair).via == id, "what failed once fails for ever");
      }
      for (const auto& [each, known] : model) {
        if (number % 50 == 0 || each == line) {
          expect(intern(sites, each) == known, "a failure changed a number");
          expect_text(sites, known, each);
        }
      }
      if (!failed) break;
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  const int number = count > 2 ? std::atoi(arguments[2]) : 0;
  if (what == "random") random_program(static_cast<unsigned>(number));
  if (what == "threads") threads(number);
  if (what == "bounds") bounds();
  if (what == "memory") memory();
  std::printf("%d problems\n", problems);
}
