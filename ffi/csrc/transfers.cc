// swap_in and write_pages on the CPU: pages between the host pool and the slots of a cache.
#include <cstring>
#include <optional>
#include <vector>

#include "cpu_handlers.h"
#include "faults.h"
#include "handlers.h"
#include "host_pool.h"

namespace nosa {
namespace {

struct Copy {
  int64_t page;  // of the pool
  int64_t slot;  // of the whole cache: (row * K + head) * S + slot
};

struct Lists {
  const int32_t* block;
  const int32_t* slot;
  const int32_t* count;
  const int32_t* page_table;
};

// Turns the lists into copies, or names the first number that is out of range.
std::optional<Fault> ResolveCopies(const TransferSizes& sizes, int64_t n_pages, const Lists& lists,
                                   std::vector<Copy>* copies) {
  for (int64_t h = 0; h < sizes.rows * sizes.heads; ++h) {
    const int64_t row = h / sizes.heads, head = h % sizes.heads;
    const auto fault = [&](FaultKind kind, int64_t value, int64_t limit, int64_t block = 0, int64_t page = 0) {
      return Fault{kind, false, 0, 0, row, head, value, limit, block, page};
    };
    if (lists.count[h] < 0 || lists.count[h] > sizes.entries) {
      return fault(FaultKind::kCount, lists.count[h], sizes.entries);
    }
    for (int64_t j = h * sizes.entries; j < h * sizes.entries + lists.count[h]; ++j) {
      const int64_t block = lists.block[j], slot = lists.slot[j];
      if (block < 0 || block >= sizes.blocks) return fault(FaultKind::kBlock, block, sizes.blocks);
      if (slot < 0 || slot >= sizes.slots) return fault(FaultKind::kSlot, slot, sizes.slots);
      const int64_t entry = lists.page_table[row * sizes.blocks + block];
      const int64_t page = (entry * sizes.n_layers + sizes.layer) * sizes.heads + head;
      if (entry < 0 || page >= n_pages) return fault(FaultKind::kPage, entry, n_pages, block, page);
      copies->push_back({page, h * sizes.slots + slot});
    }
  }
  return std::nullopt;
}

template <bool writes>
ffi::Error Transfer(Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 block, Int32Buffer3 slot,
                    Int32Buffer2 count, Int32Buffer2 page_table, ffi::Result<ffi::AnyBuffer> result, int64_t layer,
                    int64_t n_layers, int64_t /*n_ctas*/) {
  TransferSizes sizes{};
  if (auto error = ReadTransferSizes(writes ? "write_pages" : "swap_in", handle, cache, block, slot, count,
                                     page_table, layer, n_layers, &sizes);
      error.failure()) {
    return error;
  }
  const Handle key{handle.typed_data()[0], handle.typed_data()[1]};
  const PagesInUse in_use = Registry::Get().Use(key);
  const auto& pages = in_use.pages;
  if (pages == nullptr) {
    const Fault fault{FaultKind::kHandle, writes, key.slot, key.generation, 0, 0, 0, 0, 0, 0};
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, Describe(fault));
  }
  // Everything is checked before anything is moved.
  std::vector<Copy> copies;
  std::optional<Fault> fault;
  if (static_cast<uint64_t>(sizes.page_bytes) != pages->page_bytes) {
    fault = Fault{FaultKind::kPageSize, writes, 0, 0, 0, 0, sizes.page_bytes, static_cast<int64_t>(pages->page_bytes),
                  0, 0};
  } else {
    fault = ResolveCopies(sizes, static_cast<int64_t>(pages->n_pages),
                          {block.typed_data(), slot.typed_data(), count.typed_data(), page_table.typed_data()},
                          &copies);
  }
  if (fault) {
    fault->writes = writes;
    return ffi::Error::InvalidArgument(Describe(*fault));
  }

  auto* slots = static_cast<std::byte*>(result->untyped_data());
  if (slots != cache.untyped_data()) std::memcpy(slots, cache.untyped_data(), cache.size_bytes());
  const size_t bytes = pages->page_bytes;
  for (const Copy& copy : copies) {
    std::byte* const in_slot = slots + copy.slot * bytes;
    std::byte* const in_page = pages->page(copy.page);
    std::memcpy(writes ? in_page : in_slot, writes ? in_slot : in_page, bytes);
  }
  PoolCounters& counters = *pages->counters;
  (writes ? counters.pages_written : counters.pages_read) += copies.size();
  ++(writes ? counters.write_calls : counters.read_calls);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kSwapIn, Transfer<false>, BindTransfer(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kWritePages, Transfer<true>, BindTransfer(ffi::Ffi::Bind()));

}  // namespace

XLA_FFI_Handler* const kSwapInCpu = kSwapIn;
XLA_FFI_Handler* const kWritePagesCpu = kWritePages;

}  // namespace nosa
