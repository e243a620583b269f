// Pages of host memory and the process-wide table through which handlers find them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "handle.h"
#include "memory.h"

namespace nosa {

struct PoolCounters {
  std::atomic<uint64_t> pages_read{0};
  std::atomic<uint64_t> pages_written{0};
  std::atomic<uint64_t> read_calls{0};
  std::atomic<uint64_t> write_calls{0};
};

// `n_pages` pages of `page_bytes` each in one slab. Handlers in flight share its ownership.
struct Pages {
  Pages(uint64_t n_pages, uint64_t page_bytes);

  std::byte* page(uint64_t index) const { return memory.data() + index * page_bytes; }

  const uint64_t n_pages;
  const uint64_t page_bytes;
  const Mapping memory;
  mutable std::shared_mutex in_use;  // held, shared, by every handler that touches the pages
  // Shared, so that statistics stay readable after the slab is gone.
  const std::shared_ptr<PoolCounters> counters = std::make_shared<PoolCounters>();
};

// A handler's hold on the pages it found; no pages if its handle names no open pool.
struct PagesInUse {
  std::shared_ptr<Pages> pages;
  std::shared_lock<std::shared_mutex> lock;
};

class PoolClosedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thread-safe table of the open pools of this process.
class Registry {
 public:
  static Registry& Get();

  // Throws std::runtime_error when kMaxPools pools are open.
  Handle Add(std::shared_ptr<Pages> pages);
  void Remove(Handle handle);
  PagesInUse Use(Handle handle) const;
  // The pool's next handle; the old one is refused from now on, and no handler that found the pages by it is still
  // running on return. Throws PoolClosedError.
  Handle Renew(Handle handle);

 private:
  struct Entry {
    std::shared_ptr<Pages> pages;
    int32_t generation = 0;
  };
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<int32_t> free_;
};

// The owner that Python holds. Closing twice is allowed; reading or writing a closed pool throws PoolClosedError.
class HostPool {
 public:
  // Refuses with HostMemoryError, before anything is allocated, what exceeds 95 % of `available_bytes`.
  HostPool(uint64_t n_pages, uint64_t page_bytes, uint64_t available_bytes);
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  void Close();
  bool closed() const;
  Handle handle() const;
  // Makes every handle given out so far invalid; the pages keep their contents. Throws PoolClosedError.
  void Renew();
  const PoolCounters& counters() const { return *counters_; }

  // Copies one page out or in. Throws PoolClosedError, std::out_of_range.
  void ReadPage(int64_t index, std::byte* destination) const;
  void WritePage(int64_t index, const std::byte* source);

  // The slab's address, for registering it with a device. Throws PoolClosedError.
  std::byte* base() const { return Open()->memory.data(); }

  const uint64_t n_pages;
  const uint64_t page_bytes;

 private:
  std::shared_ptr<Pages> Open() const;
  std::byte* CheckedPage(const Pages& pages, int64_t index) const;

  mutable std::mutex mutex_;
  std::shared_ptr<Pages> pages_;
  std::shared_ptr<PoolCounters> counters_;
  Handle handle_;
};

}  // namespace nosa
