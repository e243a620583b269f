// The kernel of swap_in and write_pages, and what those of fetch_blocks and store_blocks share with it: gathers or
// scatters pinned host pages through unified addressing.
//
// The bytes to move are cut into runs, the kInFlight loads of every lane of a warp, which lie side by side in a page:
// 4 KiB with 16-byte loads. The warps of all CTAs take the runs in turn. Every warp finds its own runs (counts -> entry
// of a list -> page table -> addresses) and waits for no other: what passes before the first byte is asked of the link
// is the largest part of a small call. 16 CTAs of 256 threads keep 512 KiB in flight, several times what the link
// needs, and leave the rest of the GPU to other kernels.
//
// Included by one translation unit only: the tables of pools below are its own.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "cuda_pool.h"
#include "handlers.h"

namespace nosa {

constexpr int kTransferThreads = 256;
constexpr int kInFlight = 8;
constexpr int kLanes = 32;
constexpr int kListsPerLane = 4;
constexpr int kTileLists = kLanes * kListsPerLane;  // lists whose counts a warp holds at a time
constexpr uint32_t kWholeWarp = 0xffffffff;

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
  Caller caller;
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
inline __device__ bool CheckPool(const TransferArgs& args, const PoolView& view) {
  const int32_t slot = args.handle[0], generation = args.handle[1];
  Fault fault{FaultKind::kHandle, args.caller, slot, generation, 0, 0, 0, 0, 0, 0};
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
  if (record != nullptr && threadIdx.x % kLanes == 0) Report(record, fault);
  return record == nullptr;
}

// A block of list h (row * K + head) of a layer, the slot it belongs to, and what the page table has for it.
struct Listed {
  int32_t block, slot, place;
};

// The page table's entry for a block of list h; -1 if the block is out of range.
inline __device__ int32_t FetchPlace(const TransferArgs& args, int64_t h, int32_t block) {
  const int64_t row = static_cast<uint32_t>(h) / static_cast<uint32_t>(args.sizes.heads);
  return block >= 0 && block < args.sizes.blocks ? args.page_table[row * args.sizes.blocks + block] : -1;
}

// Where a listed block lies on both sides, or null addresses after the fault was recorded.
inline __device__ Addresses Resolve(const TransferArgs& args, const PoolView& pool, std::byte* cache, int64_t layer,
                                    int64_t h, const Listed& listed) {
  const TransferSizes& sizes = args.sizes;
  const auto n_heads = static_cast<uint32_t>(sizes.heads);
  const int64_t row = static_cast<uint32_t>(h) / n_heads, head = static_cast<uint32_t>(h) % n_heads;
  const auto fail = [&](FaultKind kind, int64_t value, int64_t limit, int64_t page) {
    Report(&args.faults->places[args.handle[0]].own,
           Fault{kind, args.caller, args.handle[0], args.handle[1], row, head, value, limit, listed.block, page});
    return Addresses{nullptr, nullptr};
  };
  if (listed.block < 0 || listed.block >= sizes.blocks) return fail(FaultKind::kBlock, listed.block, sizes.blocks, 0);
  if (listed.slot < 0 || listed.slot >= sizes.slots) return fail(FaultKind::kSlot, listed.slot, sizes.slots, 0);
  const int64_t page = (listed.place * sizes.n_layers + layer) * sizes.heads + head;
  if (listed.place < 0 || page >= pool.n_pages) return fail(FaultKind::kPage, listed.place, pool.n_pages, page);
  return {pool.base + page * sizes.page_bytes, cache + (h * sizes.slots + listed.slot) * sizes.page_bytes};
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

// The transfer lists of a tile as one row of entries, shared out over the lanes of a warp: lane l holds the
// kListsPerLane lists from l * kListsPerLane on.
struct Tile {
  uint32_t ends[kListsPerLane];  // of this lane's lists, in that numbering
  uint32_t n_entries;

  struct Entry {
    uint32_t list, position;
  };

  __device__ Tile(const int32_t (&counts)[kListsPerLane]) {
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kListsPerLane; ++i) ends[i] = sum += static_cast<uint32_t>(counts[i]);
    uint32_t inclusive = sum;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const uint32_t before = __shfl_up_sync(kWholeWarp, inclusive, distance);
      if (threadIdx.x % kLanes >= distance) inclusive += before;
    }
#pragma unroll
    for (int i = 0; i < kListsPerLane; ++i) ends[i] += inclusive - sum;
    n_entries = __shfl_sync(kWholeWarp, inclusive, kLanes - 1);
  }

