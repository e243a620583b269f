// Host pools as kernels see them: a table in mapped memory that turns a handle into a pool, or into a recorded fault.
#pragma once

#include <cstddef>
#include <cstdint>

#include "faults.h"
#include "handle.h"

namespace nosa {

// Written once by a kernel, taken by the host. The first fault wins; later ones are consequences or repetitions.
struct FaultRecord {
  enum State : int32_t { kNone = 0, kBeingWritten = 1, kReady = 2 };
  int32_t state;
  Fault fault;
};

struct alignas(64) PoolEntry {
  std::byte* base;  // as the device addresses it
  int64_t n_pages;
  int64_t page_bytes;
  int32_t generation;  // 0 while closed; no handle has generation 0
  int32_t last_generation;
  unsigned long long pages_read, pages_written, read_calls, write_calls;
  FaultRecord own;    // by a valid handle of this pool
  FaultRecord stale;  // by a handle of this place whose pool is closed
};

struct PoolTable {
  PoolEntry entries[kMaxPools];
  FaultRecord stray;  // by a handle that names no place at all
};

// The process's table, at the address that kernels use on every device. Null until a pool was pinned. It is never
// freed: a captured graph may hold its address.
PoolTable* Table();

// Remembers that kernels of the calling thread's device may touch pools; closing a pool waits for them.
void NoteDeviceInUse();

}  // namespace nosa
