// assign_slots on the CPU: which slot each wanted block takes, and what has to be loaded.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "cpu_handlers.h"
#include "cpu_tables.h"
#include "handlers.h"

namespace nosa {
namespace {

constexpr int32_t kNone = -1;
constexpr int32_t kMissing = -2;

// The tables and lists of one (row, KV head).
struct Head {
  const int32_t* wanted;
  int32_t* slot_ids;
  int32_t* slot_block;
  int32_t* last_used;
  int32_t* load_block;
  int32_t* load_slot;
  int32_t* load_count;
  int32_t* hits;
  int32_t* misses;
  int32_t* tail_slot;  // of block fresh_from; may be null
};

// Buffers reused from head to head.
struct Workspace {
  Workspace(int64_t n_blocks, int64_t slots) : slot_of(n_blocks, kNone), wanted_slot(slots) {}

  std::vector<int32_t> slot_of;                      // by block; all kNone between calls
  std::vector<char> wanted_slot;                     // by slot: holds a block wanted in this step
  std::vector<int32_t> missing;                      // blocks without a slot, in order of `wanted`
  std::vector<std::pair<int64_t, int32_t>> victims;  // (age, slot), empty slots being the oldest
};

void AssignHead(const AssignSizes& sizes, int32_t step, int32_t fresh_from, const Head& head, Workspace& work) {
  const auto is_block = [&](int32_t id) { return id >= 0 && id < sizes.n_blocks; };
  for (int64_t s = sizes.slots; s-- > 0;) {  // downwards: should two slots hold one block, the lower is found
    if (is_block(head.slot_block[s])) work.slot_of[head.slot_block[s]] = static_cast<int32_t>(s);
  }

  // All hits are found before a victim is chosen: no slot wanted in this step may be taken away.
  std::fill(work.wanted_slot.begin(), work.wanted_slot.end(), 0);
  work.missing.clear();
  *head.hits = 0;
  for (int64_t j = 0; j < sizes.wanted; ++j) {
    const int32_t id = head.wanted[j];
    if (!is_block(id)) continue;
    const int32_t slot = work.slot_of[id];
    if (slot == kNone) {
      work.missing.push_back(id);
      work.slot_of[id] = kMissing;
    } else if (slot != kMissing && !work.wanted_slot[slot]) {
      work.wanted_slot[slot] = 1;
      ++*head.hits;
    }
  }

  // There are enough victims, since S >= C.
  work.victims.clear();
  for (int64_t s = 0; s < sizes.slots && !work.missing.empty(); ++s) {
    if (work.wanted_slot[s]) continue;
    const int64_t age = head.slot_block[s] < 0 ? std::numeric_limits<int64_t>::min() : head.last_used[s];
    work.victims.emplace_back(age, static_cast<int32_t>(s));
  }
  std::partial_sort(work.victims.begin(), work.victims.begin() + work.missing.size(), work.victims.end());

  int32_t loads = 0;
  for (size_t i = 0; i < work.missing.size(); ++i) {
    const int32_t id = work.missing[i];
    const int32_t slot = work.victims[i].second;
    const int32_t evicted = head.slot_block[slot];
    if (is_block(evicted) && work.slot_of[evicted] == slot) work.slot_of[evicted] = kNone;
    head.slot_block[slot] = id;
    work.slot_of[id] = slot;
    if (id < fresh_from) {  // a block from fresh_from on was never written to the host
      head.load_block[loads] = id;
      head.load_slot[loads] = slot;
      ++loads;
    }
  }
  *head.load_count = *head.misses = loads;
  std::fill(head.load_block + loads, head.load_block + sizes.wanted, kNone);
  std::fill(head.load_slot + loads, head.load_slot + sizes.wanted, kNone);

  if (head.tail_slot != nullptr) *head.tail_slot = kNone;
  for (int64_t j = 0; j < sizes.wanted; ++j) {
    const int32_t id = head.wanted[j];
    head.slot_ids[j] = is_block(id) ? work.slot_of[id] : kNone;
    if (head.tail_slot != nullptr && id == fresh_from && is_block(id)) *head.tail_slot = head.slot_ids[j];
    if (head.slot_ids[j] >= 0) head.last_used[head.slot_ids[j]] = step;
  }
  for (int64_t s = 0; s < sizes.slots; ++s) {
    if (is_block(head.slot_block[s])) work.slot_of[head.slot_block[s]] = kNone;
  }
}

ffi::Error AssignSlots(Int32Buffer3 wanted, Int32Buffer3 slot_block, Int32Buffer3 last_used,
                       ffi::Buffer<ffi::S32, 0> step, Int32Buffer1 fresh_from, Int32Result3 slot_ids,
                       Int32Result3 new_slot_block, Int32Result3 new_last_used, Int32Result3 load_block,
                       Int32Result3 load_slot, Int32Result2 load_count, Int32Result2 hits, Int32Result2 misses,
                       int64_t n_blocks) {
  AssignSizes sizes{};
  if (auto error = ReadAssignSizes(wanted, slot_block, last_used, fresh_from, n_blocks, &sizes); error.failure()) {
    return error;
  }
  CopyUnlessAliased(slot_block, *new_slot_block);
  CopyUnlessAliased(last_used, *new_last_used);
  Assign(sizes, {wanted.typed_data(), step.typed_data(), fresh_from.typed_data(), slot_ids->typed_data(),
                 new_slot_block->typed_data(), new_last_used->typed_data(), load_block->typed_data(),
                 load_slot->typed_data(), load_count->typed_data(), hits->typed_data(), misses->typed_data(), nullptr});
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kHandler, AssignSlots, BindAssign(ffi::Ffi::Bind()));

}  // namespace

void Assign(const AssignSizes& sizes, const AssignTables& tables) {
  Workspace work(sizes.n_blocks, sizes.slots);
  for (int64_t h = 0; h < sizes.rows * sizes.heads; ++h) {
    const int64_t c = h * sizes.wanted, s = h * sizes.slots;
    AssignHead(sizes, *tables.step, tables.fresh_from[h / sizes.heads],
               Head{tables.wanted + c, tables.slot_ids + c, tables.slot_block + s, tables.last_used + s,
                    tables.load_block + c, tables.load_slot + c, tables.load_count + h, tables.hits + h,
                    tables.misses + h, tables.tail_slot == nullptr ? nullptr : tables.tail_slot + h},
               work);
  }
}

XLA_FFI_Handler* const kAssignSlotsCpu = kHandler;

}  // namespace nosa
