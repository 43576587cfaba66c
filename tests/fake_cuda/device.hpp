// The device behind the fake driver: work that ends only when a test says so, and captures that are lost exactly where
// the real driver loses them (docs/design/measured.md).
//
// An operation is a node that knows which operations come before it. A stream is the set of nodes that new work on it
// would come after (its front), an event is a copy of such a set. So "is this block safe on that stream?" is "are all
// operations on the block finished, or among the ancestors of the front?".
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "abi.hpp"
#include "pages.hpp"

namespace fake {

struct Node {
  bool host = false;  // a Python function on the stream: it needs the GIL to end
  bool done = false;
  std::vector<std::shared_ptr<Node>> before;
};
using NodeRef = std::shared_ptr<Node>;
using Front = std::vector<NodeRef>;

struct Stream;

struct Capture {
  unsigned long long id;
  CUstreamCaptureMode mode;
  int thread;
  std::set<Stream*> members;  // the origin and every stream that joined
  Stream* origin;
  bool lost = false;
  bool unjoined = false;  // there is work on a stream that joined, which the origin never waits for
};

struct Context {
  int device;
  Stream* legacy;
};

struct Stream {
  unsigned long long id;
  Context* context;
  bool blocking;  // takes part in the legacy stream's implicit order
  bool legacy = false;
  bool alive = true;
  std::uintptr_t handle = 0;
  Front front;
  std::deque<NodeRef> queue;
  Capture* capture = nullptr;
};

struct Event {
  Context* context;
  Front nodes;
  Capture* captured = nullptr;  // last recorded in a capture, which may have ended
};

inline int thread_number() {
  static std::atomic<int> next{1};
  thread_local const int mine = next++;
  return mine;
}
inline thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
inline thread_local std::vector<Context*> contexts;
inline thread_local bool in_host_function = false;

class Device {
 public:
  std::recursive_mutex mutex;
  std::map<std::string, long> calls;
  std::string trace;
  std::string violations;
  std::map<std::pair<int, int>, int> attributes;
  std::map<std::tuple<unsigned long long, int, int>, int> pointers;  // address, attribute, device that asks
  std::set<int> inactive;                                            // devices without a primary context
  struct Fault {
    long skip;
    CUresult result;
  };
  std::map<std::string, Fault> faults;
  std::map<std::string, void (*)()> hooks;  // run once, after the call of that name
  std::vector<Context*> primary;
  std::size_t memory_bytes = std::size_t{64} << 30;  // of each device
  std::size_t others_bytes = 0;                      // of it, which other processes have
  std::atomic<bool> hangs{false};                    // work does not end by being asked for
  Pages pages;
  // Those that were done: first byte, bytes, place, the handle of the stream, the device of the current context (-1: none), and
  // whether the GIL was held.
  std::vector<std::array<long long, 6>> prefetches;

  Device() {
    for (int number = 0; number < 2; ++number) {
      auto* context = new Context{number, nullptr};
      context->legacy = new_stream(context, true);
      context->legacy->legacy = true;
      primary.push_back(context);
    }
  }

  void blame(const std::string& what) { violations += what + "\n"; }
  Context* current() const { return contexts.empty() ? nullptr : contexts.back(); }

  Stream* new_stream(Context* context, bool blocking) {
    streams_.push_back(std::make_unique<Stream>());
    Stream* stream = streams_.back().get();
    stream->id = next_id_++;
    stream->context = context;
    stream->blocking = blocking;
    recent_.push_back(stream);
    return stream;
  }

  // Handles come back, the last one first; ids never do.
  Stream* create(Context* context, unsigned flags) {
    Stream* stream = new_stream(context, (flags & CU_STREAM_NON_BLOCKING) == 0);
    if (free_handles_.empty()) {
      stream->handle = next_handle_;
      next_handle_ += 0x100;
    } else {
      stream->handle = free_handles_.back();
      free_handles_.pop_back();
    }
    by_handle_[stream->handle] = stream;
    return stream;
  }

  void destroy(Stream* stream) {
    stream->alive = false;
    by_handle_.erase(stream->handle);
    free_handles_.push_back(stream->handle);
  }

  Stream* find(CUstream handle) {
    Context* context = current();
    if (handle == nullptr || handle == CU_STREAM_LEGACY) return context == nullptr ? nullptr : context->legacy;
    if (handle == CU_STREAM_PER_THREAD) {
      if (context == nullptr) return nullptr;
      Stream*& mine = per_thread_[{thread_number(), context}];
      if (mine == nullptr) mine = new_stream(context, true);
      return mine;
    }
    auto found = by_handle_.find(reinterpret_cast<std::uintptr_t>(handle));
    return found == by_handle_.end() ? nullptr : found->second;
  }

  Stream* by_id(unsigned long long id) { return id < streams_.size() + 1 && id > 0 ? streams_[id - 1].get() : nullptr; }

  // What new work on the stream would come after.
  Front front_of(const Stream* stream) {
    Front front = stream->front;
    auto add = [&](const Stream* other) { front.insert(front.end(), other->front.begin(), other->front.end()); };
    if (stream->legacy) {
      for (const Stream* other : recent_) {
        if (other->blocking && other != stream && other->context == stream->context) add(other);
      }
    } else if (stream->blocking) {
      add(stream->context->legacy);
    }
    std::erase_if(front, [](const NodeRef& node) { return node->done; });
    return front;
  }

  void wait(Stream* stream, const Front& nodes) {
    stream->front.insert(stream->front.end(), nodes.begin(), nodes.end());
    std::erase_if(stream->front, [](const NodeRef& node) { return node->done; });
  }

