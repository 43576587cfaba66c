// The quarantine and the table of lanes alone, without a driver: streams and events are invented, and an event is done when this
// program says so. A seeded random machine acts as a pool does, several threads of it at once, and compares with what it knows
// itself of each stream: how much work was enqueued on it and how much of that has ended.
//   quarantine model SEED STEPS
//   quarantine numbers new | again
#include "failing_new.hpp"

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <unordered_map>

#include "invented_streams.hpp"

using namespace rmm_bridge;
using namespace invented;

namespace {

class Machine {
 public:
  explicit Machine(unsigned seed) : random_(seed), blocks_(new Block[kBlocks]) {
    for (std::size_t index = 0; index < kBlocks; ++index) free_.push_back(&blocks_[index]);
  }

  void run(long steps) {
    for (step_number = 0; step_number < steps && problems == 0; ++step_number) {
      // Phases with many ends and phases with few: each list gets long, and each gets empty.
      step((step_number / 250) % 2 == 0);
      compare();
    }
    if (problems == 0) drain();
  }

 private:
  static constexpr std::size_t kBlocks = 20'000;
  static constexpr std::size_t kAsked = 64;  // of one lane at once

  void step(bool busy) {
    const unsigned what = random_() % 100;
    if (what < 8) return start();
    if (streams_.empty()) return;
    Stream& stream = any();
    if (what < 30) {
      stream.enqueued += random_() % 4;
    } else if (what < (busy ? 34u : 50u)) {
      finish(stream);
    } else if (what < 56) {
      change(stream);
    } else if (what < 62) {
      begin_record(stream);
    } else if (what < 68) {
      end_record(random_() % 3 == 0);
    } else if (what < 86) {
      add(stream);
    } else if (what < 87) {
      for (int turn = random_() % 100; turn > 0; --turn) add(stream);  // more than is asked about at once
    } else if (what < 93) {
      end_points(stream);
    } else if (what < 97) {
      poll();
    } else {
      wait_for_oldest();
    }
  }

  unsigned below(std::size_t count) { return static_cast<unsigned>(random_() % count); }
  Stream& any() { return *streams_[below(streams_.size())]; }

  // Streams and their lanes.

  void start() {
    if (streams_.size() >= 12) return;
    // A handle comes back for another stream; an id does not.
    StreamRef ref{++last_key_, reinterpret_cast<CUstream>(std::uintptr_t{0x100} + below(8))};
    if (const unsigned special = below(40); special == 0) {
      ref = {StreamRef::kUnseenKey, ref.handle, true};
    } else if (special == 1) {
      ref = {StreamRef::kLegacyKey, nullptr};
    } else if (special == 2) {
      ref = {ref.key, CU_STREAM_PER_THREAD};
    }
    if (of_key(ref.key) != nullptr) return;
    auto stream = std::make_unique<Stream>();
    stream->ref = ref;
    failing::at_each_place([&] { stream->lane = &lanes_.get(ref); },
                           [&] {
                             expect(lanes_.find(ref.key) == nullptr, "a stream is known though there was no memory for it");
                             compare();
                           });
    if (ref.legacy() || ref.per_thread()) stream->state = Lane::State::held;  // but for the unseen one, which has a handle too
    expect(taken_.insert(stream->lane->index).second, "a lane's number was given out twice");
    expect(stream->lane->index >= kFirstStreamLane, "a stream has a lane that is none of a stream's");
    streams_.push_back(std::move(stream));
  }

  void change(Stream& stream) {
    using State = Lane::State;
    Lane& lane = *stream.lane;
    if (stream.recording != 0) return;
    if (stream.state == State::borrowed && stream.seen() && below(2) == 0) return hold(stream);
    if (stream.state == State::held && below(4) == 0) return hold(stream);  // it is already
    if (stream.state == State::held && !stream.waited_for() && !stream.ref.legacy() && !stream.ref.per_thread()) {
      lane.owner = &stream;
      stream.departure = below(4) == 0 ? nullptr : record(stream);
      without_memory([&] { expect(lanes_.let_go(lane, stream.departure) == &stream, "another owner was let go"); });
      forget_handle(stream);
      stream.state = State::closing;
    } else if (stream.state == State::closing && below(2) == 0) {
      const std::size_t events = lane.events.size();
      failing::at_each_place([&] { expect(&lanes_.get(stream.ref) == &lane, "a closing stream has another lane"); },
                             [&] {
                               expect(lane.state == State::closing && lane.events.size() == events, "half borrowed again");
                               compare();
                             });
      stream.state = State::borrowed;
      const bool waits =
          stream.departure == nullptr || (lane.events.size() == events + 1 && lane.events.back() == stream.departure);
      expect(waits, "work from before a stream was let go is forgotten");
    } else if (!stream.waited_for()) {
      end(stream);
    }
  }

