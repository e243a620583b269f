// Anonymous host memory for a slab, and how much of it this process may still take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace nosa {

// Raised as nosa_jax.ffi.HostMemoryError (a MemoryError); the message names the bytes needed and available.
class HostMemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Bytes that can still be taken without swapping: the least of the kernel's MemAvailable and the room under the
// memory limit of every control group above this process (v1 and v2). Page cache that can be dropped counts as room.
// Both roots are where the system has these files; a test may have its own.
uint64_t AvailableBytes(const std::string& proc_root, const std::string& cgroup_root);

// "12.3 GiB (13207024435 bytes)"
std::string FormatBytes(uint64_t bytes);

// `bytes` of zeroed memory, aligned to the huge page size, asked to be huge pages and touched by several threads so
// that no page fault is left for later. Unmapped when destroyed. Throws HostMemoryError.
class Mapping {
 public:
  explicit Mapping(size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  size_t mapped_bytes_ = 0;
};

}  // namespace nosa
