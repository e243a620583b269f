// Kernels of ffi/csrc beside cudaMemcpyAsync of the same bytes, in CUDA graphs of the same form.
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -I ffi/csrc -isystem XLA_FFI_INCLUDE benchmarks/swap_graph.cu -o swap_graph
//   ./swap_graph [REPEATS]
//
// A graph holds one kind of call many times, one after the other. The graphs of a case are launched in turns and the
// medians of their times taken, so that a change of the machine's state meets all of them. Every copied byte is
// compared once. Prints JSON: microseconds per call. benchmarks/swap.py builds and runs this.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fetch_kernel.cuh"
#include "store_kernel.cuh"

using namespace nosa;

namespace {

constexpr size_t kPoolBytes = size_t{8} << 30;
constexpr int kPoolPlace = 0, kGeneration = 1;

void Require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Device memory for the length of a case.
template <typename T>
class Array {
 public:
  explicit Array(size_t size) : size_(size) { Require(cudaMalloc(&data_, size * sizeof(T)), "cudaMalloc"); }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    Require(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* get() const { return data_; }
  std::vector<T> Host() const {
    std::vector<T> values(size_);
    Require(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

// Pinned pages, each full of a pattern of its own, known to the kernels as pool (kPoolPlace, kGeneration).
struct Pool {
  std::byte* base;
  FaultTable* faults;

  Pool() {
    constexpr size_t kAlignment = 2 << 20;
    void* mapped = mmap(nullptr, kPoolBytes + kAlignment, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) std::perror("mmap"), std::exit(1);
    base = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(mapped) + kAlignment - 1) / kAlignment *
                                        kAlignment);
    madvise(base, kPoolBytes, MADV_HUGEPAGE);
    std::vector<std::thread> threads;
    for (size_t part = 0; part < 16; ++part) {
      threads.emplace_back([this, part] {
        for (size_t at = kPoolBytes / 16 * part; at < kPoolBytes / 16 * (part + 1); at += sizeof(uint64_t)) {
          const uint64_t pattern = (at + 1) * 0x9E3779B97F4A7C15u;
          std::memcpy(base + at, &pattern, sizeof(pattern));
        }
      });
    }
    for (auto& thread : threads) thread.join();
    Require(cudaHostRegister(base, kPoolBytes, cudaHostRegisterMapped), "cudaHostRegister");
    Require(cudaHostAlloc(&faults, sizeof(FaultTable), cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(static_cast<void*>(faults), 0, sizeof(FaultTable));
  }

  void SetPageBytes(int64_t page_bytes) const {
    const PoolView view{base, static_cast<int64_t>(kPoolBytes) / page_bytes, page_bytes, kGeneration};
    Require(cudaMemcpyToSymbol(pool_views, &view, sizeof(view), kPoolPlace * sizeof(view)), "pool view");
  }
};

// A row of equal calls, captured once.
class Graph {
 public:
  Graph(std::string name, int calls, cudaStream_t stream, const std::function<void(int)>& call)
      : name(std::move(name)), calls_(calls), stream_(stream) {
    cudaGraph_t graph;
    Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < calls; ++i) call(i);
    Require(cudaStreamEndCapture(stream, &graph), "capture");
    Require(cudaGraphInstantiate(&executable_, graph, 0), "instantiate");
    Require(cudaGraphDestroy(graph), "destroy");
  }

  void Time(cudaEvent_t begin, cudaEvent_t end) {
    float milliseconds = 0;
    Require(cudaEventRecord(begin, stream_), "event");
    Require(cudaGraphLaunch(executable_, stream_), "launch");
    Require(cudaEventRecord(end, stream_), "event");
    Require(cudaEventSynchronize(end), this->name.c_str());
    Require(cudaEventElapsedTime(&milliseconds, begin, end), "event");
    times_.push_back(milliseconds * 1e3 / calls_);
  }

  double Median() {
    std::sort(times_.begin(), times_.end());
    return times_[times_.size() / 2];
  }

  void Forget() { times_.clear(); }

  std::string name;

 private:
  int calls_;
  cudaStream_t stream_;
  cudaGraphExec_t executable_;
  std::vector<double> times_;
};

// One line of JSON with the medians of graphs that were launched in turns.
void Report(const std::string& head, std::vector<Graph>& graphs, int repeats, bool last) {
  cudaEvent_t begin, end;
  Require(cudaEventCreate(&begin), "event");
  Require(cudaEventCreate(&end), "event");
  for (auto& graph : graphs) graph.Time(begin, end);
  for (auto& graph : graphs) graph.Forget();  // that was to warm up
  for (int i = 0; i < repeats; ++i) {
    for (auto& graph : graphs) graph.Time(begin, end);
  }
  std::printf("  {%s", head.c_str());
  for (auto& graph : graphs) std::printf(", \"%s_us\": %.3f", graph.name.c_str(), graph.Median());
  std::printf("}%s\n", last ? "" : ",");
  std::fflush(stdout);
}

// `n` blocks for each of rows x heads lists: whole calls of swap_in, and of fetch_blocks that misses every block.
struct Case {
  int64_t rows, heads, n, page_bytes;
};

void Swaps(const Pool& pool, cudaStream_t stream, const Case& c, const std::vector<int>& n_ctas, int repeats,
           bool last) {
  pool.SetPageBytes(c.page_bytes);
  const int64_t lists = c.rows * c.heads, entries = lists * c.n, blocks = 2 * c.n;
  const size_t call_bytes = static_cast<size_t>(entries * c.page_bytes);
  // Two sets of blocks, wanted in turn by fetch_blocks: with as many slots as one of them has, every call misses all.
  std::vector<int32_t> first(entries), second(entries), places(kPoolBytes / c.page_bytes / c.heads);
  for (int64_t i = 0; i < entries; ++i) {
    first[i] = static_cast<int32_t>(i % c.n);
    second[i] = first[i] + static_cast<int32_t>(c.n);
  }
  std::iota(places.begin(), places.end(), 0);
  std::shuffle(places.begin(), places.end(), std::mt19937(7));
  places.resize(c.rows * blocks);  // pages from all over the pool
  const Array<int32_t> handle(std::vector<int32_t>{kPoolPlace, kGeneration}), want_first(first), want_second(second),
      table(places), count(std::vector<int32_t>(lists, static_cast<int32_t>(c.n))), step(std::vector<int32_t>{1}),
      fresh(std::vector<int32_t>(c.rows, INT32_MAX)), slot_ids(entries), counts(3 * lists), ages(entries),
      held(std::vector<int32_t>(entries, -1));
  Require(cudaMemset(ages.get(), 0, entries * sizeof(int32_t)), "cudaMemset");
  const Array<std::byte> cache(call_bytes);
  const TransferArgs swap{pool.faults, handle.get(), cache.get(), want_first.get(), want_first.get(), count.get(),
                          table.get(), {c.rows, c.heads, c.n, blocks, c.n, c.page_bytes, 0, 1}, Caller::kSwapIn};
  const auto fetch = [&](int call, int ctas) {
    const FetchArgs args{swap, {(call % 2 == 0 ? want_first : want_second).get(), step.get(), fresh.get(), table.get(),
                                slot_ids.get(), held.get(), ages.get(), counts.get(), counts.get() + lists,
                                counts.get() + 2 * lists}};
    Require(LaunchFetch(args, ctas, stream), "fetch_blocks");
  };
  const auto transfer = [&](int ctas) { TransferKernel<false, uint4><<<ctas, kTransferThreads, 0, stream>>>(swap); };

  const auto check = [&](const char* name, int64_t offset) {
    Require(cudaStreamSynchronize(stream), name);
    const auto got = cache.Host();
    const auto where = slot_ids.Host();
    for (int64_t i = 0; i < entries; ++i) {
      const int64_t list = i / c.n, place = places[list / c.heads * blocks + i % c.n + offset];
      const int64_t slot = std::strcmp(name, "swap_in") == 0 ? i % c.n : where[i];
      if (std::memcmp(got.data() + (list * c.n + slot) * c.page_bytes,
                      pool.base + (place * c.heads + list % c.heads) * c.page_bytes, c.page_bytes) != 0) {
        std::fprintf(stderr, "%s: block %ld of list %ld has the wrong bytes\n", name, i % c.n, list);
        std::exit(1);
      }
    }
    Require(cudaMemset(cache.get(), 0, call_bytes), "cudaMemset");
  };
  transfer(n_ctas.back());
  check("swap_in", 0);
  const bool fits = FitsFetchKernel(swap.sizes);
  for (int call = 0; fits && call < 2; ++call) {
    fetch(call, n_ctas.back());
    check("fetch_blocks", call * c.n);
  }

  const int calls = call_bytes <= (size_t{4} << 20) ? 200 : call_bytes <= (size_t{1} << 25) ? 40 : 8;
  std::vector<Graph> graphs;
  graphs.emplace_back("memcpy", calls, stream, [&](int) {
    Require(cudaMemcpyAsync(cache.get(), pool.base, call_bytes, cudaMemcpyHostToDevice, stream), "memcpy");
  });
  for (const int ctas : n_ctas) {
    const std::string suffix = n_ctas.size() == 1 ? "" : "_" + std::to_string(ctas);
    graphs.emplace_back("swap_in" + suffix, calls, stream, [&](int) { transfer(ctas); });
    if (fits) graphs.emplace_back("fetch_blocks" + suffix, calls, stream, [&](int call) { fetch(call, ctas); });
  }
  Report("\"call_bytes\": " + std::to_string(call_bytes) + ", \"page_bytes\": " + std::to_string(c.page_bytes), graphs,
         repeats, last);
}

__global__ void Nothing(const __grid_constant__ FetchArgs args) {
  if (args.transfer.sizes.rows < 0) __trap();
}

// What calls cost that move nothing: everything wanted is in a slot, no row has filled a block.
void Still(const Pool& pool, cudaStream_t stream, int64_t rows, int64_t slots, int repeats, bool last) {
  constexpr int64_t kHeads = 2, kWanted = 64, kPageBytes = 32768, kBlocks = 2048;
  constexpr int kCtas = 16, kCalls = 200, kLayers = 32;
  pool.SetPageBytes(kPageBytes);
  const int64_t lists = rows * kHeads;
  std::vector<int32_t> resident(lists * slots), wanted(lists * kWanted);
  for (size_t i = 0; i < resident.size(); ++i) resident[i] = static_cast<int32_t>(i % slots * 3);
  for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<int32_t>((i % kWanted * 7 + 3) % slots * 3);
  const Array<int32_t> handle(std::vector<int32_t>{kPoolPlace, kGeneration}), want(wanted), held(resident),
      table(std::vector<int32_t>(rows * kBlocks, 0)), step(std::vector<int32_t>{1}), ages(lists * slots),
      fresh(std::vector<int32_t>(rows, static_cast<int32_t>(kBlocks))), slot_ids(wanted.size()), counts(3 * lists),
      zeros(std::vector<int32_t>(lists, 0));
  const TransferArgs swap{pool.faults, handle.get(), nullptr, want.get(), want.get(), zeros.get(), table.get(),
                          {rows, kHeads, slots, kBlocks, kWanted, kPageBytes, 0, kLayers}, Caller::kFetchBlocks};
  const FetchArgs fetch{swap, {want.get(), step.get(), fresh.get(), table.get(), slot_ids.get(), held.get(), ages.get(),
                               counts.get(), counts.get() + lists, counts.get() + 2 * lists}};
  StoreArgs store{swap, fresh.get(), reinterpret_cast<const bool*>(zeros.get()), 0, kLayers, {}, {}};
  store.transfer.caller = Caller::kStoreBlocks;
  std::vector<Graph> graphs;
  graphs.emplace_back("empty_kernel", kCalls, stream, [&](int) {
    Nothing<<<kCtas, kTransferThreads, 0, stream>>>(fetch);
  });
  graphs.emplace_back("swap_in", kCalls, stream, [&](int) {
    TransferKernel<false, uint4><<<kCtas, kTransferThreads, 0, stream>>>(swap);
  });
  graphs.emplace_back("fetch_blocks", kCalls, stream, [&](int) {
    Require(LaunchFetch(fetch, kCtas, stream), "fetch_blocks");
  });
  graphs.emplace_back("store_blocks", kCalls, stream, [&](int) {
    StoreKernel<uint4><<<kCtas, kTransferThreads, 0, stream>>>(store);
  });
  Report("\"rows\": " + std::to_string(rows) + ", \"slots\": " + std::to_string(slots), graphs, repeats, last);
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 9;
  cudaStream_t stream;
  Require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const Pool pool;
  constexpr int64_t kPage = 32768;
  std::printf("{\n \"by_size\": [\n");
  for (int power = 18; power <= 28; ++power) {
    const int64_t pages = (int64_t{1} << power) / kPage, rows = std::clamp<int64_t>(pages / 2, 1, 16);
    Swaps(pool, stream, {rows, 2, pages / rows / 2, kPage}, {16}, repeats, power == 28);
  }
  std::printf(" ],\n \"by_thread_blocks\": [\n");
  for (const int power : {19, 21, 23, 25}) {
    const int64_t pages = (int64_t{1} << power) / kPage, rows = std::min<int64_t>(pages / 2, 16);
    Swaps(pool, stream, {rows, 2, pages / rows / 2, kPage}, {4, 8, 16, 32, 64, 128}, repeats, power == 25);
  }
  std::printf(" ],\n \"by_page\": [\n");
  for (const int64_t kib : {8, 16, 64}) {
    const int64_t pages = (int64_t{8} << 20) / (kib * 1024);
    Swaps(pool, stream, {16, 2, pages / 32, kib * 1024}, {16}, repeats, kib == 64);
  }
  std::printf(" ],\n \"nothing_moves\": [\n");
  for (const int64_t rows : {1, 16, 64}) {
    for (const int64_t slots : {128, 256}) Still(pool, stream, rows, slots, repeats, rows == 64 && slots == 256);
  }
  std::printf(" ]\n}\n");
  if (pool.faults->places[kPoolPlace].own.state != FaultRecord::kNone) {
    std::fprintf(stderr, "%s\n", Describe(pool.faults->places[kPoolPlace].own.fault).c_str());
    return 1;
  }
  return 0;
}
