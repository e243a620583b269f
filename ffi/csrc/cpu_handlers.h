// The XLA FFI handlers of platform cpu.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace nosa {

extern XLA_FFI_Handler* const kAssignSlotsCpu;
extern XLA_FFI_Handler* const kSwapInCpu;
extern XLA_FFI_Handler* const kWritePagesCpu;
extern XLA_FFI_Handler* const kFetchBlocksCpu;
extern XLA_FFI_Handler* const kStoreBlocksCpu;

}  // namespace nosa
