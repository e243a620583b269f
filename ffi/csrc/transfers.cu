// The handlers that move pages on a GPU, and the device's table of pools that their kernels read.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "assign_kernel.h"
#include "cuda_handlers.h"
#include "cuda_pool.h"
#include "list_kernel.cuh"
#include "handlers.h"
#include "store_kernel.cuh"
#include "transfer_kernel.cuh"

namespace nosa {
namespace {

ffi::Error InvalidArgument(Caller caller, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(NameOf(caller)) + ": " + what);
}

// What every handler needs before it launches anything.
ffi::Error CheckLaunch(Caller caller, int64_t n_ctas) {
  if (n_ctas < 1 || n_ctas > 65535) {
    return InvalidArgument(caller, "n_ctas=" + std::to_string(n_ctas) + " is outside 1..65535");
  }
  if (Faults() == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      std::string(NameOf(caller)) + ": no host pool was ever made for a CUDA device");
  }
  return ffi::Error::Success();
}

// After a launch.
ffi::Error LastError(Caller caller) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(NameOf(caller)) + ": launch failed: " + cudaGetErrorString(status));
}

// XLA aliases the two buffers; where it did not, the update happens in a copy.
template <typename From, typename To>
void CopyUnlessAliased(const From& from, To& to, cudaStream_t stream) {
  if (from.untyped_data() == to.untyped_data()) return;
  cudaMemcpyAsync(to.untyped_data(), from.untyped_data(), from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
}

// Calls `launch` with a value of the widest type that divides a page.
template <typename Launch>
void WithUnit(int64_t page_bytes, Launch launch) {
  if (page_bytes % sizeof(uint4) == 0) {
    launch(uint4{});
  } else if (page_bytes % sizeof(unsigned int) == 0) {
    launch(static_cast<unsigned int>(0));
  } else {
    launch(static_cast<unsigned char>(0));
  }
}

template <bool writes>
void LaunchTransfer(const TransferArgs& args, int64_t n_ctas, cudaStream_t stream) {
  WithUnit(args.sizes.page_bytes, [&](auto unit) {
    TransferKernel<writes, decltype(unit)>
        <<<static_cast<unsigned>(n_ctas), kTransferThreads, 0, stream>>>(args);
  });
}

template <bool writes>
ffi::Error Transfer(cudaStream_t stream, Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 block,
                    Int32Buffer3 slot, Int32Buffer2 count, Int32Buffer2 page_table,
                    ffi::Result<ffi::AnyBuffer> result, int64_t layer, int64_t n_layers, int64_t n_ctas) {
  constexpr Caller caller = writes ? Caller::kWritePages : Caller::kSwapIn;
  TransferSizes sizes{};
  auto error =
      ReadTransferSizes(NameOf(caller), handle, cache, block, slot, count, page_table, layer, n_layers, &sizes);
  if (error.success()) error = CheckLaunch(caller, n_ctas);
  if (error.failure()) return error;
  CopyUnlessAliased(cache, *result, stream);
  LaunchTransfer<writes>({Faults(), handle.typed_data(), static_cast<std::byte*>(result->untyped_data()),
                          block.typed_data(), slot.typed_data(), count.typed_data(), page_table.typed_data(), sizes,
                          caller},
                         n_ctas, stream);
  return LastError(caller);
}

// Whether the current device has clusters of CTAs.
bool HasClusters() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

// Where list_blocks leaves its lists: late [B, K, C], arrived [B, K, S], pages [n_ctas, capacity, 4], n_pages [n_ctas].
ffi::Error ReadPageLists(const TransferSizes& sizes, int64_t n_ctas, Int32Result3 late, Int32Result3 arrived,
                         Int32Result3 pages, ffi::Result<Int32Buffer1> n_pages, int64_t pieces, PageLists* lists) {
  const int64_t capacity = PairsPerCta(sizes, n_ctas) * sizes.entries;
  const auto dims = pages->dimensions();
  if (dims[0] != n_ctas || dims[1] < capacity || dims[2] != 4 || n_pages->dimensions()[0] != n_ctas) {
    return InvalidArgument(Caller::kListBlocks, "pages must be int32[" + std::to_string(n_ctas) + ", " +
                                                    std::to_string(capacity) + ", 4]");
  }
  *lists = {late->typed_data(),
            arrived->typed_data(),
            reinterpret_cast<uint4*>(pages->typed_data()),
            n_pages->typed_data(),
            dims[1],
            static_cast<int32_t>(pieces)};
  return ffi::Error::Success();
}

// fetch_blocks, or with four results more list_blocks: it lists the pages instead of copying them.
template <typename... Lists>
ffi::Error Fetch(cudaStream_t stream, Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 wanted,
                 Int32Buffer3 slot_block, Int32Buffer3 last_used, ffi::Buffer<ffi::S32, 0> step,
                 Int32Buffer1 fresh_from, Int32Buffer2 page_table, std::optional<ffi::AnyBuffer> k,
                 std::optional<ffi::AnyBuffer> v, std::optional<Int32Buffer1> position,
                 ffi::Result<ffi::AnyBuffer> new_cache, Int32Result3 slot_ids, Int32Result3 new_slot_block,
                 Int32Result3 new_last_used, Int32Result2 hits, Int32Result2 misses, Int32Result2 tail_slot,
                 Int32Result3 load_block, Int32Result3 load_slot, int64_t layer, int64_t n_layers, int64_t n_ctas,
                 Lists... lists) {
  constexpr bool lists_pages = sizeof...(Lists) > 0;
  constexpr Caller caller = lists_pages ? Caller::kListBlocks : Caller::kFetchBlocks;
  const Token token{k, v, position};
  AssignSizes assign{};
  TransferSizes sizes{};
  TokenSizes token_sizes{};
  auto error = ReadFetchSizes(NameOf(caller), handle, cache, wanted, slot_block, last_used, fresh_from, page_table,
                              token, layer, n_layers, &assign, &sizes, &token_sizes);
  if (error.success()) error = CheckLaunch(caller, n_ctas);
  if (error.failure() || sizes.rows * sizes.heads == 0) return error;
  CopyUnlessAliased(cache, *new_cache, stream);
  CopyUnlessAliased(slot_block, *new_slot_block, stream);
  CopyUnlessAliased(last_used, *new_last_used, stream);
  auto* const slots = static_cast<std::byte*>(new_cache->untyped_data());
  const TransferArgs transfer{Faults(), handle.typed_data(), slots, load_block->typed_data(), load_slot->typed_data(),
                              misses->typed_data(), page_table.typed_data(), sizes, caller};
  const SlotTables tables{wanted.typed_data(),         step.typed_data(),          fresh_from.typed_data(),
                          page_table.typed_data(),     slot_ids->typed_data(),     new_slot_block->typed_data(),
                          new_last_used->typed_data(), hits->typed_data(),         misses->typed_data(),
                          tail_slot->typed_data()};
  const TokenArgs token_args = MakeTokenArgs(token, token_sizes, sizes, slots);
  if constexpr (lists_pages) {
    if (!FitsAssigner(sizes)) return InvalidArgument(caller, "tables of these sizes take fetch_blocks");
    PageLists page_lists{};
    if (error = ReadPageLists(sizes, n_ctas, lists..., &page_lists); error.failure()) return error;
    LaunchList({transfer, tables, token_args, page_lists}, n_ctas, stream);
    return LastError(caller);
  }
  if (FitsFetchKernel(sizes) && HasClusters()) {
    LaunchFetch({transfer, tables, token_args}, n_ctas, stream);
    return LastError(caller);
  }
  error = LaunchAssign(NameOf(caller),
                       {wanted.typed_data(), step.typed_data(), fresh_from.typed_data(), slot_ids->typed_data(),
                        new_slot_block->typed_data(), new_last_used->typed_data(), load_block->typed_data(),
                        load_slot->typed_data(), misses->typed_data(), hits->typed_data(), misses->typed_data(),
                        tail_slot->typed_data(), assign},
                       stream);
  if (error.failure()) return error;
  TokenKernel<<<static_cast<unsigned>(sizes.rows * sizes.heads), kLanes, 0, stream>>>(
      token_args, tail_slot->typed_data(), static_cast<int32_t>(sizes.heads));
  error = LastError(caller);
  if (error.failure()) return error;
  LaunchTransfer<false>(transfer, n_ctas, stream);
  return LastError(caller);
}

ffi::Error StoreBlocks(cudaStream_t stream, Int32Buffer1 handle, Int32Buffer1 block, PredBuffer1 full,
                       Int32Buffer2 page_table, ffi::AnyBuffer /*after*/, ffi::RemainingArgs arrays,
                       ffi::RemainingRets results, int64_t n_ctas) {
  constexpr Caller caller = Caller::kStoreBlocks;
  StoreArgs args{};
  auto error = ReadStoreSizes(handle, block, full, page_table, arrays, results.size(), &args.transfer.sizes);
  if (error.success()) error = CheckLaunch(caller, n_ctas);
  if (error.failure()) return error;
  args.transfer.faults = Faults();
  args.transfer.handle = handle.typed_data();
  args.transfer.page_table = page_table.typed_data();
  args.transfer.caller = caller;
  args.block = block.typed_data();
  args.full = full.typed_data();
  const auto n_layers = static_cast<int32_t>(results.size());
  for (; args.first_layer < n_layers; args.first_layer += args.n_layers) {
    args.n_layers = std::min(n_layers - args.first_layer, kStoredLayers);
    for (int32_t i = 0; i < args.n_layers; ++i) {
      const size_t layer = static_cast<size_t>(args.first_layer + i);
      const auto from = arrays.get<ffi::AnyBuffer>(layer);
      const auto to = results.get<ffi::AnyBuffer>(layer);
      CopyUnlessAliased(*from, **to, stream);
      args.caches[i] = static_cast<std::byte*>((*to)->untyped_data());
      args.slots[i] = arrays.get<Int32Buffer2>(results.size() + layer)->typed_data();
    }
    WithUnit(args.transfer.sizes.page_bytes, [&](auto unit) {
      StoreKernel<decltype(unit)><<<static_cast<unsigned>(n_ctas), kTransferThreads, 0, stream>>>(args);
    });
  }
  return LastError(caller);
}

XLA_FFI_DEFINE_HANDLER(kSwapIn, Transfer<false>,
                       BindTransfer(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kWritePages, Transfer<true>,
                       BindTransfer(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kFetchBlocks, Fetch<>,
                       BindFetch(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kListBlocks, (Fetch<Int32Result3, Int32Result3, Int32Result3, ffi::Result<Int32Buffer1>, int64_t>),
                       BindList(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kStoreBlocks, StoreBlocks,
                       BindStore(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

cudaError_t StoreView(int32_t slot, const PoolView& view, cudaStream_t stream) {
  const DeviceCounts zero{};
  cudaError_t status = cudaMemcpyToSymbolAsync(pool_counts, &zero, sizeof(zero), slot * sizeof(DeviceCounts),
                                               cudaMemcpyHostToDevice, stream);
  if (status != cudaSuccess) return status;
  status = cudaMemcpyToSymbolAsync(pool_views, &view, sizeof(view), slot * sizeof(PoolView), cudaMemcpyHostToDevice,
                                   stream);
  return status == cudaSuccess ? cudaStreamSynchronize(stream) : status;
}

cudaError_t StoreGeneration(int32_t slot, int32_t generation, cudaStream_t stream) {
  const cudaError_t status = cudaMemcpyToSymbolAsync(pool_views, &generation, sizeof(generation),
                                                     slot * sizeof(PoolView) + offsetof(PoolView, generation),
                                                     cudaMemcpyHostToDevice, stream);
  return status == cudaSuccess ? cudaStreamSynchronize(stream) : status;
}

cudaError_t LoadCounts(int32_t slot, DeviceCounts* counts, cudaStream_t stream) {
  const cudaError_t status = cudaMemcpyFromSymbolAsync(counts, pool_counts, sizeof(DeviceCounts),
                                                       slot * sizeof(DeviceCounts), cudaMemcpyDeviceToHost, stream);
  return status == cudaSuccess ? cudaStreamSynchronize(stream) : status;
}

void LoadTransferKernels() {
  cudaFuncAttributes unused;
  cudaFuncGetAttributes(&unused, TransferKernel<false, uint4>);
  cudaFuncGetAttributes(&unused, TransferKernel<true, uint4>);
  cudaFuncGetAttributes(&unused, TransferKernel<false, unsigned int>);
  cudaFuncGetAttributes(&unused, TransferKernel<true, unsigned int>);
  cudaFuncGetAttributes(&unused, TransferKernel<false, unsigned char>);
  cudaFuncGetAttributes(&unused, TransferKernel<true, unsigned char>);
  cudaFuncGetAttributes(&unused, StoreKernel<uint4>);
  cudaFuncGetAttributes(&unused, StoreKernel<unsigned int>);
  cudaFuncGetAttributes(&unused, StoreKernel<unsigned char>);
  cudaFuncGetAttributes(&unused, FetchKernel<2, 4>);
  cudaFuncGetAttributes(&unused, FetchKernel<2, 8>);
  cudaFuncGetAttributes(&unused, FetchKernel<kMostPerLane, kMostPerLane>);
  cudaFuncGetAttributes(&unused, ListKernel<2, 4>);
  cudaFuncGetAttributes(&unused, ListKernel<2, 8>);
  cudaFuncGetAttributes(&unused, ListKernel<kMostPerLane, kMostPerLane>);
  cudaFuncGetAttributes(&unused, TokenKernel);
}

XLA_FFI_Handler* const kSwapInCuda = kSwapIn;
XLA_FFI_Handler* const kWritePagesCuda = kWritePages;
XLA_FFI_Handler* const kFetchBlocksCuda = kFetchBlocks;
XLA_FFI_Handler* const kStoreBlocksCuda = kStoreBlocks;
XLA_FFI_Handler* const kListBlocksCuda = kListBlocks;

}  // namespace nosa
