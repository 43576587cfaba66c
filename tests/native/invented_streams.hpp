// What the tests of the quarantine know of invented streams: how much work was enqueued on each and how much of it has ended.
#pragma once

#include <cstdint>
#include <cstdio>
#include <vector>

#include "streams/quarantine.hpp"

namespace invented {

using namespace rmm_bridge;

inline int problems = 0;
inline long step_number = 0;

inline void expect(bool right, const char* what) {
  if (right) return;
  if (++problems <= 20) std::fprintf(stderr, "step %ld: %s\n", step_number, what);
}

struct Stream;

// One place that a batch waits at: it is over once this much of the stream's work has ended.
struct Place {
  Stream* stream;
  long work;
};

struct Known {  // a batch
  std::uint64_t number;
  std::size_t bytes;
  bool deferred;
  std::vector<Block*> blocks;
  std::vector<Place> places;
  std::size_t left;  // points that have not ended
};

struct Logged {  // a point, for good
  std::size_t batch;
  EventRef event;
};

struct Stream {
  StreamRef ref;
  Lane* lane = nullptr;
  Lane::State state = Lane::State::borrowed;
  long enqueued = 0, finished = 0;
  std::vector<Logged> log;
  std::size_t ended = 0;  // points of the log, from its front
  EventRef departure;
  int recording = 0;  // calls that are about to sign: as the pool's pins

  bool seen() const { return ref.key != StreamRef::kUnseenKey; }
  bool waited_for() const { return ended != log.size(); }
};

struct Recording {  // a thread between its event and its lock
  Stream* stream;
  std::uint64_t later;
  long work;  // enqueued when it began
  EventRef event;
};

}  // namespace invented
