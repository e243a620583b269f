// The launch of assign_slots' kernel, for the handlers that assign slots.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "handlers.h"

namespace nosa {

constexpr int kMaxSlots = 4096;  // what fits in the shared memory of sm_80

// Arrays of all rows and KV heads, under the names of assign_slots' arguments and results.
struct AssignArgs {
  const int32_t* wanted;
  const int32_t* step;
  const int32_t* fresh_from;
  int32_t* slot_ids;
  int32_t* slot_block;  // read, then updated
  int32_t* last_used;   // read, then updated
  int32_t* load_block;
  int32_t* load_slot;
  int32_t* load_count;
  int32_t* hits;
  int32_t* misses;
  int32_t* tail_slot;  // [B, K], the slot of block fresh_from or -1; may be null
  AssignSizes sizes{};
};

// Slots above kMaxSlots are refused by name.
ffi::Error LaunchAssign(const char* name, const AssignArgs& args, cudaStream_t stream);

}  // namespace nosa
