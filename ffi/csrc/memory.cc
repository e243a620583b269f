#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

namespace nosa {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kTouchPerThread = size_t{8} << 20;  // below this a thread costs more than it saves
constexpr size_t kMaxTouchThreads = 16;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// All of a file, whatever size the system reports for it; empty if it cannot be read.
std::string ReadFile(const std::string& path) {
  std::string text;
  std::FILE* const file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return text;
  char piece[4096];
  for (size_t n = 0; (n = std::fread(piece, 1, sizeof(piece), file)) > 0;) text.append(piece, n);
  std::fclose(file);
  return text;
}

// The decimal number that the text begins with, after blanks; none if there is another character in it ("max").
std::optional<uint64_t> ParseNumber(const char* text) {
  while (*text == ' ' || *text == '\t') ++text;
  if (*text < '0' || *text > '9') return std::nullopt;
  char* end = nullptr;
  errno = 0;
  const uint64_t value = std::strtoull(text, &end, 10);
  if (errno != 0 || (*end != '\0' && *end != ' ' && *end != '\t' && *end != '\n')) return std::nullopt;
  return value;
}

std::optional<uint64_t> ReadNumber(const std::string& path) { return ParseNumber(ReadFile(path).c_str()); }

// The number after `key` in a file of "key value" lines.
std::optional<uint64_t> ReadField(const std::string& path, const std::string& key) {
  const std::string text = "\n" + ReadFile(path);
  size_t at = 0;
  while ((at = text.find("\n" + key, at)) != std::string::npos) {
    at += key.size() + 1;
    if (text[at] == ' ' || text[at] == '\t') return ParseNumber(text.c_str() + at);
  }
  return std::nullopt;
}

// Room under the limits of one control group and of all its parents. A limit of 0 is none: this process could not run.
uint64_t GroupRoom(const std::string& root, std::string group, const char* limit, const char* usage,
                   const char* reclaimable) {
  uint64_t room = std::numeric_limits<uint64_t>::max();
  if (group.find("/..") != std::string::npos) group.clear();  // outside of what this process can see
  while (true) {
    const std::string folder = root + group + "/";
    const auto max = ReadNumber(folder + limit);
    const auto used = ReadNumber(folder + usage);
    if (max && *max > 0 && used) {
      const uint64_t cache = ReadField(folder + "memory.stat", reclaimable).value_or(0);
      const uint64_t held = *used > cache ? *used - cache : 0;
      room = std::min(room, *max > held ? *max - held : 0);
    }
    if (group.empty() || group == "/") return room;
    group.erase(group.find_last_of('/'));
  }
}

uint64_t ControlGroupRoom(const std::string& list, const std::string& root) {
  uint64_t room = std::numeric_limits<uint64_t>::max();
  const std::string text = ReadFile(list);
  for (size_t start = 0; start < text.size();) {  // lines of "hierarchy:controllers:/path"
    const size_t end = std::min(text.find('\n', start), text.size());
    const std::string line = text.substr(start, end - start);
    start = end + 1;
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || second + 1 >= line.size() || line[second + 1] != '/') continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      room = std::min(room, GroupRoom(root, group, "memory.max", "memory.current", "inactive_file"));
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      room = std::min(room, GroupRoom(root + "/memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                      "total_inactive_file"));
    }
  }
  return room;
}

void Touch(std::byte* begin, std::byte* end, size_t stride) {
  for (std::byte* p = begin; p < end; p += stride) *const_cast<volatile std::byte*>(p) = std::byte{0};
}

}  // namespace

uint64_t AvailableBytes(const std::string& proc_root, const std::string& cgroup_root) {
  const auto kilobytes = ReadField(proc_root + "/meminfo", "MemAvailable:");
  const uint64_t machine = kilobytes ? *kilobytes * 1024 : std::numeric_limits<uint64_t>::max();
  return std::min(machine, ControlGroupRoom(proc_root + "/self/cgroup", cgroup_root));
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
