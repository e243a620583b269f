// Host pools as kernels see them.
//
// Every device has a table in its own memory (static device memory, transfer_kernel.cuh) that turns a handle into a
// pool made for that device, and the pools' counters beside it: a call without a fault touches no host memory but the
// pages themselves. Faults are left in one table in mapped host memory, where the host finds them without a copy.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "faults.h"
#include "handle.h"

namespace nosa {

// What a device knows of a pool; all zero, as static memory starts, where there is none.
struct alignas(16) PoolView {
  std::byte* base;  // as the device addresses it
  int64_t n_pages;
  int64_t page_bytes;
  int32_t generation;  // 0 while closed; no handle has generation 0
};

struct DeviceCounts {
  unsigned long long pages_read, pages_written, read_calls, write_calls;
};

// On the current device, in the order of the stream, which is waited for. `slot` is that of a handle.
cudaError_t StoreView(int32_t slot, const PoolView& view, cudaStream_t stream);  // and zeroes the counters
cudaError_t StoreGeneration(int32_t slot, int32_t generation, cudaStream_t stream);
cudaError_t LoadCounts(int32_t slot, DeviceCounts* counts, cudaStream_t stream);

// Written once by a kernel, taken by the host. The first fault wins; later ones are consequences or repetitions.
struct FaultRecord {
  enum State : int32_t { kNone = 0, kBeingWritten = 1, kReady = 2 };
  int32_t state;
  Fault fault;
};

struct FaultTable {
  struct Place {
    FaultRecord own;    // by a valid handle of the pool in this place
    FaultRecord stale;  // by a handle of this place that is not, or no more, valid on the device
  };
  Place places[kMaxPools];
  FaultRecord stray;  // by a handle that names no place at all
};

// The process's table, at the address that kernels use on every device. Null until a pool was pinned. It is never
// freed: a captured graph may hold its address.
FaultTable* Faults();

}  // namespace nosa
