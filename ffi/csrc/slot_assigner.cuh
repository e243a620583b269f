// assign_slots of one (row, KV head) by one warp, with its lists in registers.
//
// A map by block, in shared memory, leads to the slot that holds it. The map is never cleared: whether map[block] means
// something is seen in held[map[block]], which is; either it holds that block, or the block has no slot. Victims are
// chosen one after the other, which is quicker than sorting for the few blocks that a step misses.
#pragma once

#include <cuda_runtime.h>

#include "token_kernel.cuh"

namespace nosa {

constexpr int32_t kNoBlock = INT32_MAX;  // held by a slot without a block of the row
constexpr int32_t kClaimed = INT32_MIN;  // the bit that marks a slot whose block is wanted now

// Arrays of all rows and KV heads, under the names of fetch_blocks' arguments and results.
struct SlotTables {
  const int32_t* wanted;
  const int32_t* step;
  const int32_t* fresh_from;
  const int32_t* page_table;
  int32_t* slot_ids;
  int32_t* slot_block;  // read, then updated
  int32_t* last_used;   // read, then updated
  int32_t* hits;
  int32_t* misses;
  int32_t* tail_slot;
  int32_t heads = 0, n_wanted = 0, n_slots = 0, n_blocks = 0;
};

// Bytes of shared memory that a warp needs, a multiple of 16; `slots_per_lane` is the template argument below.
inline int64_t AssignerBytes(int64_t wanted, int64_t slots_per_lane, int64_t blocks) {
  const auto whole = [](int64_t bytes) { return (bytes + 15) / 16 * 16; };
  return wanted * static_cast<int64_t>(sizeof(int4)) +
         slots_per_lane * kLanes * static_cast<int64_t>(sizeof(int32_t)) +
         whole(blocks * static_cast<int64_t>(sizeof(uint16_t)));
}

// Lane l holds the wanted entries and the slots l, l + 32, l + 64, ...: kWants and kSlots of them at most.
template <int kWants, int kSlots>
class SlotAssigner {
 public:
  __device__ SlotAssigner(const SlotTables& tables, std::byte* shared, int64_t pair)
      : tables_(tables),
        list_(reinterpret_cast<int4*>(shared)),
        held_(reinterpret_cast<int32_t*>(list_ + tables.n_wanted)),
        map_(reinterpret_cast<uint16_t*>(held_ + kSlots * kLanes)),
        pair_(pair),
        lane_(threadIdx.x % kLanes) {}

  // Finds what is resident and gives the others slots. Returns the number of blocks to load, which the list then holds
  // as {block, slot, page table entry, which wanted entry}. Writes shared memory only.
  __device__ int32_t Assign() {
    Stage();
    // Without branches, so that the lookups of a lane overlap.
#pragma unroll
    for (int i = 0; i < kWants; ++i) {
      const bool valid = IsBlock(want_[i]);
      place_[i] = valid ? Find(want_[i]) : -1;
      missing_ |= static_cast<uint32_t>(valid && place_[i] < 0) << i;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWants; ++i) {
      if (place_[i] >= 0) held_[place_[i]] = want_[i] | kClaimed;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSlots; ++i) claimed_ |= static_cast<uint32_t>(held_[i * kLanes + lane_] < 0) << i;
    if (__builtin_expect(__any_sync(kWholeWarp, missing_ != 0), 0)) Replace();
    return n_loads_;
  }

