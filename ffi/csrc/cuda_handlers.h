// The XLA FFI handlers of platform CUDA.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace nosa {

extern XLA_FFI_Handler* const kAssignSlotsCuda;
extern XLA_FFI_Handler* const kSwapInCuda;
extern XLA_FFI_Handler* const kWritePagesCuda;

}  // namespace nosa