  void hold(Stream& stream) {
    // Without memory its handle is looked up the slow way; it is held all the same.
    failing::survives(below(4) == 0 ? 0 : 100, [&] { lanes_.hold(*stream.lane); });
    const bool own_handle = !stream.ref.legacy() && !stream.ref.per_thread();
    if (own_handle && !failing::failed) by_handle_[stream.ref.handle] = &stream;  // of two that have it, the last
    stream.state = Lane::State::held;
    expect(stream.lane->front.key == stream.ref.key, "the front of a held stream is closed");
    expect(stream.lane->events.empty(), "a held lane has events of its own");
  }

  // Nothing is left of it: the number is another's.
  void end(Stream& stream) {
    if (stream.departure != nullptr && below(2) == 0) {
      lanes_.forget_departure(*stream.lane);
      lanes_.forget_departure(*stream.lane);  // once is enough
      stream.departure = nullptr;
      if (below(2) == 0) return;
    }
    without_memory([&] { lanes_.recycle(*stream.lane); });
    forget_handle(stream);
    const Lane& lane = *stream.lane;
    expect(!lane.in_use() && lane.departure == nullptr && lane.events.empty(), "a lane's number is not free");
    expect(lanes_.find(stream.ref.key) == nullptr, "a stream is known that is gone");
    taken_.erase(stream.lane->index);
    stream.state = Lane::State::idle;
    stream.departure = nullptr;
    auto found = std::find_if(streams_.begin(), streams_.end(), [&](const auto& each) { return each.get() == &stream; });
    gone_.push_back(std::move(*found));
    streams_.erase(found);
  }

  void forget_handle(const Stream& stream) {
    std::erase_if(by_handle_, [&](const auto& each) { return each.second == &stream; });
  }

  // What is not allowed to fail asks for nothing that can.
  template <typename Call>
  void without_memory(Call call) {
    failing::survives(0, call);
    expect(failing::calls == 0, "a call needs memory that may not fail");
  }

  // Work and events.

  EventRef record(const Stream& stream) {
    auto event = std::make_shared<DeviceEvent>(reinterpret_cast<CUevent>(++last_event_), &events_);
    behind_[event.get()] = {&stream, stream.enqueued};
    all_events_.push_back(event);
    return event;
  }

  void finish(Stream& stream) {
    if (const long left = stream.enqueued - stream.finished; left != 0) stream.finished += 1 + below(left);
  }

  bool has_ended(const EventRef& event) const {
    const auto& [stream, work] = behind_.at(event.get());
    return stream->finished >= work;
  }

  // As the pool asks a driver.
  bool ask_driver(const EventRef& event) {
    if (has_ended(event)) event->done.store(true);
    return event->done.load();
  }

  void begin_record(Stream& stream) {
    if (!stream.seen() || stream.state == Lane::State::closing) return;
    const std::uint64_t later = quarantine_.next_number();
    const long work = stream.enqueued;
    stream.enqueued += below(2);
    ++stream.recording;
    recordings_.push_back({&stream, later, work, record(stream)});
  }

  void end_record(bool with_batch) {
    if (recordings_.empty()) return;
    const std::size_t which = below(recordings_.size());  // threads come to the lock in any order
    const Recording recording = recordings_[which];
    recordings_.erase(recordings_.begin() + static_cast<std::ptrdiff_t>(which));
    --recording.stream->recording;
    sign(*recording.stream, recording.event, recording.later);
    if (with_batch) add_batch({{recording.stream->lane->index, recording.event}}, {{recording.stream, recording.work}});
  }

