// The kernel of list_blocks: assign_slots and the new token in one launch, and lists of the pages that have to be
// copied, for whoever copies them.
//
// A warp takes a pair of a row and a KV head; the warps of a CTA share a list, and no CTA waits for another.
#pragma once

#include "fetch_kernel.cuh"

namespace nosa {

// What list_blocks leaves to the kernel that copies while it attends. A page comes in `pieces` pieces.
struct PageLists {
  int32_t* late = nullptr;     // [B, K, C]: 1 where a wanted block is listed
  int32_t* arrived = nullptr;  // [B, K, S]: pieces that are in a slot, for slots of late blocks; of others undefined
  uint4* pages = nullptr;      // [lists, capacity]: address (low, high; 0: nothing), which of all slots and wanted
  int32_t* n_pages = nullptr;  // [lists]
  int64_t capacity = 0;
  int32_t pieces = 0;
};

struct ListArgs {
  TransferArgs transfer;  // without lists
  SlotTables tables;
  TokenArgs token;
  PageLists lists;  // one for every CTA
  uint32_t pairs_per_cta = 0;
  int32_t warp_bytes = 0;  // of shared memory
};

// Pairs of a CTA, which are listed together; neighbours, so that lists are in the order of pairs.
inline int64_t PairsPerCta(const TransferSizes& sizes, int64_t n_ctas) {
  return (sizes.rows * sizes.heads + n_ctas - 1) / n_ctas;
}

template <int kWants, int kSlots>
__global__ void __launch_bounds__(kTransferThreads) ListKernel(const __grid_constant__ ListArgs args) {
  extern __shared__ int4 shared[];
  __shared__ int32_t counts[kTransferThreads / kLanes];
  const TransferSizes& sizes = args.transfer.sizes;
  const int32_t pool_place = args.transfer.handle[0];  // for later; nothing waits for it here
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, n_warps = blockDim.x / kLanes;
  const auto n_heads = static_cast<uint32_t>(sizes.heads), n_pairs = static_cast<uint32_t>(sizes.rows) * n_heads;
  const uint32_t begin = min(blockIdx.x * args.pairs_per_cta, n_pairs), end = min(begin + args.pairs_per_cta, n_pairs);
  auto* const list = reinterpret_cast<const int4*>(reinterpret_cast<std::byte*>(shared) + warp * args.warp_bytes);

  int32_t n_listed = 0;
  for (uint32_t first = begin; first < end; first += n_warps) {
    const uint32_t pair = first + warp;
    int32_t n_loads = 0;
    if (pair < end) {
      const PairToken token(args.token, pair, pair / n_heads);
      SlotAssigner<kWants, kSlots> slots(args.tables,
                                         reinterpret_cast<std::byte*>(shared) + warp * args.warp_bytes, pair);
      n_loads = slots.Assign();
      token.Write(slots.Write());
      slots.WriteLate(args.lists.late);
    }
    if (lane == 0) counts[warp] = n_loads;
    const PoolView pool = FetchPool(pool_place);
    const bool reports = first == 0 && warp == 0;  // of every call, once
    if (reports && CheckPool(args.transfer, pool) && lane == 0) atomicAdd(&pool_counts[pool_place].read_calls, 1ull);
    __syncthreads();
    int32_t before = 0, total = 0;
    for (uint32_t other = 0; other < n_warps; ++other) {
      before += other < warp ? counts[other] : 0;
      total += counts[other];
    }
    if (total != 0) {
      const bool usable = CheckPool(args.transfer, pool);
      if (usable && threadIdx.x == 0) {
        atomicAdd(&pool_counts[pool_place].pages_read, static_cast<unsigned long long>(total));
      }
      for (int32_t entry = static_cast<int32_t>(lane); entry < n_loads; entry += kLanes) {
        const int4 listed = list[entry];
        const Listed block{listed.x, listed.y, listed.z};
        const std::byte* const page =
            usable ? Resolve(args.transfer, pool, args.transfer.cache, sizes.layer, pair, block).page : nullptr;
        const auto slot = static_cast<int64_t>(pair) * sizes.slots + listed.y;
        const auto address = reinterpret_cast<uint64_t>(page);
        args.lists.pages[blockIdx.x * args.lists.capacity + n_listed + before + entry] =
            make_uint4(static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32),
                       static_cast<uint32_t>(slot), static_cast<uint32_t>(listed.w));
        args.lists.arrived[slot] = page == nullptr ? args.lists.pieces : 0;  // nobody waits for what will not come
      }
    }
    n_listed += total;
    __syncthreads();  // the counts are read by others until here
  }
  if (threadIdx.x == 0) args.lists.n_pages[blockIdx.x] = n_listed;
}

template <int kWants, int kSlots>
void LaunchListKernel(const ListArgs& args, int64_t n_ctas, int64_t n_warps, cudaStream_t stream) {
  const auto shared_bytes = static_cast<size_t>(n_warps * args.warp_bytes);
  if (shared_bytes > 46 * 1024) {  // the static share comes on top
    cudaFuncSetAttribute(ListKernel<kWants, kSlots>, cudaFuncAttributeMaxDynamicSharedMemorySize, kFetchSharedBytes);
  }
  const auto threads = static_cast<unsigned>(n_warps * kLanes);
  ListKernel<kWants, kSlots><<<static_cast<unsigned>(n_ctas), threads, shared_bytes, stream>>>(args);
}

// Launches the kernel for tables that fit, at least one pair of them.
inline void LaunchList(ListArgs args, int64_t n_ctas, cudaStream_t stream) {
  const TransferSizes& sizes = args.transfer.sizes;
  SetSizes(sizes, &args.tables);
  const int64_t warp_bytes = FetchWarpBytes(sizes), pairs = PairsPerCta(sizes, n_ctas);
  args.pairs_per_cta = static_cast<uint32_t>(pairs);
  args.warp_bytes = static_cast<int32_t>(warp_bytes);
  const int64_t n_warps =
      std::min({pairs, kFetchSharedBytes / warp_bytes, static_cast<int64_t>(kTransferThreads / kLanes)});
  switch (SlotsPerLane(sizes)) {
    case 4: return LaunchListKernel<2, 4>(args, n_ctas, n_warps, stream);
    case 8: return LaunchListKernel<2, 8>(args, n_ctas, n_warps, stream);
    default: return LaunchListKernel<kMostPerLane, kMostPerLane>(args, n_ctas, n_warps, stream);
  }
}

}  // namespace nosa
