// The kernel of swap_in and write_pages: gathers or scatters pinned host pages through unified addressing.
//
// The bytes to move are cut into runs, the kInFlight loads of every lane of a warp, which lie side by side in a page:
// 4 KiB with 16-byte loads. The runs are shared evenly among the CTAs. A CTA resolves its next entries (list -> page
// table -> addresses) one per thread; its warps then stream their runs, each at its own pace. 16 CTAs of 256 threads
// keep 512 KiB in flight, several times what the link needs, and leave the rest of the GPU to other kernels.
//
// Included by one translation unit only: the tables of pools below are its own.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <cub/block/block_scan.cuh>

#include "cuda_pool.h"
#include "handlers.h"

namespace nosa {

constexpr int kTransferThreads = 256;
constexpr int kInFlight = 8;
constexpr int kHeadsPerThread = 4;
constexpr int kLanes = 32;

static __device__ PoolView pool_views[kMaxPools];
static __device__ DeviceCounts pool_counts[kMaxPools];  // apart: their traffic must not slow the reading of the views

struct TransferArgs {
  FaultTable* faults;
  const int32_t* handle;
  std::byte* cache;
  const int32_t* block;
  const int32_t* slot;
  const int32_t* count;
  const int32_t* page_table;
  TransferSizes sizes{};
};

struct Addresses {
  std::byte* page;  // null: an entry that is out of range, already reported
  std::byte* slot;
};

inline __device__ void Report(FaultRecord* record, const Fault& fault) {
  if (atomicCAS(&record->state, FaultRecord::kNone, FaultRecord::kBeingWritten) != FaultRecord::kNone) return;
  record->fault = fault;
  __threadfence_system();
  *static_cast<volatile int32_t*>(&record->state) = FaultRecord::kReady;
}

// The pool that a place of the table holds now; nothing if there is no such place.
inline __device__ PoolView FetchPool(int32_t slot) {
  PoolView view{};
  if (slot >= 0 && slot < kMaxPools) {
    static_assert(sizeof(PoolView) == 2 * sizeof(uint4));
    const auto* const halves = reinterpret_cast<const uint4*>(&pool_views[slot]);
    const uint4 loaded[2] = {__ldcv(halves), __ldcv(halves + 1)};  // it may change while kernels run
    memcpy(&view, loaded, sizeof(PoolView));
  }
  return view;
}

// Whether the handle names that pool and its pages have the size of the cache's; if not, the fault is recorded.
inline __device__ bool CheckPool(const TransferArgs& args, const PoolView& view, bool writes) {
  const int32_t slot = args.handle[0], generation = args.handle[1];
  Fault fault{FaultKind::kHandle, writes, slot, generation, 0, 0, 0, 0, 0, 0};
  FaultRecord* record = nullptr;
  if (slot < 0 || slot >= kMaxPools) {
    record = &args.faults->stray;
  } else if (generation < 1 || view.generation != generation) {
    record = &args.faults->places[slot].stale;
  } else if (view.page_bytes != args.sizes.page_bytes) {
    fault.kind = FaultKind::kPageSize;
    fault.value = args.sizes.page_bytes;
    fault.limit = view.page_bytes;
    record = &args.faults->places[slot].own;
  }
  if (record != nullptr && blockIdx.x == 0) Report(record, fault);
  return record == nullptr;
}

// Where entry j of list h (row * K + head) lies on both sides, or null addresses after the fault was recorded.
inline __device__ Addresses Resolve(const TransferArgs& args, const PoolView& pool, int64_t h, int64_t j,
                                    bool writes) {
  const TransferSizes& sizes = args.sizes;
  const auto n_heads = static_cast<uint32_t>(sizes.heads);
  const int64_t row = static_cast<uint32_t>(h) / n_heads, head = static_cast<uint32_t>(h) % n_heads;
  const int32_t block = args.block[h * sizes.entries + j], slot = args.slot[h * sizes.entries + j];
  const auto fail = [&](FaultKind kind, int64_t value, int64_t limit, int64_t page) {
    Report(&args.faults->places[args.handle[0]].own,
           Fault{kind, writes, args.handle[0], args.handle[1], row, head, value, limit, block, page});
    return Addresses{nullptr, nullptr};
  };
  if (block < 0 || block >= sizes.blocks) return fail(FaultKind::kBlock, block, sizes.blocks, 0);
  if (slot < 0 || slot >= sizes.slots) return fail(FaultKind::kSlot, slot, sizes.slots, 0);
  const int32_t place = args.page_table[row * sizes.blocks + block];
  const int64_t page = (place * sizes.n_layers + sizes.layer) * sizes.heads + head;
  if (place < 0 || page >= pool.n_pages) return fail(FaultKind::kPage, place, pool.n_pages, page);
  return {pool.base + page * sizes.page_bytes, args.cache + (h * sizes.slots + slot) * sizes.page_bytes};
}

// One run, by one warp: units [first, first + kInFlight * kLanes) of a page, as far as it has them.
template <typename Unit>
__device__ void CopyRun(const Unit* from, Unit* to, uint32_t first, uint32_t page_units) {
  const uint32_t lane = first + threadIdx.x % kLanes;
  Unit values[kInFlight];
  if (first + kInFlight * kLanes <= page_units) {  // the usual run, without a test per load
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) values[i] = __ldcs(from + lane + i * kLanes);  // read once: not worth caching
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) to[lane + i * kLanes] = values[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (lane + i * kLanes < page_units) values[i] = __ldcs(from + lane + i * kLanes);
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (lane + i * kLanes < page_units) to[lane + i * kLanes] = values[i];
  }
}

