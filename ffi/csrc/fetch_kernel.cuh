// The kernel of fetch_blocks: assign_slots and swap_in in one launch, for GPUs with clusters (sm_90 on).
//
// The CTAs of a cluster share some (row, KV head) pairs. One warp takes a pair: it holds the pair's lists in registers,
// finds the wanted blocks through a map by block in shared memory, and chooses victims one after the other, which is
// quicker than sorting for the few blocks that a step misses. Then the cluster's CTAs tell one another how many blocks
// each list has, and all of their warps copy: no CTA waits on one outside its cluster, and if nothing is missing, the
// kernel ends there.
//
// The map is never cleared. Whether map[block] means something is seen in held[map[block]], which is: either it holds
// that block, or the block has no slot.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>

#include "transfer_kernel.cuh"

namespace nosa {

constexpr int kMaxCluster = 8;         // CTAs that every such GPU can put into a cluster
constexpr int kMaxSlotsPerLane = 16;   // larger tables are better sorted
constexpr int64_t kFetchSharedBytes = 96 * 1024;  // of a CTA: two of them fit on a multiprocessor
constexpr int32_t kNoBlock = INT32_MAX;
constexpr int32_t kClaimed = INT32_MIN;  // the bit that marks a slot whose block is wanted now

struct FetchArgs {
  TransferArgs transfer;  // without lists; its entries are C
  const int32_t* wanted;
  const int32_t* step;
  const int32_t* fresh_from;
  int32_t* slot_ids;
  int32_t* slot_block;  // read, then updated
  int32_t* last_used;   // read, then updated
  int32_t* hits;
  int32_t* misses;
  int32_t* tail_slot;
  int32_t assigners = 0;   // warps of a CTA that take a pair at a time
  int32_t warp_bytes = 0;  // of shared memory, for each of those
};

// Shared memory of one assigning warp: the load list [C], blocks held [S], the map [M].
inline int64_t FetchWarpBytes(int64_t wanted, int64_t slots, int64_t blocks) {
  const auto whole = [](int64_t bytes) { return (bytes + 15) / 16 * 16; };
  return wanted * static_cast<int64_t>(sizeof(int4)) + whole(slots * static_cast<int64_t>(sizeof(int32_t))) +
         whole(blocks * static_cast<int64_t>(sizeof(uint16_t)));
}

// The slots of one (row, KV head), shared out over the lanes of a warp: slot 32 i + lane is the lane's i-th.
template <int kPerLane>
struct Assigner {
  int4* list;     // {block, slot, page table entry, -} of the blocks to load
  int32_t* held;  // by slot: its block, with kClaimed if wanted now, or kNoBlock
  uint16_t* map;  // by block: its slot, if held says so
  int32_t n_wanted, n_slots, n_blocks;
  int32_t step, fresh_from;
  uint32_t lane;
  int32_t want[kPerLane], age[kPerLane];
  int32_t place[kPerLane];                             // of each wanted block
  uint32_t empty = 0, idle = 0, claimed = 0, taken = 0;  // by slot, as bits; taken: by a block that was missing
  int32_t n_loads = 0;

