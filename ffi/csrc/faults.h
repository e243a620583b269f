// What can be wrong with the numbers a transfer is given, in one form for the CPU and the GPU.
//
// The CPU handler returns Describe(fault) as its error. A kernel can only leave the fault in mapped memory, where
// HostPool.check() finds and describes it.
#pragma once

#include <cstdint>
#include <string>

namespace nosa {

enum class Caller : int32_t { kSwapIn, kWritePages, kFetchBlocks, kStoreBlocks, kListBlocks };

inline const char* NameOf(Caller caller) {
  switch (caller) {
    case Caller::kSwapIn: return "swap_in";
    case Caller::kWritePages: return "write_pages";
    case Caller::kFetchBlocks: return "fetch_blocks";
    case Caller::kStoreBlocks: return "store_blocks";
    case Caller::kListBlocks: return "list_blocks";
  }
  return "unknown handler";
}

enum class FaultKind : int32_t { kHandle, kPageSize, kCount, kBlock, kSlot, kPage };

struct Fault {
  FaultKind kind;
  Caller caller;
  int32_t slot;         // of the handle
  int32_t generation;   // of the handle
  int64_t row, head;    // where in the lists
  int64_t value;        // the number that is out of range
  int64_t limit;        // what it must stay below (kPageSize: what it must equal)
  int64_t block, page;  // kPage: whose page table entry `value` is, and the page it leads to
};

inline std::string Describe(const Fault& fault) {
  const auto text = [](int64_t number) { return std::to_string(number); };
  const std::string name = std::string(NameOf(fault.caller)) + ": ";
  const std::string where = " (row " + text(fault.row) + ", KV head " + text(fault.head) + ")";
  switch (fault.kind) {
    case FaultKind::kHandle:
      return name + "handle (" + text(fault.slot) + ", " + text(fault.generation) +
             ") names no open host pool: it is closed or renewed, or was not made for this device. An engine closes its "
             "pool with itself, and renews it when other requests get the pages of a state; Engine.prefill makes a new one";
    case FaultKind::kPageSize:
      return name + "a slot of the cache has " + text(fault.value) + " bytes, a page of the host pool " +
             text(fault.limit);
    case FaultKind::kCount:
      return name + "count " + text(fault.value) + where + " is outside the list's " + text(fault.limit) + " entries";
    case FaultKind::kBlock:
      return name + "block " + text(fault.value) + where + " is outside the " + text(fault.limit) +
             " blocks of the page table";
    case FaultKind::kSlot:
      return name + "slot " + text(fault.value) + where + " is outside the " + text(fault.limit) +
             " slots of the cache";
    case FaultKind::kPage:
      return name + "page table entry " + text(fault.value) + " of block " + text(fault.block) + where + " is page " +
             text(fault.page) + ", outside the host pool's " + text(fault.limit);
  }
  return name + "unknown fault";
}

}  // namespace nosa
