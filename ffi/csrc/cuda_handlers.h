// The XLA FFI handlers of platform CUDA.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace nosa {

extern XLA_FFI_Handler* const kAppendTokenCuda;
extern XLA_FFI_Handler* const kAssignSlotsCuda;
extern XLA_FFI_Handler* const kSwapInCuda;
extern XLA_FFI_Handler* const kWritePagesCuda;
extern XLA_FFI_Handler* const kFetchBlocksCuda;
extern XLA_FFI_Handler* const kStoreBlocksCuda;
extern XLA_FFI_Handler* const kListBlocksCuda;

// Load the kernels into the calling thread's device now: the first launch may happen while a graph is captured, where
// loading can fail.
void LoadAppendKernels();
void LoadAssignKernel();
void LoadTransferKernels();

}  // namespace nosa
