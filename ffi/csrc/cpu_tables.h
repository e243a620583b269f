// What the CPU handlers share: the assignment of slots and the moving of pages, over plain arrays.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "faults.h"
#include "handle.h"
#include "handlers.h"

namespace nosa {

// The arrays of assign_slots, those of all rows and KV heads; the names are those of its arguments and results.
struct AssignTables {
  const int32_t* wanted;
  const int32_t* step;
  const int32_t* fresh_from;
  int32_t* slot_ids;
  int32_t* slot_block;  // updated in place
  int32_t* last_used;   // updated in place
  int32_t* load_block;
  int32_t* load_slot;
  int32_t* load_count;
  int32_t* hits;
  int32_t* misses;
  int32_t* tail_slot;  // [B, K], the slot of block fresh_from or -1; may be null
};

void Assign(const AssignSizes& sizes, const AssignTables& tables);

// The transfer lists of one layer, and the cache on the device's side.
struct LayerTransfer {
  TransferSizes sizes;
  const int32_t* block;
  const int32_t* slot;
  const int32_t* count;
  const int32_t* page_table;
  std::byte* cache;
};

// Moves the listed blocks of all layers between the pool and the caches: to the pool for write_pages and store_blocks,
// else from it. Everything is checked before anything is moved.
ffi::Error MovePages(Caller caller, Handle handle, const std::vector<LayerTransfer>& layers);

// XLA aliases the two buffers; where it did not, the update happens in a copy.
template <typename From, typename To>
void CopyUnlessAliased(const From& from, To& to) {
  if (from.untyped_data() != to.untyped_data()) {
    std::memcpy(to.untyped_data(), from.untyped_data(), from.size_bytes());
  }
}

}  // namespace nosa
