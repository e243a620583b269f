// Does it matter to a GPU how host memory was pinned, and over how much of it the pages that it reads are spread?
//
//   nvcc -std=c++17 -O3 -arch=sm_90 benchmarks/host_mapping.cu -o host_mapping
//   ./host_mapping [GIB] [REPEATS]
//
// GIB of host memory (48 unless given) are taken in three ways: anonymous memory with huge pages where the system
// grants them, registered (as the host pool does), the same from hugetlbfs, and by cudaHostAlloc. Within the first 1,
// 2, 4 ... GIB of each: the time of a read that depends on the one before, at random places, and the rate at which 16
// blocks of threads copy random pages of 16 KiB, 64 and 1024 a launch. Every page has its number in its first word,
// which is compared. Prints JSON; "null" stands for memory that was refused.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

namespace {

constexpr size_t kGiB = size_t{1} << 30;
constexpr size_t kPage = 16 << 10;
constexpr size_t kHugePage = 2 << 20;
constexpr int kChase = 4096;  // dependent reads of a launch
constexpr int kBlocks = 16, kThreads = 512;

void Require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Reads the first words of pages, each after the one before has come. One thread.
__global__ void Chase(const std::byte* base, const uint32_t* places, uint64_t* sum) {
  __shared__ uint32_t near[kChase];  // so that nothing but host memory is waited for
  for (int i = 0; i < kChase; ++i) near[i] = places[i];
  uint64_t total = 0;
  for (int i = 0; i < kChase; ++i) {
    // The sum's highest bit is 0, which only its reader knows.
    const size_t place = near[i] + (total >> 63);
    total += *reinterpret_cast<const volatile uint64_t*>(base + place * kPage);
  }
  *sum = total;
}

// Copies pages to places in turn.
__global__ void Gather(const std::byte* base, const uint32_t* places, int n, uint4* out) {
  constexpr int kPageWords = kPage / sizeof(uint4), kWords = kPageWords / kThreads;
  for (int page = blockIdx.x; page < n; page += gridDim.x) {
    const uint4* from = reinterpret_cast<const uint4*>(base + size_t{places[page]} * kPage);
    uint4 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldcv(from + i * kThreads + threadIdx.x);
#pragma unroll
    for (int i = 0; i < kWords; ++i) out[size_t(page) * kPageWords + i * kThreads + threadIdx.x] = words[i];
  }
}

struct Memory {
  const char* name;
  std::byte* base = nullptr;
  double seconds = 0;

  Memory(const char* name, size_t bytes) : name(name), bytes_(bytes) {
    const auto start = std::chrono::steady_clock::now();
    const std::string_view kind = name;
    if (kind == "cudaHostAlloc") {
      if (cudaHostAlloc(&base, bytes, cudaHostAllocMapped) != cudaSuccess) cudaGetLastError(), base = nullptr;
    } else {
      Map(kind == "hugetlbfs, registered" ? MAP_HUGETLB : MAP_NORESERVE);
    }
    if (base != nullptr) Number();
    if (base != nullptr && mapped_ != nullptr &&
        cudaHostRegister(base, bytes, cudaHostRegisterMapped) != cudaSuccess) {
      cudaGetLastError();
      base = nullptr;
    }
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  ~Memory() {
    if (base != nullptr && mapped_ == nullptr) cudaFreeHost(base);
    if (base != nullptr && mapped_ != nullptr) cudaHostUnregister(base);
    if (mapped_ != nullptr) munmap(mapped_, bytes_ + kHugePage);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

 private:
  void Map(int flags) {
    void* found = mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (found == MAP_FAILED) return;
    mapped_ = found;
    base = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(found) + kHugePage - 1) / kHugePage * kHugePage);
    if (flags == MAP_NORESERVE) madvise(base, bytes_, MADV_HUGEPAGE);
  }