  __device__ Assigner(const FetchArgs& args, std::byte* shared, int64_t h)
      : list(reinterpret_cast<int4*>(shared)),
        held(reinterpret_cast<int32_t*>(list + args.transfer.sizes.entries)),
        map(reinterpret_cast<uint16_t*>(held + (args.transfer.sizes.slots + 3) / 4 * 4)),
        n_wanted(static_cast<int32_t>(args.transfer.sizes.entries)),
        n_slots(static_cast<int32_t>(args.transfer.sizes.slots)),
        n_blocks(static_cast<int32_t>(args.transfer.sizes.blocks)),
        step(*args.step),
        fresh_from(args.fresh_from[static_cast<uint32_t>(h) / static_cast<uint32_t>(args.transfer.sizes.heads)]),
        lane(threadIdx.x % kLanes) {
    int32_t block[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {  // all loads are under way before the first is used
      const int32_t at = i * kLanes + lane;
      want[i] = at < n_wanted ? args.wanted[h * n_wanted + at] : -1;
      block[i] = at < n_slots ? args.slot_block[h * n_slots + at] : -1;
      age[i] = at < n_slots ? args.last_used[h * n_slots + at] : 0;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t slot = i * kLanes + lane;
      if (slot >= n_slots) continue;
      held[slot] = IsBlock(block[i]) ? block[i] : kNoBlock;
      if (IsBlock(block[i])) map[block[i]] = static_cast<uint16_t>(slot);
      (block[i] < 0 ? empty : idle) |= 1u << i;
    }
    __syncwarp();
    uint32_t missing = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      place[i] = IsBlock(want[i]) ? Find(want[i]) : -1;
      if (IsBlock(want[i]) && place[i] < 0) missing |= 1u << i;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (place[i] >= 0) held[place[i]] = want[i] | kClaimed;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t slot = i * kLanes + lane;
      if (slot < n_slots && (held[slot] & kClaimed) != 0) claimed |= 1u << i;
    }
    idle &= ~claimed;
    if (__any_sync(kWholeWarp, missing != 0)) Replace(args, h, missing);
  }

  __device__ bool IsBlock(int32_t id) const { return id >= 0 && id < n_blocks; }

  // The slot that holds a block, or -1.
  __device__ int32_t Find(int32_t block) const {
    const int32_t slot = map[block];
    return slot < n_slots && (held[slot] & ~kClaimed) == block ? slot : -1;
  }

  // Gives the missing blocks slots, in the order of `wanted`.
  __device__ void Replace(const FetchArgs& args, int64_t h, uint32_t missing) {
    int32_t n_missing = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool mine = (missing >> i & 1) != 0;
      const uint32_t those = __ballot_sync(kWholeWarp, mine);
      if (mine) list[n_missing + __popc(those & ((1u << lane) - 1))].x = want[i];
      n_missing += __popc(those);
    }
    __syncwarp();
    for (int32_t entry = 0; entry < n_missing; ++entry) {
      const int32_t block = list[entry].x;
      if (Find(block) >= 0) continue;  // an id that was there before
      const int32_t slot = TakeSlot();
      __syncwarp();  // the list is written behind the entry that all lanes have read
      if (lane == 0) {
        map[block] = static_cast<uint16_t>(slot);
        held[slot] = block | kClaimed;
        if (block < fresh_from) list[n_loads] = int4{block, slot, -1, 0};
      }
      if (block < fresh_from) ++n_loads;
      __syncwarp();
    }
    for (int32_t entry = lane; entry < n_loads; entry += kLanes) {
      list[entry].z = FetchPlace(args.transfer, h, list[entry].x);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if ((missing >> i & 1) != 0) place[i] = Find(want[i]);
    }
  }

  // The first empty slot, or else the one that was used the longest ago, the lower of equals.
  __device__ int32_t TakeSlot() {
    uint32_t mine = UINT32_MAX;
    if (__any_sync(kWholeWarp, empty != 0)) {
      if (empty != 0) mine = (__ffs(static_cast<int>(empty)) - 1) * kLanes + lane;
    } else {
      int32_t oldest = INT32_MAX;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if ((idle >> i & 1) != 0) oldest = min(oldest, age[i]);
      }
      oldest = __reduce_min_sync(kWholeWarp, oldest);
#pragma unroll
      for (int i = kPerLane - 1; i >= 0; --i) {
        if ((idle >> i & 1) != 0 && age[i] == oldest) mine = i * kLanes + lane;
      }
    }
    const uint32_t slot = __reduce_min_sync(kWholeWarp, mine);
    if (slot % kLanes == lane) {
      const uint32_t bit = 1u << slot / kLanes;
      empty &= ~bit;
      idle &= ~bit;
      taken |= bit;
    }
    return static_cast<int32_t>(slot);
  }

  __device__ void Write(const FetchArgs& args, int64_t h) const {
    int32_t tail = -1;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t at = i * kLanes + lane;
      if (at < n_wanted) args.slot_ids[h * n_wanted + at] = place[i];
      if (want[i] == fresh_from) tail = max(tail, place[i]);  // -1 where fresh_from is no block
      if (((claimed | taken) >> i & 1) != 0) args.last_used[h * n_slots + at] = step;
      if ((taken >> i & 1) != 0) args.slot_block[h * n_slots + at] = held[at] & ~kClaimed;
    }
    tail = __reduce_max_sync(kWholeWarp, tail);
    const uint32_t n_hits = __reduce_add_sync(kWholeWarp, static_cast<uint32_t>(__popc(claimed)));
    if (lane == 0) {
      args.hits[h] = static_cast<int32_t>(n_hits);
      args.misses[h] = n_loads;
      args.tail_slot[h] = tail;
    }
  }
};