  // Work on a capturing stream goes into the graph: nothing runs. Returns the number of the operation, -1 for that.
  long enqueue(Stream* stream, bool host) {
    if (stream->capture != nullptr) {
      stream->capture->unjoined |= stream != stream->capture->origin;
      return -1;
    }
    auto node = std::make_shared<Node>();
    node->host = host;
    node->before = front_of(stream);
    stream->front = {node};
    stream->queue.push_back(node);
    nodes_.push_back(node);
    return static_cast<long>(nodes_.size()) - 1;
  }

  Node* node(long number) { return nodes_.at(static_cast<std::size_t>(number)).get(); }

  void finish(Node* node) {
    if (node->done) return;
    for (const NodeRef& each : Front(node->before)) finish(each.get());
    node->done = true;
    node->before.clear();
  }

  // Ends up to `count` operations of the stream, as far as nothing unfinished comes before them.
  long advance(Stream* stream, long count) {
    long ended = 0;
    while (ended < count && !stream->queue.empty()) {
      Node* first = stream->queue.front().get();
      const bool ready = std::all_of(first->before.begin(), first->before.end(), [](auto& n) { return n->done; });
      if (!first->done && !ready) break;
      if (!first->done) ++ended;
      finish(first);
      stream->queue.pop_front();
    }
    return ended;
  }

  void finish_all() {
    for (const NodeRef& each : nodes_) finish(each.get());
    for (auto& stream : streams_) {
      stream->queue.clear();
      stream->front.clear();
    }
  }

  Front everything(const Context* context) {
    Front all;
    for (auto& stream : streams_) {
      if (stream->context == context) all.insert(all.end(), stream->front.begin(), stream->front.end());
    }
    return all;
  }

  // True if new work on the stream would come after the operation.
  bool ordered(long number, const Stream* stream) {
    Node* wanted = node(number);
    if (wanted->done) return true;
    std::set<Node*> seen;
    Front open = front_of(stream);
    while (!open.empty()) {
      NodeRef next = open.back();
      open.pop_back();
      if (next.get() == wanted) return true;
      if (seen.insert(next.get()).second) open.insert(open.end(), next->before.begin(), next->before.end());
    }
    return false;
  }

  bool needs_host(const Front& nodes) {
    std::set<Node*> seen;
    Front open = nodes;
    while (!open.empty()) {
      NodeRef next = open.back();
      open.pop_back();
      if (!next->done && next->host) return true;
      if (seen.insert(next.get()).second) open.insert(open.end(), next->before.begin(), next->before.end());
    }
    return false;
  }

  // --- captures ---

  Capture* begin_capture(Stream* stream, CUstreamCaptureMode mode) {
    if (stream->capture != nullptr || stream->legacy) return nullptr;
    captures_.push_back(std::make_unique<Capture>(Capture{captures_.size() + 1, mode, thread_number(), {stream}, stream}));
    return stream->capture = captures_.back().get();
  }

  CUresult end_capture(Stream* stream) {
    Capture* capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) {
      lose(capture, "an end of a stream that joined it");
      return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    for (Stream* member : capture->members) member->capture = nullptr;
    if (capture->members.size() != 1) blame("a stream joined a graph behind the user's back");
    capture->members.clear();
    return capture->lost       ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
           : capture->unjoined ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                               : CUDA_SUCCESS;
  }

  // All that is over: with thousands of tests in one process, it would make every look slow.
  void forget() {
    nodes_.clear();
    std::erase_if(recent_, [](const Stream* stream) { return stream->handle != 0; });
    for (auto& capture : captures_) {
      for (Stream* member : capture->members) member->capture = nullptr;
      capture->members.clear();
    }
  }

  void lose(Capture* capture, const char* by) {
    if (!capture->lost && !capture->members.empty()) blame(std::string("a capture was lost by ") + by);
    capture->lost = true;
  }

  template <typename Choose>
  bool lose_if(const char* by, Choose choose) {
    bool any = false;
    for (auto& capture : captures_) {
      if (capture->members.empty() || !choose(*capture)) continue;
      lose(capture.get(), by);
      any = true;
    }
    return any;
  }

  // A call that no thread may make during a global capture, nor the capturing one during a thread-local capture,
  // unless it is in relaxed mode.
  bool unsafe(const char* by) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    return lose_if(by, [](const Capture& capture) {
      if (capture.mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
      if (capture.thread == thread_number()) return true;
      return capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    });
  }

  bool has_blocking_capture(const Context* context) const {
    return std::any_of(captures_.begin(), captures_.end(), [&](auto& capture) { return blocks(*capture, context); });
  }

  bool lose_blocking(const Context* context, const char* by) {
    return lose_if(by, [&](const Capture& capture) { return blocks(capture, context); });
  }

  bool lose_all(const Context* context, const char* by) {
    return lose_if(by, [&](const Capture& capture) { return capture.origin->context == context; });
  }

 private:
  static bool blocks(const Capture& capture, const Context* context) {
    return std::any_of(capture.members.begin(), capture.members.end(),
                       [&](const Stream* stream) { return stream->blocking && stream->context == context; });
  }

  std::vector<std::unique_ptr<Stream>> streams_;  // the stream with id n at n - 1; work of destroyed ones goes on
  std::vector<Stream*> recent_;                   // the ambient ones, and those made since `forget`
  std::map<std::uintptr_t, Stream*> by_handle_;
  std::vector<std::uintptr_t> free_handles_;
  std::map<std::pair<int, Context*>, Stream*> per_thread_;
  std::vector<NodeRef> nodes_;
  std::vector<std::unique_ptr<Capture>> captures_;
  unsigned long long next_id_ = 1;
  std::uintptr_t next_handle_ = 0x1000;
};

}  // namespace fake