  // The list and the position in it of entry number `entry` < n_entries, the same for the whole warp.
  __device__ Entry Find(uint32_t entry) const {
    uint32_t n_before = 0, start = 0;  // lists that end before the entry, and where the last of them ends
#pragma unroll
    for (int i = 0; i < kListsPerLane; ++i) {
      if (ends[i] <= entry) {
        ++n_before;
        start = ends[i];
      }
    }
    n_before = __reduce_add_sync(kWholeWarp, n_before);
    start = __reduce_max_sync(kWholeWarp, start);
    return {n_before, entry - start};
  }
};

// The runs that fall to one warp, in turn with the others: which entry, counted from a tile's first, and which part of
// its page.
struct Turn {
  uint32_t page_runs, entry, part, step_entries, step_parts;

  __device__ Turn(uint32_t page_units, uint32_t warp, uint32_t n_warps)
      : page_runs((page_units + kInFlight * kLanes - 1) / (kInFlight * kLanes)),
        entry(warp / page_runs),
        part(warp % page_runs),
        step_entries(n_warps / page_runs),
        step_parts(n_warps % page_runs) {}

  __device__ void Next() {
    entry += step_entries;
    part += step_parts;
    if (part >= page_runs) {
      part -= page_runs;
      ++entry;
    }
  }
};

// `Unit` is the widest type that divides a page.
template <bool writes, typename Unit>
__global__ void __launch_bounds__(kTransferThreads) TransferKernel(const __grid_constant__ TransferArgs args) {
  constexpr uint32_t kWarps = kTransferThreads / kLanes;
  const TransferSizes& sizes = args.sizes;
  const int32_t pool_place = args.handle[0];
  PoolView pool{};
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kLanes, n_warps = gridDim.x * kWarps;
  const int64_t n_lists = sizes.rows * sizes.heads;
  const auto page_units = static_cast<uint32_t>(sizes.page_bytes / sizeof(Unit));
  Turn turn(page_units, warp, n_warps);

  for (int64_t first_list = 0; first_list < n_lists; first_list += kTileLists) {
    int32_t counts[kListsPerLane];
    int64_t wrong_list = -1;
    int32_t wrong_count = 0;
#pragma unroll
    for (int i = 0; i < kListsPerLane; ++i) {
      const int64_t h = first_list + lane * kListsPerLane + i;
      counts[i] = h < n_lists ? args.count[h] : 0;
    }
    if (first_list == 0) pool = FetchPool(pool_place);  // waits for the handle, while the counts are on their way
#pragma unroll
    for (int i = 0; i < kListsPerLane; ++i) {
      if (counts[i] < 0 || counts[i] > sizes.entries) {
        wrong_list = first_list + lane * kListsPerLane + i;
        wrong_count = counts[i];
        counts[i] = 0;
      }
    }
    const Tile tile(counts);
    if (first_list == 0 && !__all_sync(kWholeWarp, CheckPool(args, pool))) return;

    if (warp == 0) {
      if (lane == 0) {
        DeviceCounts& total = pool_counts[args.handle[0]];
        if (first_list == 0) atomicAdd(writes ? &total.write_calls : &total.read_calls, 1ull);
        atomicAdd(writes ? &total.pages_written : &total.pages_read, static_cast<unsigned long long>(tile.n_entries));
      }
      if (wrong_list >= 0) {
        Report(&args.faults->places[args.handle[0]].own,
               Fault{FaultKind::kCount, args.caller, args.handle[0], args.handle[1], wrong_list / sizes.heads,
                     wrong_list % sizes.heads, wrong_count, sizes.entries, 0, 0});
      }
    }
    while (turn.entry < tile.n_entries) {
      const Tile::Entry found = tile.Find(turn.entry);
      const int64_t h = first_list + found.list, at = h * sizes.entries + found.position;
      Listed listed{args.block[at], args.slot[at], -1};
      listed.place = FetchPlace(args, h, listed.block);
      const Addresses place = Resolve(args, pool, args.cache, sizes.layer, h, listed);
      if (place.page != nullptr) {
        const auto* const from = reinterpret_cast<const Unit*>(writes ? place.slot : place.page);
        auto* const to = reinterpret_cast<Unit*>(writes ? place.page : place.slot);
        CopyRun(from, to, turn.part * (kInFlight * kLanes), page_units);
      }
      turn.Next();
    }
    turn.entry -= tile.n_entries;
  }
}

}  // namespace nosa
