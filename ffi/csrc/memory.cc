#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

namespace nosa {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kTouchPerThread = size_t{8} << 20;  // below this a thread costs more than it saves
constexpr size_t kMaxTouchThreads = 16;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;  // "max" is no number: no limit
  return std::nullopt;
}

// The number after `key` in a file of "key value" lines.
std::optional<uint64_t> ReadField(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    uint64_t value = 0;
    if (words >> word >> value && word == key) return value;
  }
  return std::nullopt;
}

// Room under the limits of one control group and of all its parents.
uint64_t GroupRoom(const std::string& root, std::string group, const char* limit, const char* usage,
                   const char* reclaimable) {
  uint64_t room = std::numeric_limits<uint64_t>::max();
  while (true) {
    const std::string folder = root + group + "/";
    const auto max = ReadNumber(folder + limit);
    const auto used = ReadNumber(folder + usage);
    if (max && used) {
      const uint64_t cache = ReadField(folder + "memory.stat", reclaimable).value_or(0);
      const uint64_t held = *used > cache ? *used - cache : 0;
      room = std::min(room, *max > held ? *max - held : 0);
    }
    if (group.empty() || group == "/") return room;
    group.erase(group.find_last_of('/'));
  }
}

uint64_t ControlGroupRoom() {
  uint64_t room = std::numeric_limits<uint64_t>::max();
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // "hierarchy:controllers:/path"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      room = std::min(room, GroupRoom("/sys/fs/cgroup", group, "memory.max", "memory.current", "inactive_file"));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      room = std::min(room, GroupRoom("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes",
                                      "memory.usage_in_bytes", "total_inactive_file"));
    }
  }
  return room;
}

void Touch(std::byte* begin, std::byte* end, size_t stride) {
  for (std::byte* p = begin; p < end; p += stride) *const_cast<volatile std::byte*>(p) = std::byte{0};
}

}  // namespace

uint64_t AvailableBytes() {
  const auto kilobytes = ReadField("/proc/meminfo", "MemAvailable:");
  const uint64_t machine = kilobytes ? *kilobytes * 1024 : std::numeric_limits<uint64_t>::max();
  return std::min(machine, ControlGroupRoom());
}

std::string FormatBytes(uint64_t bytes) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.2f GiB (%llu bytes)", static_cast<double>(bytes) / (uint64_t{1} << 30),
                static_cast<unsigned long long>(bytes));
  return text;
}

Mapping::Mapping(size_t bytes) : bytes_(bytes), mapped_bytes_(RoundUp(bytes, sysconf(_SC_PAGESIZE))) {
  // One huge page more than needed is reserved (not touched), and what lies outside the aligned part given back.
  const size_t reserved = mapped_bytes_ + kHugePage;
  void* start = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) {
    throw HostMemoryError("host pool: the system refused to map " + FormatBytes(bytes) + ": " +
                          std::strerror(errno) + "; a limit on address space (ulimit -v) may apply");
  }
  std::byte* raw = static_cast<std::byte*>(start);
  const size_t head = RoundUp(reinterpret_cast<uintptr_t>(raw), kHugePage) - reinterpret_cast<uintptr_t>(raw);
  data_ = raw + head;
  if (head > 0) munmap(raw, head);
  if (kHugePage > head) munmap(data_ + mapped_bytes_, kHugePage - head);
  // A hint: where huge pages are switched off the slab works with small ones, only its set-up is slower.
  madvise(data_, mapped_bytes_, MADV_HUGEPAGE);

  const size_t stride = sysconf(_SC_PAGESIZE);
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t workers = std::clamp<size_t>(mapped_bytes_ / kTouchPerThread, 1, std::min(cores, kMaxTouchThreads));
  const size_t share = RoundUp(mapped_bytes_ / workers + 1, kHugePage);
  std::vector<std::thread> threads;
  for (size_t first = share; first < mapped_bytes_; first += share) {
    std::byte* const end = data_ + std::min(first + share, mapped_bytes_);
    try {
      threads.emplace_back(Touch, data_ + first, end, stride);
    } catch (const std::system_error&) {  // the limit on threads is reached
      Touch(data_ + first, end, stride);
    }
  }
  Touch(data_, data_ + std::min(share, mapped_bytes_), stride);
  for (std::thread& thread : threads) thread.join();
}

Mapping::~Mapping() { munmap(data_, mapped_bytes_); }

}  // namespace nosa