template <int kPerLane>
__global__ void __launch_bounds__(kTransferThreads) FetchKernel(const __grid_constant__ FetchArgs args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr uint32_t kWarps = kTransferThreads / kLanes;
  static_assert(kMaxCluster * kWarps <= kTileLists);
  extern __shared__ int4 shared[];
  __shared__ int32_t counts[2][kTileLists];  // of all lists of the cluster; two, in turn: see below
  const auto cluster = cooperative_groups::this_cluster();
  const TransferSizes& sizes = args.transfer.sizes;
  const PoolView pool = FetchPool(args.transfer.handle[0]);  // arrives while slots are assigned
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const uint32_t n_ctas = cluster.num_blocks(), rank = cluster.block_rank();
  const uint32_t n_clusters = gridDim.x / n_ctas, number = blockIdx.x / n_ctas;
  // The cluster's pairs are number, number + n_clusters, ...; it takes n_lists of them at a time.
  const auto n_pairs = static_cast<uint32_t>(sizes.rows * sizes.heads);
  const uint32_t n_mine = (n_pairs + n_clusters - 1 - number) / n_clusters;
  const uint32_t n_lists = n_ctas * args.assigners;
  if (n_mine == 0) return;
  const auto page_units = static_cast<uint32_t>(sizes.page_bytes / sizeof(uint4));
  auto* const own = reinterpret_cast<std::byte*>(shared) + warp * args.warp_bytes;

  cluster.barrier_arrive();
  if (blockIdx.x == 0 && warp == kWarps - 1 && CheckPool(args.transfer, pool) && lane == 0) {
    atomicAdd(&pool_counts[args.transfer.handle[0]].read_calls, 1ull);
  }
  for (uint32_t first = 0, turn_of = 0; first < n_mine; first += n_lists, turn_of ^= 1) {
    const uint32_t list = warp * n_ctas + rank;  // of this round; spread over the CTAs first
    const bool assigns = warp < static_cast<uint32_t>(args.assigners) && first + list < n_mine;
    const int64_t mine = static_cast<int64_t>(first + list) * n_clusters + number;
    if (assigns) {
      const Assigner<kPerLane> assigner(args, own, mine);
      if (first == 0) cluster.barrier_wait();  // every CTA has started: its memory may be written
      if (lane < n_ctas) *cluster.map_shared_rank(&counts[turn_of][list], lane) = assigner.n_loads;
      cluster.barrier_arrive();
      assigner.Write(args, mine);  // after the arrival, which would wait for these stores otherwise
    } else {
      if (first == 0) cluster.barrier_wait();
      cluster.barrier_arrive();
    }
    cluster.barrier_wait();

    int32_t lengths[kListsPerLane];
#pragma unroll
    for (int i = 0; i < kListsPerLane; ++i) {
      const uint32_t other = lane * kListsPerLane + i;
      lengths[i] = other < n_lists && first + other < n_mine ? counts[turn_of][other] : 0;
    }
    const Tile tile(lengths);
    // A CTA may run ahead to the next round's counts, which are the other ones, but not to those of the round after.
    if (tile.n_entries == 0) continue;
    if (__all_sync(kWholeWarp, CheckPool(args.transfer, pool))) {
      if (rank == 0 && warp == 0 && lane == 0) {
        atomicAdd(&pool_counts[args.transfer.handle[0]].pages_read, static_cast<unsigned long long>(tile.n_entries));
      }
      for (Turn turn(page_units, warp * n_ctas + rank, kWarps * n_ctas); turn.entry < tile.n_entries; turn.Next()) {
        const Tile::Entry found = tile.Find(turn.entry);
        const auto* const lists = reinterpret_cast<const int4*>(
            reinterpret_cast<const std::byte*>(shared) + found.list / n_ctas * args.warp_bytes);
        const int4 listed = cluster.map_shared_rank(lists, found.list % n_ctas)[found.position];
        const Addresses place =
            Resolve(args.transfer, pool, args.transfer.cache, sizes.layer,
                    static_cast<int64_t>(first + found.list) * n_clusters + number, {listed.x, listed.y, listed.z});
        if (place.page == nullptr) continue;
        CopyRun(reinterpret_cast<const uint4*>(place.page), reinterpret_cast<uint4*>(place.slot),
                turn.part * (kInFlight * kLanes), page_units);
      }
    }
    cluster.sync();  // the lists are read by others until here
  }
#endif
}