  void sign(Stream& stream, const EventRef& event, std::uint64_t later) {
    without_memory([&] { quarantine_.sign(*stream.lane, event, later); });
    for (std::size_t index = stream.ended; index < stream.log.size(); ++index) {
      Logged& point = stream.log[index];
      if (point.event == nullptr && batches_[point.batch].number < later) point.event = event;
    }
  }

  // Batches.

  void add(Stream& first) {
    std::vector<Quarantine::WaitFor> waits;
    std::vector<Place> places;
    for (int count = 1 + static_cast<int>(below(5)); count > 0; --count) {
      Stream& stream = places.empty() ? first : any();
      if (stream.state == Lane::State::closing) {  // only its departure is waited for
        if (stream.departure == nullptr) continue;
        waits.push_back({stream.lane->index, stream.departure});
        places.push_back({&stream, behind_.at(stream.departure.get()).second});
        continue;
      }
      EventRef event;
      if (stream.seen() && below(5) != 0) event = record(stream);
      waits.push_back({stream.lane->index, event});
      places.push_back({&stream, stream.enqueued});
    }
    if (waits.empty()) return;
    const std::uint64_t later = quarantine_.next_number();
    for (const auto& [index, event] : waits) {
      Stream& stream = of_lane(index);
      if (event != nullptr && event != stream.departure && below(2) == 0) sign(stream, event, later);
    }
    add_batch(waits, places);
  }

  void add_batch(const std::vector<Quarantine::WaitFor>& waits, const std::vector<Place>& places) {
    Known known{quarantine_.next_number(), 1 + below(1000), below(3) == 0, {}, places, places.size()};
    for (int count = 1 + static_cast<int>(below(3)); count > 0 && !free_.empty(); --count) {
      known.blocks.push_back(free_.back());
      free_.pop_back();
    }
    std::vector<Block*> blocks = known.blocks;
    const auto add = [&] { quarantine_.add(lanes_, std::move(blocks), known.bytes, waits, known.deferred); };
    const long places_failed = failing::at_each_place(add, [&] {
      expect(blocks == known.blocks, "blocks are gone though there was no memory to take them in");
      expect(quarantine_.next_number() == known.number, "a number was given though there was no memory");
      compare();
    });
    expect(places_failed == static_cast<long>(waits.size()) + 1, "a batch and its points are what needs memory");
    for (const auto& [index, event] : waits) of_lane(index).log.push_back({batches_.size(), event});
    batches_.push_back(std::move(known));
  }

  // Takes what has ended off one lane. True if anything did.
  bool end_points(Stream& stream) {
    std::multiset<Block*> expected, got;
    bool moves = false;
    for (; stream.waited_for(); ++stream.ended, moves = true) {
      Logged& point = stream.log[stream.ended];
      if (point.event == nullptr || !point.event->done) break;
      point.event = nullptr;
      Known& batch = batches_[point.batch];
      if (--batch.left == 0) expected.insert(batch.blocks.begin(), batch.blocks.end());
    }
    const bool moved = quarantine_.end_points(*stream.lane, [&](Block* block) { got.insert(block); });
    expect(moved == moves, "whether a point ended");
    expect(got == expected, "other blocks came out than whose points have ended");
    for (Block* block : got) free_.push_back(block);
    for (const Known& batch : batches_) {
      if (batch.blocks.empty() || got.count(batch.blocks.front()) == 0 || batch.left != 0) continue;
      for (const Place& place : batch.places) {
        expect(place.stream->finished >= place.work, "a block came out before its work had ended");
      }
    }
    forget_batches();
    return moved;
  }

  // Of those that are out, only that they were: their blocks are in others by and by.
  void forget_batches() {
    for (Known& batch : batches_) {
      if (batch.left == 0) batch.blocks.clear();
    }
  }

  // One look as the pool takes it, again while there is more.
  void poll() {
    for (bool again = true; again;) {
      again = false;
      bool ended = false;
      for (const auto& stream : streams_) again = ask(*stream) || again;
      for (const auto& stream : streams_) ended = end_points(*stream) || ended;
      again = again && ended;
    }
    for (const auto& stream : streams_) {
      if (!stream->waited_for()) continue;
      const EventRef& head = stream->log[stream->ended].event;
      expect(head == nullptr || !has_ended(head), "work that has ended was not found");
    }
  }

