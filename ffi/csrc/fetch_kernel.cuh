// The kernel of fetch_blocks: assign_slots, swap_in and the new token in one launch, for GPUs with clusters (sm_90 on).
//
// The CTAs of a cluster share some (row, KV head) pairs; a warp takes a pair. Then the CTAs tell one another how many
// blocks each pair has to load, and all warps of the cluster copy. No CTA waits on one outside its
// cluster; if nothing is missing, the kernel ends there.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "slot_assigner.cuh"
#include "transfer_kernel.cuh"

namespace nosa {

constexpr int kMaxCluster = 8;       // CTAs that every such GPU can put into a cluster
constexpr int kMostPerLane = 16;     // of slots; victims of larger tables are better sorted
constexpr int64_t kFetchSharedBytes = 96 * 1024;  // of a CTA: two of them fit on a multiprocessor

struct FetchArgs {
  TransferArgs transfer;  // without lists
  SlotTables tables;
  TokenArgs token;
  int32_t n_assigners = 0;  // warps of a CTA that take a pair at a time
  int32_t warp_bytes = 0;   // of shared memory, for each of those
};

template <int kWants, int kSlots>
__global__ void __launch_bounds__(kTransferThreads) FetchKernel(const __grid_constant__ FetchArgs args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr uint32_t kWarps = kTransferThreads / kLanes;
  static_assert(kMaxCluster * kWarps <= kTileLists && kListsPerLane == 4);
  extern __shared__ int4 shared[];
  __shared__ int32_t counts[2][kTileLists];  // of all lists of the cluster; two, in turn: see below
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();
  const TransferSizes& sizes = args.transfer.sizes;
  const int32_t pool_place = args.transfer.handle[0];  // for later; nothing waits for it here
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t n_ctas = cluster.num_blocks(), rank = cluster.block_rank();
  const uint32_t n_clusters = gridDim.x / n_ctas, number = blockIdx.x / n_ctas;
  // The cluster's pairs are number, number + n_clusters, ...; it takes n_lists of them at a time.
  const auto n_pairs = static_cast<uint32_t>(sizes.rows * sizes.heads);
  const uint32_t n_mine = n_pairs > number ? (n_pairs - 1 - number) / n_clusters + 1 : 0;
  const uint32_t n_lists = n_ctas * args.n_assigners, list = warp * n_ctas + rank;  // spread over the CTAs first

  for (uint32_t first = 0, turn = 0; first < n_mine; first += n_lists, turn ^= 1) {
    if (warp < static_cast<uint32_t>(args.n_assigners) && first + list < n_mine) {
      const int64_t pair = static_cast<int64_t>(first + list) * n_clusters + number;
      const PairToken token(args.token, pair, static_cast<uint32_t>(pair) / static_cast<uint32_t>(sizes.heads));
      SlotAssigner<kWants, kSlots> slots(args.tables, reinterpret_cast<std::byte*>(shared) + warp * args.warp_bytes,
                                         pair);
      const int32_t n_loads = slots.Assign();
      if (first == 0) cluster.barrier_wait();  // every CTA has started: its memory may be written
      if (lane < n_ctas) *cluster.map_shared_rank(&counts[turn][list], lane) = n_loads;
      cluster.barrier_arrive();
      token.Write(slots.Write());  // after the arrival, which would wait for these stores otherwise
    } else {
      if (first == 0) cluster.barrier_wait();
      cluster.barrier_arrive();
    }
    const PoolView pool = FetchPool(pool_place);
    if (first == 0 && blockIdx.x == 0 && warp == kWarps - 1 && CheckPool(args.transfer, pool) && lane == 0) {
      atomicAdd(&pool_counts[pool_place].read_calls, 1ull);
    }
    cluster.barrier_wait();

    int32_t lengths[kListsPerLane];
#pragma unroll
    for (int i = 0; i < kListsPerLane; ++i) {
      const uint32_t other = lane * kListsPerLane + i;
      lengths[i] = other < n_lists && first + other < n_mine ? counts[turn][other] : 0;
    }
    // A CTA may run ahead to the next round's counts, which are the other ones, but not to those of the round after.
    if (!__any_sync(kWholeWarp, (lengths[0] | lengths[1] | lengths[2] | lengths[3]) != 0)) continue;
    const Tile tile(lengths);
    const bool usable = __all_sync(kWholeWarp, CheckPool(args.transfer, pool));
    if (usable && rank == 0 && warp == 0 && lane == 0) {
      atomicAdd(&pool_counts[pool_place].pages_read, static_cast<unsigned long long>(tile.n_entries));
    }
    if (usable) {
      const auto page_units = static_cast<uint32_t>(sizes.page_bytes / sizeof(uint4));
      for (Turn run(page_units, warp * n_ctas + rank, kWarps * n_ctas); run.entry < tile.n_entries; run.Next()) {
        const Tile::Entry found = tile.Find(run.entry);
        const auto* const lists = reinterpret_cast<const int4*>(
            reinterpret_cast<const std::byte*>(shared) + found.list / n_ctas * args.warp_bytes);
        const int4 listed = cluster.map_shared_rank(lists, found.list % n_ctas)[found.position];
        const Addresses place =
            Resolve(args.transfer, pool, args.transfer.cache, sizes.layer,
                    static_cast<int64_t>(first + found.list) * n_clusters + number, {listed.x, listed.y, listed.z});
        if (place.page == nullptr) continue;
        CopyRun(reinterpret_cast<const uint4*>(place.page), reinterpret_cast<uint4*>(place.slot),
                run.part * (kInFlight * kLanes), page_units);
      }
    }
    cluster.sync();  // the lists are read by others until here
  }
#endif
}

// Slots per lane of the kernel that is used for so many slots and wanted blocks.
inline int SlotsPerLane(const TransferSizes& sizes) {
  if (sizes.entries > 2 * kLanes || sizes.slots > 8 * kLanes) return kMostPerLane;
  return sizes.slots <= 4 * kLanes ? 4 : 8;
}

inline int64_t FetchWarpBytes(const TransferSizes& sizes) {
  return AssignerBytes(sizes.entries, SlotsPerLane(sizes), sizes.blocks);
}

// Whether a warp can hold the tables of a pair.
inline bool FitsAssigner(const TransferSizes& sizes) {
  return sizes.slots <= kMostPerLane * kLanes && sizes.blocks >= 1 && FetchWarpBytes(sizes) <= kFetchSharedBytes;
}

// Whether one launch can do all of fetch_blocks: small enough tables, whole 16 bytes in a page.
inline bool FitsFetchKernel(const TransferSizes& sizes) {
  return FitsAssigner(sizes) && sizes.page_bytes % static_cast<int64_t>(sizeof(uint4)) == 0;
}

inline void SetSizes(const TransferSizes& sizes, SlotTables* tables) {
  tables->heads = static_cast<int32_t>(sizes.heads);
  tables->n_wanted = static_cast<int32_t>(sizes.entries);
  tables->n_slots = static_cast<int32_t>(sizes.slots);
  tables->n_blocks = static_cast<int32_t>(sizes.blocks);
}

// How many CTAs form a cluster, of a launch of so many.
inline unsigned ClusterSize(int64_t n_ctas) {
  unsigned size = kMaxCluster;
  while (n_ctas % size != 0) size /= 2;
  return size;
}

template <int kWants, int kSlots>
cudaError_t LaunchFetchKernel(const FetchArgs& args, int64_t n_ctas, cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ClusterSize(n_ctas), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim.x = static_cast<unsigned>(n_ctas);
  config.blockDim.x = kTransferThreads;
  config.dynamicSmemBytes = static_cast<size_t>(args.n_assigners) * args.warp_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (config.dynamicSmemBytes > 46 * 1024) {  // the static share comes on top
    cudaFuncSetAttribute(FetchKernel<kWants, kSlots>, cudaFuncAttributeMaxDynamicSharedMemorySize, kFetchSharedBytes);
  }
  return cudaLaunchKernelEx(&config, FetchKernel<kWants, kSlots>, args);
}

// Launches the kernel for arguments that fit, at least one pair of them.
inline cudaError_t LaunchFetch(FetchArgs args, int64_t n_ctas, cudaStream_t stream) {
  const TransferSizes& sizes = args.transfer.sizes;
  SetSizes(sizes, &args.tables);
  const int64_t warp_bytes = FetchWarpBytes(sizes);
  const int64_t pairs_per_cta = (sizes.rows * sizes.heads + n_ctas - 1) / n_ctas;
  args.warp_bytes = static_cast<int32_t>(warp_bytes);
  args.n_assigners = static_cast<int32_t>(
      std::min({pairs_per_cta, kFetchSharedBytes / warp_bytes, static_cast<int64_t>(kTransferThreads / kLanes)}));
  switch (SlotsPerLane(sizes)) {
    case 4: return LaunchFetchKernel<2, 4>(args, n_ctas, stream);
    case 8: return LaunchFetchKernel<2, 8>(args, n_ctas, stream);
    default: return LaunchFetchKernel<kMostPerLane, kMostPerLane>(args, n_ctas, stream);
  }
}

}  // namespace nosa