// `Unit` is the widest type that divides a page.
template <bool writes, typename Unit>
__global__ void __launch_bounds__(kTransferThreads) TransferKernel(const TransferArgs args) {
  constexpr int kTileHeads = kTransferThreads * kHeadsPerThread;  // lists whose offsets are in shared memory at a time
  constexpr int kWarps = kTransferThreads / kLanes;
  using Scan = cub::BlockScan<int32_t, kTransferThreads, cub::BLOCK_SCAN_WARP_SCANS>;  // the least latency
  __shared__ typename Scan::TempStorage scan_storage;
  __shared__ int32_t first_entry[kTileHeads + 1];  // of each list of the tile, in the tile's numbering of entries
  __shared__ Addresses addresses[kTransferThreads];
  __shared__ PoolView pool;
  __shared__ bool usable;

  const TransferSizes& sizes = args.sizes;
  // By one thread, so that the CTA acts on one answer; it arrives while the lists are read.
  PoolView fetched{};
  if (threadIdx.x == 0) fetched = FetchPool(args.handle[0]);

  const int64_t n_heads = sizes.rows * sizes.heads;
  const auto page_units = static_cast<uint32_t>(sizes.page_bytes / sizeof(Unit));
  const uint32_t page_runs = (page_units + kInFlight * kLanes - 1) / (kInFlight * kLanes);
  for (int64_t tile = 0; tile < n_heads; tile += kTileHeads) {
    int32_t counts[kHeadsPerThread], offsets[kHeadsPerThread];
    int64_t wrong_head = -1;
    int32_t wrong_count = 0;
#pragma unroll
    for (int i = 0; i < kHeadsPerThread; ++i) {
      const int64_t h = tile + threadIdx.x * kHeadsPerThread + i;
      counts[i] = h < n_heads ? args.count[h] : 0;
      if (counts[i] < 0 || counts[i] > sizes.entries) {
        wrong_head = h;
        wrong_count = counts[i];
        counts[i] = 0;
      }
    }
    int32_t n_entries = 0;
    Scan(scan_storage).ExclusiveSum(counts, offsets, n_entries);
#pragma unroll
    for (int i = 0; i < kHeadsPerThread; ++i) first_entry[threadIdx.x * kHeadsPerThread + i] = offsets[i];
    if (threadIdx.x == 0) {
      first_entry[kTileHeads] = n_entries;
      if (tile == 0) {
        pool = fetched;
        usable = CheckPool(args, fetched, writes);
      }
    }
    __syncthreads();
    if (!usable) return;

    if (blockIdx.x == 0) {
      if (threadIdx.x == 0) {
        DeviceCounts& total = pool_counts[args.handle[0]];
        if (tile == 0) atomicAdd(writes ? &total.write_calls : &total.read_calls, 1ull);
        atomicAdd(writes ? &total.pages_written : &total.pages_read, static_cast<unsigned long long>(n_entries));
      }
      if (wrong_head >= 0) {
        Report(&args.faults->places[args.handle[0]].own,
               Fault{FaultKind::kCount, writes, args.handle[0], args.handle[1], wrong_head / sizes.heads,
                     wrong_head % sizes.heads, wrong_count, sizes.entries, 0, 0});
      }
    }
    const int64_t n_runs = int64_t{n_entries} * page_runs;
    const int64_t begin = n_runs * blockIdx.x / gridDim.x;
    const int64_t end = n_runs * (blockIdx.x + 1) / gridDim.x;
    for (int64_t batch = begin / page_runs; batch * page_runs < end; batch += kTransferThreads) {
      const int64_t mine = batch + threadIdx.x;
      if (mine * page_runs < end) {
        int low = 0, high = kTileHeads;  // first_entry[low] <= mine < first_entry[high]
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          (first_entry[middle] <= mine ? low : high) = middle;
        }
        addresses[threadIdx.x] = Resolve(args, pool, tile + low, mine - first_entry[low], writes);
      }
      __syncthreads();

      // Runs counted from the batch's first entry, so that they fit in 32 bits.
      const int64_t origin = batch * page_runs;
      const auto last = static_cast<uint32_t>(min(end - origin, int64_t{kTransferThreads} * page_runs));
      const auto first = static_cast<uint32_t>(max(begin - origin, int64_t{0}));
      for (uint32_t run = first + threadIdx.x / kLanes; run < last; run += kWarps) {
        const uint32_t which = run / page_runs;
        const Addresses place = addresses[which];
        if (place.page == nullptr) continue;
        const auto* const from = reinterpret_cast<const Unit*>(writes ? place.slot : place.page);
        auto* const to = reinterpret_cast<Unit*>(writes ? place.page : place.slot);
        CopyRun(from, to, (run - which * page_runs) * (kInFlight * kLanes), page_units);
      }
      __syncthreads();  // the addresses are about to be replaced
    }
    __syncthreads();  // ... and the offsets
  }
}

}  // namespace nosa