  bool ask(Stream& stream) {
    std::vector<Quarantine::Question> questions{{7, nullptr}};  // of others, which stay
    const bool more = Quarantine::ask(*stream.lane, questions);
    std::size_t run = 0;
    while (stream.ended + run < stream.log.size() && stream.log[stream.ended + run].event != nullptr) ++run;
    expect(questions.size() == 1 + std::min(run, kAsked) && questions[0].event == nullptr, "another number of questions");
    expect(more == (run > kAsked), "whether there is more to ask");
    for (std::size_t index = 1; index < questions.size() && problems == 0; ++index) {
      const bool right =
          questions[index].lane == stream.lane->index && questions[index].event == stream.log[stream.ended + index - 1].event;
      expect(right, "a question out of order");
    }
    for (std::size_t index = 1; index < questions.size(); ++index) {
      if (!ask_driver(questions[index].event)) break;
    }
    return more;
  }

  void wait_for_oldest() {
    const EventRef event = quarantine_.oldest(lanes_);
    std::uint64_t number = quarantine_.next_number();
    for (const auto& stream : streams_) {
      if (!stream->waited_for() || stream->log[stream->ended].event == nullptr) continue;
      number = std::min(number, batches_[stream->log[stream->ended].batch].number);
    }
    expect((event == nullptr) == (number == quarantine_.next_number()), "whether there is anything to wait for");
    if (event == nullptr) return;
    auto& [stream, work] = behind_.at(event.get());
    auto& waited = const_cast<Stream&>(*stream);
    waited.finished = std::max(waited.finished, work);
    expect(ask_driver(event), "an invented event does not end");
    bool ended = false, oldest = false;
    for (const auto& each : streams_) {
      if (each->waited_for()) {
        const Logged& head = each->log[each->ended];
        oldest = oldest || (head.event == event && batches_[head.batch].number == number);
      }
      ended = end_points(*each) || ended;
    }
    expect(oldest, "the oldest event is another's");
    expect(ended, "the oldest event is done, and nothing gets further");
  }

  // What can be seen from outside, against what is known here.
  void compare() {
    using State = Lane::State;
    std::size_t bytes = 0, deferred = 0, inside = 0;
    for (const Known& batch : batches_) {
      if (batch.left == 0) continue;
      bytes += batch.bytes;
      deferred += batch.deferred;
      ++inside;
    }
    expect(quarantine_.bytes() == bytes, "the bytes are wrong");
    expect(quarantine_.deferred_count() == deferred, "the deferred batches are miscounted");
    expect(quarantine_.empty() == (inside == 0), "whether it is empty");
    long working = 0;
    for (const auto& stream : streams_) {
      const Lane& lane = *stream->lane;
      working += (stream->state == State::held) + (stream->departure != nullptr);
      expect(lane.state.load() == stream->state, "a lane's state is another");
      expect(lane.departure == stream->departure, "a lane's departure is another");
      expect(lane.wait_at({nullptr, nullptr}) == wait_at(*stream, {}), "how the end of a point without an event gets known");
      expect(lanes_.find(stream->ref.key) == &lane, "a stream is not found");
      compare_points(*stream);
    }
    for (std::uintptr_t handle = 0x100; handle < 0x108; ++handle) {
      auto* const each = reinterpret_cast<CUstream>(handle);
      const auto found = by_handle_.find(each);
      expect(lanes_.find_held(each) == (found == by_handle_.end() ? nullptr : found->second->lane), "a held stream's handle");
    }
    expect(lanes_.any_work() == (working != 0), "streams that may work are miscounted");
    std::set<std::uint16_t> visited;
    lanes_.for_each_stream([&](const Lane& lane) { visited.insert(lane.index); });
    expect(visited == taken_, "other lanes are visited than those in use");
  }

