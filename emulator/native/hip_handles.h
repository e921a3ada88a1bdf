// HIP's live opaque handles, so that a stale one is an error instead of a crash.
#pragma once

#include <mutex>
#include <set>

namespace hfemu {

// Never destroyed: modules may release handles from static destructors.
template <class Handle>
class LiveSet {
 public:
  Handle* add(Handle* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    return *live_.insert(handle).first;
  }
  Handle* create() { return add(new Handle); }
  bool destroy(Handle* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!live_.erase(handle)) return false;
    delete handle;
    return true;
  }
  bool holds(Handle* handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_.count(handle) != 0;
  }

 private:
  std::mutex mutex_;
  std::set<Handle*> live_;
};

}  // namespace hfemu