  // Write every page's number into it, and so touch all of them.
  void Number() const {
    std::vector<std::thread> threads;
    const size_t pages = bytes_ / kPage, share = pages / kBlocks + 1;
    for (size_t first = 0; first < pages; first += share) {
      threads.emplace_back([=] {
        for (size_t page = first; page < std::min(first + share, pages); ++page) {
          for (size_t at = 0; at < kPage; at += 4096) *reinterpret_cast<uint64_t*>(base + page * kPage + at) = page;
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }

  size_t bytes_;
  void* mapped_ = nullptr;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <typename Launch>
double MedianMicroseconds(int repeats, Launch launch) {
  cudaEvent_t begin, end;
  Require(cudaEventCreate(&begin), "event");
  Require(cudaEventCreate(&end), "event");
  std::vector<double> taken;
  for (int i = 0; i <= repeats; ++i) {
    float milliseconds = 0;
    Require(cudaEventRecord(begin), "event");
    launch(i);
    Require(cudaEventRecord(end), "event");
    Require(cudaEventSynchronize(end), "a launch");
    Require(cudaEventElapsedTime(&milliseconds, begin, end), "event");
    if (i > 0) taken.push_back(milliseconds * 1e3);  // the first one is to warm up
  }
  Require(cudaEventDestroy(begin), "event");
  Require(cudaEventDestroy(end), "event");
  return Median(taken);
}

// Random pages of the first `bytes`, others in each of `lists` lists, on the device.
class Places {
 public:
  Places(size_t bytes, int lists, int length, uint64_t seed) : length_(length), host_(size_t(lists) * length) {
    std::mt19937_64 random(seed);
    for (auto& place : host_) place = random() % (bytes / kPage);
    Require(cudaMalloc(&device_, host_.size() * sizeof(uint32_t)), "cudaMalloc");
    Require(cudaMemcpy(device_, host_.data(), host_.size() * sizeof(uint32_t), cudaMemcpyHostToDevice), "places");
  }
  ~Places() { cudaFree(device_); }
  const uint32_t* operator[](int list) const { return device_ + size_t(list) * length_; }
  const uint32_t* Host(int list) const { return host_.data() + size_t(list) * length_; }

 private:
  int length_;
  std::vector<uint32_t> host_;
  uint32_t* device_;
};

void Measure(const Memory& memory, size_t bytes, int repeats, bool last) {
  uint64_t* sum;
  uint4* out;
  constexpr int kMost = 1024;
  Require(cudaMalloc(&sum, sizeof(uint64_t)), "cudaMalloc");
  Require(cudaMalloc(&out, kMost * kPage), "cudaMalloc");
  const Places chased(bytes, repeats + 1, kChase, 1);
  const double chase = MedianMicroseconds(repeats, [&](int i) { Chase<<<1, 1>>>(memory.base, chased[i], sum); });
  uint64_t found, expected = 0;
  Require(cudaMemcpy(&found, sum, sizeof(found), cudaMemcpyDeviceToHost), "sum");
  for (int i = 0; i < kChase; ++i) expected += chased.Host(repeats)[i];
  if (found != expected) std::fprintf(stderr, "wrong words were read\n"), std::exit(1);
  std::printf("    {\"gib\": %zu, \"dependent_read_ns\": %.1f", bytes / kGiB, chase * 1e3 / kChase);
  for (const int n : {64, kMost}) {
    const Places places(bytes, repeats + 1, n, 2);
    const double time = MedianMicroseconds(
        repeats, [&](int i) { Gather<<<kBlocks, kThreads>>>(memory.base, places[i], n, out); });
    std::vector<uint64_t> pages(n * kPage / sizeof(uint64_t));
    Require(cudaMemcpy(pages.data(), out, n * kPage, cudaMemcpyDeviceToHost), "pages");
    for (int page = 0; page < n; ++page) {
      if (pages[page * (kPage / sizeof(uint64_t))] != places.Host(repeats)[page]) {
        std::fprintf(stderr, "a wrong page was copied\n"), std::exit(1);
      }
    }
    std::printf(", \"copy_%d_us\": %.2f, \"copy_%d_gb_per_s\": %.2f", n, time, n, n * kPage / time / 1e3);
  }
  std::printf("}%s\n", last ? "" : ",");
  std::fflush(stdout);
  Require(cudaFree(sum), "cudaFree");
  Require(cudaFree(out), "cudaFree");
}

}  // namespace

int main(int argc, char** argv) {
  const size_t gib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 48;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 15;
  if (gib < 1 || repeats < 1) std::fprintf(stderr, "usage: host_mapping [GIB >= 1] [REPEATS >= 1]\n"), std::exit(2);
  Require(cudaFree(nullptr), "CUDA");
  std::printf("{\n");
  const char* const kinds[] = {"huge pages, registered", "hugetlbfs, registered", "cudaHostAlloc"};
  for (const char* const kind : kinds) {
    const Memory memory(kind, gib * kGiB);
    const char* const comma = kind == kinds[2] ? "" : ",";
    if (memory.base == nullptr) {
      std::printf(" \"%s\": null%s\n", kind, comma);
      continue;
    }
    std::printf(" \"%s\": {\"seconds\": %.2f, \"within\": [\n", kind, memory.seconds);
    for (size_t part = 1;; part *= 2) {
      Measure(memory, std::min(part, gib) * kGiB, repeats, part >= gib);
      if (part >= gib) break;
    }
    std::printf("  ]}%s\n", comma);
  }
  std::printf("}\n");
  return 0;
}