  void compare_points(const Stream& stream) {
    const Lane& lane = *stream.lane;
    std::size_t index = stream.ended, unrecorded = 0;
    for (const Point& point : lane.points) {
      if (index == stream.log.size()) break;
      const Logged& logged = stream.log[index++];
      const std::uint64_t number = batches_[logged.batch].number;
      expect(point.event == logged.event && point.batch->number == number, "a point has another event or batch");
      unrecorded += logged.event == nullptr;
      expect(lane.wait_at(point) == wait_at(stream, logged), "how the end of a point gets known");
    }
    expect(lane.points.size() == stream.log.size() - stream.ended, "another number of points");
    expect(lane.unrecorded_count == unrecorded, "points without an event are miscounted");
  }

  static Wait wait_at(const Stream& stream, const Logged& logged) {
    if (logged.event != nullptr) return Wait::event;
    if (stream.state == Lane::State::held) return Wait::to_be_recorded;
    return stream.state == Lane::State::borrowed && stream.seen() ? Wait::until_seen : Wait::never;
  }

  // Everything ends, and all comes out but what waits for a stream that nobody knows.
  void drain() {
    while (!recordings_.empty()) end_record(false);
    for (const auto& stream : streams_) {
      stream->finished = stream->enqueued;
      if (stream->seen()) sign(*stream, record(*stream), quarantine_.next_number());
    }
    poll();
    compare();
    bool unseen = false;
    for (const auto& stream : streams_) {
      expect(!stream->seen() || !stream->waited_for(), "a point stays though all work has ended");
      unseen = unseen || (!stream->seen() && stream->waited_for());
    }
    expect(unseen || quarantine_.empty(), "blocks stay though all work has ended");
    for (std::size_t index = streams_.size(); index-- > 0;) {
      while (index < streams_.size() && !streams_[index]->waited_for()) end(*streams_[index]);
    }
    expect(!lanes_.any_work(), "streams may work that are gone");
    compare();
    if (unseen) return;
    for (const EventRef& event : all_events_) expect(event.use_count() <= 2, "an event is kept that nothing waits for");
  }

  Stream* of_key(std::uint64_t key) {
    for (const auto& stream : streams_) {
      if (stream->ref.key == key) return stream.get();
    }
    return nullptr;
  }

  Stream& of_lane(std::uint16_t index) {
    for (const auto& stream : streams_) {
      if (stream->lane->index == index) return *stream;
    }
    std::abort();
  }

  std::mt19937 random_;
  Driver driver_;  // never loaded
  EventPool events_{driver_, nullptr};
  LaneTable& lanes_ = *new LaneTable(true);  // never freed, as in a pool
  Quarantine quarantine_;
  std::unique_ptr<Block[]> blocks_;
  std::vector<Block*> free_;
  std::vector<std::unique_ptr<Stream>> streams_, gone_;
  std::set<std::uint16_t> taken_;
  std::map<CUstream, const Stream*> by_handle_;  // of held streams
  std::vector<Known> batches_;
  std::vector<Recording> recordings_;
  std::vector<EventRef> all_events_;
  std::unordered_map<const DeviceEvent*, std::pair<const Stream*, long>> behind_;
  std::uint64_t last_key_ = 0;
  std::uintptr_t last_event_ = 0;
};

// Where there was no memory for a stream, its lane is there for the next one: there are 65,533 numbers in all.
void numbers(bool again) {
  auto& lanes = *new LaneTable(false);
  constexpr std::uint64_t kStreams = 1000;
  for (std::uint64_t key = 1; key <= kStreams; ++key) {
    Lane* lane = nullptr;
    const auto get = [&] { lane = &lanes.get({key, reinterpret_cast<CUstream>(key)}); };
    if (again && key == 1) {
      get();
    } else {
      failing::at_each_place(get, [] {});
    }
    if (again) lanes.recycle(*lane);
  }
  const std::size_t used = lanes.size() - kFirstStreamLane, needed = again ? 1 : kStreams;
  if (used > needed) std::fprintf(stderr, "%zu lanes where %zu were needed\n", used, needed);
  expect(used == needed, "numbers of lanes are lost");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "model") == 0) {
    Machine(static_cast<unsigned>(std::atoi(argv[2]))).run(std::atol(argv[3]));
  } else if (argc == 3 && std::strcmp(argv[1], "numbers") == 0) {
    numbers(std::strcmp(argv[2], "again") == 0);
  } else {
    return 2;
  }
  std::printf("%d problems\n", problems);
  return problems == 0 ? 0 : 1;
}
