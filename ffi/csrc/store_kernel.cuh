// The kernel of store_blocks: one block of each full row, in every layer, from its slot to its host page.
//
// In most steps no row has filled a block, and the kernel ends after one look at `full`.
#pragma once

#include "transfer_kernel.cuh"

namespace nosa {

constexpr int kStoredLayers = 64;  // of one launch: their addresses travel as parameters

struct StoreArgs {
  TransferArgs transfer;  // without lists and cache
  const int32_t* block;   // [B]
  const bool* full;       // [B]
  int32_t first_layer, n_layers;  // of this launch
  std::byte* caches[kStoredLayers];
  const int32_t* slots[kStoredLayers];  // [B, K] each
};

// Lane number of the (n + 1)-th set bit.
inline __device__ int32_t SetBit(uint32_t mask, uint32_t n) {
  for (; n > 0; --n) mask &= mask - 1;
  return __ffs(static_cast<int>(mask)) - 1;
}

template <typename Unit>
__global__ void __launch_bounds__(kTransferThreads) StoreKernel(const __grid_constant__ StoreArgs args) {
  constexpr uint32_t kWarps = kTransferThreads / kLanes;
  const TransferSizes& sizes = args.transfer.sizes;
  const int32_t pool_place = args.transfer.handle[0];
  PoolView pool{};
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kLanes, n_warps = gridDim.x * kWarps;
  const auto page_units = static_cast<uint32_t>(sizes.page_bytes / sizeof(Unit));
  const auto n_heads = static_cast<uint32_t>(sizes.heads), per_row = n_heads * static_cast<uint32_t>(args.n_layers);
  Turn turn(page_units, warp, n_warps);

  for (int64_t first_row = 0; first_row < sizes.rows; first_row += kLanes) {
    const bool is_full = first_row + lane < sizes.rows && args.full[first_row + lane];
    if (first_row == 0) pool = FetchPool(pool_place);  // waits for the handle, while `full` is on its way
    const uint32_t full = __ballot_sync(kWholeWarp, is_full);
    if (first_row == 0 && !__all_sync(kWholeWarp, CheckPool(args.transfer, pool))) return;
    const uint32_t n_entries = __popc(full) * per_row;
    if (warp == 0 && lane == 0) {
      DeviceCounts& total = pool_counts[args.transfer.handle[0]];
      if (first_row == 0 && args.first_layer == 0) atomicAdd(&total.write_calls, 1ull);
      if (n_entries > 0) atomicAdd(&total.pages_written, static_cast<unsigned long long>(n_entries));
    }
    for (; turn.entry < n_entries; turn.Next()) {
      const int64_t row = first_row + SetBit(full, turn.entry / per_row);
      const uint32_t layer = turn.entry % per_row / n_heads;
      const int64_t h = row * n_heads + turn.entry % n_heads;
      Listed listed{args.block[row], args.slots[layer][h], -1};
      listed.place = FetchPlace(args.transfer, h, listed.block);
      const Addresses found =
          Resolve(args.transfer, pool, args.caches[layer], args.first_layer + layer, h, listed);
      if (found.page == nullptr) continue;
      CopyRun(reinterpret_cast<const Unit*>(found.slot), reinterpret_cast<Unit*>(found.page),
              turn.part * (kInFlight * kLanes), page_units);
    }
    turn.entry -= n_entries;
  }
}

}  // namespace nosa
