#include "host_pool.h"

#include <cstring>
#include <limits>

namespace nosa {
namespace {

constexpr uint64_t kPercentUsable = 95;  // the rest is left to the process and the system

// Checked before anything is allocated; returns its first argument so that an initialiser list can call it.
uint64_t RequireRoom(uint64_t n_pages, uint64_t page_bytes, uint64_t available) {
  if (n_pages == 0 || page_bytes == 0) {
    throw std::invalid_argument("host pool: n_pages=" + std::to_string(n_pages) + " and page_bytes=" +
                                std::to_string(page_bytes) + " must both be at least 1");
  }
  const std::string shape = std::to_string(n_pages) + " pages of " + std::to_string(page_bytes) + " bytes";
  if (n_pages > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / page_bytes) {
    throw HostMemoryError("host pool: " + shape + " are more bytes than an address can name");
  }
  const uint64_t needed = n_pages * page_bytes;
  if (needed > available / 100 * kPercentUsable) {
    throw HostMemoryError("host pool: " + shape + " need " + FormatBytes(needed) + " of host memory; " +
                          FormatBytes(available) + " are available, of which " + std::to_string(kPercentUsable) +
                          " % may be used. Plan fewer or shorter requests.");
  }
  return n_pages;
}

std::string Text(Handle handle) {
  return "(" + std::to_string(handle.slot) + ", " + std::to_string(handle.generation) + ")";
}

}  // namespace

Pages::Pages(uint64_t n_pages, uint64_t page_bytes)
    : n_pages(n_pages), page_bytes(page_bytes), memory(n_pages * page_bytes) {}

Registry& Registry::Get() {
  static Registry* registry = new Registry;  // never destroyed: handlers may still run while the process exits
  return *registry;
}

Handle Registry::Add(std::shared_ptr<Pages> pages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    if (entries_.size() >= static_cast<size_t>(kMaxPools)) {
      throw std::runtime_error("host pool: " + std::to_string(kMaxPools) + " pools are open already; close some");
    }
    free_.push_back(static_cast<int32_t>(entries_.size()));
    entries_.emplace_back();
  }
  const int32_t slot = free_.back();
  free_.pop_back();
  Entry& entry = entries_[slot];
  entry.pages = std::move(pages);
  return Handle{slot, ++entry.generation};
}

void Registry::Remove(Handle handle) {
  std::shared_ptr<Pages> last;  // unmapped after the lock is released
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[handle.slot];
  if (entry.generation != handle.generation) return;
  last = std::move(entry.pages);
  entry.pages = nullptr;
  // A place whose generations are used up is retired instead of letting an old handle become valid again.
  if (entry.generation != std::numeric_limits<int32_t>::max()) free_.push_back(handle.slot);
}

PagesInUse Registry::Use(Handle handle) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handle.slot < 0 || handle.slot >= static_cast<int32_t>(entries_.size())) return {};
  const Entry& entry = entries_[handle.slot];
  if (entry.generation != handle.generation || entry.pages == nullptr) return {};
  // Taken before another thread can change the generation: who renews a handle then waits for this hold.
  return {entry.pages, std::shared_lock<std::shared_mutex>(entry.pages->in_use)};
}

Handle Registry::Renew(Handle handle) {
  std::shared_ptr<Pages> pages;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = entries_[handle.slot];
    if (entry.generation != handle.generation || entry.pages == nullptr) {
      throw PoolClosedError("host pool " + Text(handle) + " is closed");
    }
    if (entry.generation == std::numeric_limits<int32_t>::max()) {
      throw std::runtime_error("host pool " + Text(handle) + " has no further handle; close it and make another");
    }
    handle.generation = ++entry.generation;
    pages = entry.pages;
  }
  const std::unique_lock<std::shared_mutex> idle(pages->in_use);
  return handle;
}

HostPool::HostPool(uint64_t n_pages, uint64_t page_bytes, uint64_t available_bytes)
    : n_pages(RequireRoom(n_pages, page_bytes, available_bytes)), page_bytes(page_bytes) {
  pages_ = std::make_shared<Pages>(n_pages, page_bytes);
  counters_ = pages_->counters;
  handle_ = Registry::Get().Add(pages_);
}

HostPool::~HostPool() { Close(); }

void HostPool::Close() {
  std::shared_ptr<Pages> last;
  Handle handle{};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    last = std::move(pages_);
    pages_ = nullptr;
    handle = handle_;
  }
  if (last != nullptr) Registry::Get().Remove(handle);
}

Handle HostPool::handle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return handle_;
}

void HostPool::Renew() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pages_ == nullptr) throw PoolClosedError("host pool " + Text(handle_) + " is closed");
  handle_ = Registry::Get().Renew(handle_);
}

bool HostPool::closed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pages_ == nullptr;
}

std::shared_ptr<Pages> HostPool::Open() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pages_ == nullptr) throw PoolClosedError("host pool " + Text(handle_) + " is closed");
  return pages_;
}

std::byte* HostPool::CheckedPage(const Pages& pages, int64_t index) const {
  if (index < 0 || static_cast<uint64_t>(index) >= n_pages) {
    throw std::out_of_range("page " + std::to_string(index) + " is outside the host pool's " +
                            std::to_string(n_pages) + " pages");
  }
  return pages.page(static_cast<uint64_t>(index));
}

void HostPool::ReadPage(int64_t index, std::byte* destination) const {
  const auto pages = Open();
  std::memcpy(destination, CheckedPage(*pages, index), page_bytes);
}

void HostPool::WritePage(int64_t index, const std::byte* source) {
  const auto pages = Open();
  std::memcpy(CheckedPage(*pages, index), source, page_bytes);
}

}  // namespace nosa
