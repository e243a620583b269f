// assign_slots of one (row, KV head) by a team of warps of one CTA, in shared memory.
//
// A map by block leads to the slot that holds it. The map is never cleared: whether map[block] means something is seen
// in held[map[block]], which is; either it holds that block, or the block has no slot. Victims are chosen one after the
// other, which is quicker than sorting for the few blocks that a step misses. Loops are not unrolled: code that runs
// once waits for its instructions more than for anything else.
#pragma once

#include <cuda_runtime.h>

#include "transfer_kernel.cuh"

namespace nosa {

constexpr int32_t kNoBlock = INT32_MAX;      // in a slot: no block of the row
constexpr int32_t kEmpty = INT32_MAX - 1;    // in a slot: nothing at all
constexpr int32_t kMostBlocks = kEmpty - 1;  // M, above which ids could be mistaken for these

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

inline int64_t Whole16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Bytes of shared memory that a team needs, a multiple of 16.
inline int64_t TeamBytes(int64_t wanted, int64_t slots, int64_t blocks) {
  return wanted * static_cast<int64_t>(sizeof(int4) + sizeof(int32_t)) +
         3 * slots * static_cast<int64_t>(sizeof(int32_t)) + 16 + 16 +
         Whole16(blocks * static_cast<int64_t>(sizeof(uint16_t)));
}

class SlotTeam {
 public:
  // By all threads of the team, which is number `number` of the CTA's and has `n_threads` from `first_thread` on.
  __device__ SlotTeam(const SlotTables& tables, std::byte* shared, int32_t number, int32_t first_thread,
                      int32_t n_threads, int64_t pair)
      : tables_(tables),
        list_(reinterpret_cast<int4*>(shared)),
        counts_(reinterpret_cast<int32_t*>(list_ + tables.n_wanted)),
        want_(counts_ + 4),
        held_(want_ + tables.n_wanted),
        age_(held_ + tables.n_slots),
        claimed_(age_ + tables.n_slots),
        map_(reinterpret_cast<uint16_t*>(claimed_ + tables.n_slots)),
        pair_(pair),
        number_(number),
        thread_(static_cast<int32_t>(threadIdx.x) - first_thread),
        n_threads_(n_threads) {}

  // Finds what is resident and gives the others slots. Returns the number of blocks to load, which the list then holds
  // as {block, slot, page table entry, -}. Writes shared memory only.
  __device__ int32_t Assign() {
    Stage();
    Match();
    if (counts_[kMissing] > 0) {
      if (thread_ < kLanes) Replace();
      Sync();
    }
    return counts_[kLoads];
  }

  // Writes the results.
  __device__ void Write() const {
    for (int32_t j = thread_; j < tables_.n_wanted; j += n_threads_) {
      const int32_t slot = IsBlock(want_[j]) ? Find(want_[j]) : -1;
      tables_.slot_ids[pair_ * tables_.n_wanted + j] = slot;
      if (slot >= 0) tables_.last_used[pair_ * tables_.n_slots + slot] = step_;
    }
    if (counts_[kMissing] > 0) {
      for (int32_t slot = thread_; slot < tables_.n_slots; slot += n_threads_) {
        if (claimed_[slot] != 0) tables_.slot_block[pair_ * tables_.n_slots + slot] = held_[slot];
      }
    }
    if (thread_ == 0) {
      tables_.hits[pair_] = counts_[kHits];
      tables_.misses[pair_] = counts_[kLoads];
      tables_.tail_slot[pair_] = IsBlock(fresh_from_) ? FindClaimed(fresh_from_) : -1;
    }
  }

 private:
  enum Count { kHits, kMissing, kLoads };
  static constexpr int kBatch = 4;  // loads under way per thread

  __device__ bool IsBlock(int32_t id) const { return id >= 0 && id < tables_.n_blocks; }

  // The slot that holds a block, or -1.
  __device__ int32_t Find(int32_t block) const {
    const int32_t slot = map_[block];
    return slot < tables_.n_slots && held_[slot] == block ? slot : -1;
  }

  // The same for a block that counts only if it is wanted.
  __device__ int32_t FindClaimed(int32_t block) const {
    const int32_t slot = Find(block);
    return slot >= 0 && claimed_[slot] != 0 ? slot : -1;
  }

  __device__ void Sync() const {
    if (n_threads_ == kLanes) {
      __syncwarp();
    } else {
      SyncThreads(number_ + 1, n_threads_);
    }
  }

