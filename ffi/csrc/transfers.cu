// swap_in and write_pages on a GPU, and the device's table of pools that their kernel reads.
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda_handlers.h"
#include "cuda_pool.h"
#include "handlers.h"
#include "transfer_kernel.cuh"

namespace nosa {
namespace {

template <bool writes>
ffi::Error Transfer(cudaStream_t stream, Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 block,
                    Int32Buffer3 slot, Int32Buffer2 count, Int32Buffer2 page_table,
                    ffi::Result<ffi::AnyBuffer> result, int64_t layer, int64_t n_layers, int64_t n_ctas) {
  const char* const name = writes ? "write_pages" : "swap_in";
  TransferSizes sizes{};
  if (auto error =
          ReadTransferSizes(name, handle, cache, block, slot, count, page_table, layer, n_layers, &sizes);
      error.failure()) {
    return error;
  }
  if (n_ctas < 1 || n_ctas > 65535) {
    return ffi::Error::InvalidArgument(std::string(name) + ": n_ctas=" + std::to_string(n_ctas) +
                                       " is outside 1..65535");
  }
  FaultTable* const faults = Faults();
  if (faults == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      std::string(name) + ": no host pool was ever made for a CUDA device");
  }
  if (result->untyped_data() != cache.untyped_data()) {
    cudaMemcpyAsync(result->untyped_data(), cache.untyped_data(), cache.size_bytes(), cudaMemcpyDeviceToDevice,
                    stream);
  }
  const TransferArgs args{faults,
                          handle.typed_data(),
                          static_cast<std::byte*>(result->untyped_data()),
                          block.typed_data(),
                          slot.typed_data(),
                          count.typed_data(),
                          page_table.typed_data(),
                          sizes};
  const auto grid = static_cast<unsigned>(n_ctas);
  if (sizes.page_bytes % sizeof(uint4) == 0) {
    TransferKernel<writes, uint4><<<grid, kTransferThreads, 0, stream>>>(args);
  } else if (sizes.page_bytes % sizeof(uint32_t) == 0) {
    TransferKernel<writes, unsigned int><<<grid, kTransferThreads, 0, stream>>>(args);
  } else {
    TransferKernel<writes, unsigned char><<<grid, kTransferThreads, 0, stream>>>(args);
  }
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    return ffi::Error::Internal(std::string(name) + ": launch failed: " + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kSwapIn, Transfer<false>,
                       BindTransfer(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kWritePages, Transfer<true>,
                       BindTransfer(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
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
}

XLA_FFI_Handler* const kSwapInCuda = kSwapIn;
XLA_FFI_Handler* const kWritePagesCuda = kWritePages;

}  // namespace nosa
