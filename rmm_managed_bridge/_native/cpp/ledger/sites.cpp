#include "ledger/sites.hpp"

#include <mutex>
#include <new>

namespace rmm_bridge {

namespace {
constexpr std::uint32_t kFirst = Sites::kOther + 1;
}

std::uint32_t Sites::intern(const Text& file, const Text& function, int line, bool library) noexcept {
  std::scoped_lock lock(lock_);
  try {
    return add(file, function, line, library);
  } catch (const std::bad_alloc&) {
    return kOther;
  }
}

std::uint32_t Sites::intern_via(std::uint32_t site, std::uint32_t via) noexcept {
  if (site < kFirst || via < kFirst) return site;
  std::scoped_lock lock(lock_);
  Place place = places_[site - kFirst];
  place.via = via;
  if (auto found = index_.find(place); found != index_.end()) return found->second;
  if (pairs_ >= kMostPairs) return site;
  try {
    const std::uint32_t id = add(place);
    ++pairs_;
    return id;
  } catch (const std::bad_alloc&) {
    return site;
  }
}

std::uint32_t Sites::intern_thread(std::string_view name) noexcept {
  std::scoped_lock lock(lock_);
  try {
    const std::string file = "native thread " + std::string(name);
    const Text text{file, 1}, nothing{{}, 1};
    const Name *known = find(text), *function = find(nothing);
    const bool there = known != nullptr && function != nullptr && index_.contains({known, function, 0});
    if (!there && threads_ >= kMostThreads) return kNative;
    const std::uint32_t id = add(text, nothing, 0, false);
    if (!there && id != kOther) ++threads_;
    return id == kOther ? kNative : id;
  } catch (const std::bad_alloc&) {
    return kNative;
  }
}

std::uint32_t Sites::add(const Text& file, const Text& function, int line, bool library) {
  const Name* known_file = find(file);
  const Name* known_function = find(function);
  if (known_file != nullptr && known_function != nullptr) {
    if (auto found = index_.find({known_file, known_function, line, library}); found != index_.end()) return found->second;
  }
  // All that is refused is refused before anything is kept: a full table does not grow by what it has no room for.
  const bool generated = file.size() > 0 && file.at(0) == '<';
  const std::size_t text_bytes =
      (known_file == nullptr ? file.bytes.size() : 0) + (known_function == nullptr ? function.bytes.size() : 0);
  if (file.width == 0 || function.width == 0 || places_.size() - pairs_ >= kMost || (generated && generated_ >= kMostGenerated) ||
      (library && library_ >= kMostLibrary) || file.bytes.size() > kLongestText || function.bytes.size() > kLongestText ||
      text_bytes > kMostText - text_bytes_) {
    return kOther;
  }
  const std::uint32_t id = add({keep(file), keep(function), line, library});
  if (generated) ++generated_;
  if (library) ++library_;
  return id;
}

std::uint32_t Sites::add(const Place& place) {
  const auto id = static_cast<std::uint32_t>(places_.size()) + kFirst;
  places_.push_back(place);
  try {
    index_.emplace(place, id);
  } catch (...) {
    places_.pop_back();
    throw;
  }
  return id;
}

const Sites::Name* Sites::find(const Text& text) const {
  const auto found = names_.find(text);
  return found == names_.end() ? nullptr : &*found;
}

const Sites::Name* Sites::keep(const Text& text) {
  if (const Name* known = find(text); known != nullptr) return known;
  const Name* kept = &*names_.insert({std::string(text.bytes), text.width}).first;
  text_bytes_ += text.bytes.size();
  return kept;
}

Sites::Site Sites::at(std::uint32_t id) noexcept {
  std::scoped_lock lock(lock_);
  if (id < kFirst) return {};
  const Place& place = places_[id - kFirst];
  return {*place.file, *place.function, place.line, place.library, place.via};
}

std::size_t Sites::overhead_bytes() noexcept {
  constexpr std::size_t kNode = 2 * sizeof(void*);
  std::scoped_lock lock(lock_);
  return text_bytes_ + names_.size() * (sizeof(Name) + kNode) + names_.bucket_count() * sizeof(void*) +
         places_.size() * (2 * sizeof(Place) + sizeof(std::uint64_t) + kNode) + index_.bucket_count() * sizeof(void*);
}

}  // namespace rmm_bridge