  __device__ void Stage() {
    const int32_t* const wanted = tables_.wanted + pair_ * tables_.n_wanted;
    const int32_t* const slot_block = tables_.slot_block + pair_ * tables_.n_slots;
    const int32_t* const last_used = tables_.last_used + pair_ * tables_.n_slots;
    const int32_t first = thread_ < tables_.n_wanted ? wanted[thread_] : -1;  // with the loads below
    step_ = *tables_.step;
    fresh_from_ = tables_.fresh_from[static_cast<uint32_t>(pair_) / static_cast<uint32_t>(tables_.heads)];
    if (thread_ < 3) counts_[thread_] = 0;
#pragma unroll 1
    for (int32_t from = thread_; from < tables_.n_slots; from += kBatch * n_threads_) {
      int32_t block[kBatch], age[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t slot = from + i * n_threads_;
        if (slot >= tables_.n_slots) break;
        block[i] = slot_block[slot];
        age[i] = last_used[slot];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t slot = from + i * n_threads_;
        if (slot >= tables_.n_slots) break;
        held_[slot] = IsBlock(block[i]) ? block[i] : block[i] < 0 ? kEmpty : kNoBlock;
        age_[slot] = age[i];
        claimed_[slot] = 0;
        if (IsBlock(block[i])) map_[block[i]] = static_cast<uint16_t>(slot);
      }
    }
    if (thread_ < tables_.n_wanted) want_[thread_] = first;
#pragma unroll 1
    for (int32_t j = thread_ + n_threads_; j < tables_.n_wanted; j += n_threads_) want_[j] = wanted[j];
    Sync();
  }

  // Claims the slots of wanted blocks and counts them, and the entries without one.
  __device__ void Match() {
#pragma unroll 1
    for (int32_t from = 0; from < tables_.n_wanted; from += n_threads_) {
      const int32_t j = from + thread_;
      const int32_t id = j < tables_.n_wanted ? want_[j] : -1;
      const int32_t slot = IsBlock(id) ? Find(id) : -1;
      const bool hit = slot >= 0 && atomicExch(&claimed_[slot], 1) == 0;  // a repeated id counts once
      const uint32_t hits = __ballot_sync(kWholeWarp, hit);
      const uint32_t missing = __ballot_sync(kWholeWarp, IsBlock(id) && slot < 0);
      if (threadIdx.x % kLanes == 0) {
        if (hits != 0) atomicAdd(&counts_[kHits], __popc(hits));
        if (missing != 0) atomicAdd(&counts_[kMissing], __popc(missing));
      }
    }
    Sync();
  }

  // What a lane offers as the next victim: of the slots lane, lane + 32, ... the first empty one, or else the one that
  // was used the longest ago, the lower of equals.
  struct Candidate {
    int32_t slot, age;  // slot -1: none
    bool is_empty;
  };

  __device__ Candidate Offer(int32_t lane) const {
    Candidate best{-1, INT32_MAX, false};
#pragma unroll 1
    for (int32_t slot = lane; slot < tables_.n_slots; slot += kLanes) {
      if (claimed_[slot] != 0) continue;
      if (held_[slot] == kEmpty) return {slot, 0, true};
      if (best.slot < 0 || age_[slot] < best.age) best = {slot, age_[slot], false};
    }
    return best;
  }

  // Gives the missing blocks slots, in the order of `wanted`; by one warp.
  __device__ void Replace() {
    const int32_t lane = thread_;
    int32_t n_loads = 0;
    Candidate mine = Offer(lane);
#pragma unroll 1
    for (int32_t from = 0; from < tables_.n_wanted; from += kLanes) {
      const int32_t id = from + lane < tables_.n_wanted ? want_[from + lane] : -1;
      uint32_t todo = __ballot_sync(kWholeWarp, IsBlock(id) && Find(id) < 0);
#pragma unroll 1
      while (todo != 0) {
        const int32_t block = __shfl_sync(kWholeWarp, id, __ffs(static_cast<int>(todo)) - 1);
        const uint32_t empty = __ballot_sync(kWholeWarp, mine.is_empty);
        const int32_t oldest = __reduce_min_sync(kWholeWarp, mine.age);
        const bool runs = empty != 0 ? mine.is_empty : mine.slot >= 0 && mine.age == oldest;
        const uint32_t slot = __reduce_min_sync(kWholeWarp, runs ? static_cast<uint32_t>(mine.slot) : UINT32_MAX);
        if (slot == static_cast<uint32_t>(mine.slot)) {
          map_[block] = static_cast<uint16_t>(slot);
          held_[slot] = block;
          claimed_[slot] = 1;
          if (block < fresh_from_) list_[n_loads] = int4{block, static_cast<int32_t>(slot), -1, 0};
          mine = Offer(lane);
        }
        if (block < fresh_from_) ++n_loads;
        todo &= ~__ballot_sync(kWholeWarp, id == block);  // with its repetitions; those in later rounds find its slot
      }
      __syncwarp();
    }
    const int64_t row = static_cast<uint32_t>(pair_) / static_cast<uint32_t>(tables_.heads);
#pragma unroll 1
    for (int32_t entry = lane; entry < n_loads; entry += kLanes) {
      list_[entry].z = tables_.page_table[row * tables_.n_blocks + list_[entry].x];
    }
    if (lane == 0) counts_[kLoads] = n_loads;
  }

  const SlotTables& tables_;
  int4* list_;
  int32_t* counts_;
  int32_t* want_;
  int32_t* held_;     // by slot: its block
  int32_t* age_;      // by slot
  int32_t* claimed_;  // by slot: whether its block is wanted now
  uint16_t* map_;     // by block
  int64_t pair_;
  int32_t number_, thread_, n_threads_;
  int32_t step_ = 0, fresh_from_ = 0;
};

}  // namespace nosa