// Whether one launch can do it: small enough tables, whole 16 bytes in a page.
inline bool FitsFetchKernel(const TransferSizes& sizes) {
  return sizes.slots <= kMaxSlotsPerLane * kLanes && sizes.page_bytes % static_cast<int64_t>(sizeof(uint4)) == 0 &&
         FetchWarpBytes(sizes.entries, sizes.slots, sizes.blocks) <= kFetchSharedBytes;
}

template <int kPerLane>
cudaError_t LaunchFetchKernel(const FetchArgs& args, int64_t n_ctas, cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kMaxCluster, 1, 1};
  while (n_ctas % cluster.val.clusterDim.x != 0) cluster.val.clusterDim.x /= 2;
  cudaLaunchConfig_t config{};
  config.gridDim.x = static_cast<unsigned>(n_ctas);
  config.blockDim.x = kTransferThreads;
  config.dynamicSmemBytes = static_cast<size_t>(args.assigners) * args.warp_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (config.dynamicSmemBytes > 46 * 1024) {  // the static share comes on top
    cudaFuncSetAttribute(FetchKernel<kPerLane>, cudaFuncAttributeMaxDynamicSharedMemorySize, kFetchSharedBytes);
  }
  return cudaLaunchKernelEx(&config, FetchKernel<kPerLane>, args);
}

// Launches the kernel for arguments that fit, at least one pair of them.
inline cudaError_t LaunchFetch(FetchArgs args, int64_t n_ctas, cudaStream_t stream) {
  const TransferSizes& sizes = args.transfer.sizes;
  const int64_t warp_bytes = FetchWarpBytes(sizes.entries, sizes.slots, sizes.blocks);
  const int64_t pairs_per_cta = (sizes.rows * sizes.heads + n_ctas - 1) / n_ctas;
  args.warp_bytes = static_cast<int32_t>(warp_bytes);
  args.assigners = static_cast<int32_t>(
      std::min({pairs_per_cta, kFetchSharedBytes / warp_bytes, static_cast<int64_t>(kTransferThreads / kLanes)}));
  if (sizes.slots <= 4 * kLanes) return LaunchFetchKernel<4>(args, n_ctas, stream);
  if (sizes.slots <= 8 * kLanes) return LaunchFetchKernel<8>(args, n_ctas, stream);
  return LaunchFetchKernel<kMaxSlotsPerLane>(args, n_ctas, stream);
}

}  // namespace nosa