  // Writes the results. Returns the slot of block fresh_from, or -1.
  __device__ int32_t Write() const {
    int32_t tail = -1;
#pragma unroll
    for (int i = 0; i < kWants; ++i) {
      const int32_t at = i * kLanes + lane_;
      if (at < tables_.n_wanted) tables_.slot_ids[pair_ * tables_.n_wanted + at] = place_[i];
      if (want_[i] == fresh_from_) tail = max(tail, place_[i]);  // -1 where fresh_from is no block
    }
    const uint32_t used = claimed_ | taken_;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if ((used >> i & 1) != 0) tables_.last_used[pair_ * tables_.n_slots + i * kLanes + lane_] = step_;
    }
    if (__any_sync(kWholeWarp, taken_ != 0)) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        const int32_t slot = i * kLanes + lane_;
        if ((taken_ >> i & 1) != 0) tables_.slot_block[pair_ * tables_.n_slots + slot] = held_[slot] & ~kClaimed;
      }
    }
    tail = __reduce_max_sync(kWholeWarp, tail);
    const uint32_t hits = __reduce_add_sync(kWholeWarp, static_cast<uint32_t>(__popc(claimed_)));
    if (lane_ == 0) {
      tables_.hits[pair_] = static_cast<int32_t>(hits);
      tables_.misses[pair_] = n_loads_;
      tables_.tail_slot[pair_] = tail;
    }
    return tail;
  }

  // Writes which wanted entries are on the list that Assign left.
  __device__ void WriteLate(int32_t* late) const {
#pragma unroll
    for (int i = 0; i < kWants; ++i) {
      const int32_t at = i * kLanes + lane_;
      if (at >= tables_.n_wanted) continue;
      late[pair_ * tables_.n_wanted + at] = static_cast<int32_t>((missing_ >> i & 1) != 0 && want_[i] < fresh_from_);
    }
  }

 private:
  __device__ bool IsBlock(int32_t id) const { return id >= 0 && id < tables_.n_blocks; }

  // The slot that holds a block of the row, or -1.
  __device__ int32_t Find(int32_t block) const {
    const int32_t slot = map_[block];
    const bool exists = slot < tables_.n_slots;
    return exists && (held_[exists ? slot : 0] & ~kClaimed) == block ? slot : -1;
  }

  // Reads the tables; all loads are under way before the first is used.
  __device__ void Stage() {
    int32_t block[kSlots];
#pragma unroll
    for (int i = 0; i < kWants; ++i) {
      const int32_t at = i * kLanes + lane_;
      want_[i] = at < tables_.n_wanted ? tables_.wanted[pair_ * tables_.n_wanted + at] : -1;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int32_t slot = i * kLanes + lane_;
      block[i] = slot < tables_.n_slots ? tables_.slot_block[pair_ * tables_.n_slots + slot] : kNoBlock;
      age_[i] = slot < tables_.n_slots ? tables_.last_used[pair_ * tables_.n_slots + slot] : 0;
    }
    step_ = *tables_.step;
    fresh_from_ = tables_.fresh_from[Row()];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int32_t slot = i * kLanes + lane_;
      held_[slot] = IsBlock(block[i]) ? block[i] : kNoBlock;
      if (IsBlock(block[i])) map_[block[i]] = static_cast<uint16_t>(slot);
      empty_ |= static_cast<uint32_t>(block[i] < 0) << i;
      exists_ |= static_cast<uint32_t>(slot < tables_.n_slots) << i;
    }
    __syncwarp();
  }

  __device__ int64_t Row() const { return static_cast<uint32_t>(pair_) / static_cast<uint32_t>(tables_.heads); }

  // Gives the missing blocks slots, in the order of `wanted`.
  __device__ void Replace() {
    int32_t n_missing = 0;
#pragma unroll
    for (int i = 0; i < kWants; ++i) {
      const bool mine = (missing_ >> i & 1) != 0;
      const uint32_t those = __ballot_sync(kWholeWarp, mine);
      if (mine) list_[n_missing + __popc(those & ((1u << lane_) - 1))] = {want_[i], i * kLanes + lane_, 0, 0};
      n_missing += __popc(those);
    }
    __syncwarp();
#pragma unroll 1
    for (int32_t entry = 0; entry < n_missing; ++entry) {
      const int32_t block = list_[entry].x, at = list_[entry].y;
      if (Find(block) >= 0) continue;  // an id that was there before
      const int32_t slot = TakeSlot();
      __syncwarp();  // the list is written behind the entry that all lanes have read
      if (lane_ == 0) {
        map_[block] = static_cast<uint16_t>(slot);
        held_[slot] = block | kClaimed;
        if (block < fresh_from_) list_[n_loads_] = int4{block, slot, -1, at};
      }
      if (block < fresh_from_) ++n_loads_;
      __syncwarp();
    }
    for (int32_t entry = lane_; entry < n_loads_; entry += kLanes) {
      list_[entry].z = tables_.page_table[Row() * tables_.n_blocks + list_[entry].x];
    }
#pragma unroll
    for (int i = 0; i < kWants; ++i) {
      if ((missing_ >> i & 1) != 0) place_[i] = Find(want_[i]);
    }
  }

  // The first empty slot, or else the one that was used the longest ago, the lower of equals.
  __device__ int32_t TakeSlot() {
    const uint32_t free = exists_ & ~claimed_ & ~taken_, empty = free & empty_;
    uint32_t mine = UINT32_MAX;
    if (__any_sync(kWholeWarp, empty != 0)) {
      if (empty != 0) mine = (__ffs(static_cast<int>(empty)) - 1) * kLanes + lane_;
    } else {
      int32_t oldest = INT32_MAX;
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        if ((free >> i & 1) != 0) oldest = min(oldest, age_[i]);
      }
      oldest = __reduce_min_sync(kWholeWarp, oldest);
#pragma unroll
      for (int i = kSlots - 1; i >= 0; --i) {
        if ((free >> i & 1) != 0 && age_[i] == oldest) mine = i * kLanes + lane_;
      }
    }
    const uint32_t slot = __reduce_min_sync(kWholeWarp, mine);
    if (slot % kLanes == static_cast<uint32_t>(lane_)) taken_ |= 1u << slot / kLanes;
    return static_cast<int32_t>(slot);
  }

  const SlotTables& tables_;
  int4* list_;
  int32_t* held_;  // by slot: its block, with kClaimed if wanted now
  uint16_t* map_;  // by block: its slot, if held_ says so
  int64_t pair_;
  int32_t lane_, step_ = 0, fresh_from_ = 0, n_loads_ = 0;
  int32_t want_[kWants], age_[kSlots];
  int32_t place_[kWants];  // the slot of each wanted entry
  uint32_t missing_ = 0;   // those whose block was in no slot, as bits
  // Of the lane's slots, as bits; taken: by a block that was missing.
  uint32_t exists_ = 0, empty_ = 0, claimed_ = 0, taken_ = 0;
};

}  // namespace nosa
