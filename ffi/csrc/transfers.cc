// swap_in, write_pages and store_blocks on the CPU: pages between the host pool and the slots of caches.
#include <cstring>
#include <optional>
#include <vector>

#include "cpu_handlers.h"
#include "cpu_tables.h"
#include "host_pool.h"

namespace nosa {
namespace {

struct Copy {
  std::byte* in_page;
  std::byte* in_slot;
};

// Turns one layer's lists into copies, or names the first number that is out of range.
std::optional<Fault> ResolveCopies(Caller caller, const Pages& pages, const LayerTransfer& layer,
                                   std::vector<Copy>* copies) {
  const TransferSizes& sizes = layer.sizes;
  const auto n_pages = static_cast<int64_t>(pages.n_pages), page_bytes = static_cast<int64_t>(pages.page_bytes);
  if (sizes.page_bytes != page_bytes) {
    return Fault{FaultKind::kPageSize, caller, 0, 0, 0, 0, sizes.page_bytes, page_bytes, 0, 0};
  }
  for (int64_t h = 0; h < sizes.rows * sizes.heads; ++h) {
    const int64_t row = h / sizes.heads, head = h % sizes.heads;
    const auto fault = [&](FaultKind kind, int64_t value, int64_t limit, int64_t block = 0, int64_t page = 0) {
      return Fault{kind, caller, 0, 0, row, head, value, limit, block, page};
    };
    if (layer.count[h] < 0 || layer.count[h] > sizes.entries) {
      return fault(FaultKind::kCount, layer.count[h], sizes.entries);
    }
    for (int64_t j = h * sizes.entries; j < h * sizes.entries + layer.count[h]; ++j) {
      const int64_t block = layer.block[j], slot = layer.slot[j];
      if (block < 0 || block >= sizes.blocks) return fault(FaultKind::kBlock, block, sizes.blocks);
      if (slot < 0 || slot >= sizes.slots) return fault(FaultKind::kSlot, slot, sizes.slots);
      const int64_t entry = layer.page_table[row * sizes.blocks + block];
      const int64_t page = (entry * sizes.n_layers + sizes.layer) * sizes.heads + head;
      if (entry < 0 || page >= n_pages) return fault(FaultKind::kPage, entry, n_pages, block, page);
      copies->push_back({pages.page(page), layer.cache + (h * sizes.slots + slot) * page_bytes});
    }
  }
  return std::nullopt;
}

template <bool writes>
ffi::Error Transfer(Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 block, Int32Buffer3 slot,
                    Int32Buffer2 count, Int32Buffer2 page_table, ffi::Result<ffi::AnyBuffer> result, int64_t layer,
                    int64_t n_layers, int64_t /*n_ctas*/) {
  constexpr Caller caller = writes ? Caller::kWritePages : Caller::kSwapIn;
  TransferSizes sizes{};
  if (auto error = ReadTransferSizes(NameOf(caller), handle, cache, block, slot, count, page_table, layer, n_layers,
                                     &sizes);
      error.failure()) {
    return error;
  }
  CopyUnlessAliased(cache, *result);
  return MovePages(caller, {handle.typed_data()[0], handle.typed_data()[1]},
                   {{sizes, block.typed_data(), slot.typed_data(), count.typed_data(), page_table.typed_data(),
                     static_cast<std::byte*>(result->untyped_data())}});
}

ffi::Error StoreBlocks(Int32Buffer1 handle, Int32Buffer1 block, PredBuffer1 full, Int32Buffer2 page_table,
                       ffi::AnyBuffer /*after*/, ffi::RemainingArgs arrays, ffi::RemainingRets results,
                       int64_t /*n_ctas*/) {
  TransferSizes sizes{};
  if (auto error = ReadStoreSizes(handle, block, full, page_table, arrays, results.size(), &sizes); error.failure()) {
    return error;
  }
  // As lists of at most one entry, which all layers share.
  std::vector<int32_t> listed, count;
  for (int64_t h = 0; h < sizes.rows * sizes.heads; ++h) {
    listed.push_back(block.typed_data()[h / sizes.heads]);
    count.push_back(full.typed_data()[h / sizes.heads] ? 1 : 0);
  }
  std::vector<LayerTransfer> layers;
  for (size_t layer = 0; layer < results.size(); ++layer) {
    const auto from = arrays.get<ffi::AnyBuffer>(layer);
    const auto to = results.get<ffi::AnyBuffer>(layer);
    CopyUnlessAliased(*from, **to);
    sizes.layer = static_cast<int64_t>(layer);
    layers.push_back({sizes, listed.data(), arrays.get<Int32Buffer2>(results.size() + layer)->typed_data(),
                      count.data(), page_table.typed_data(), static_cast<std::byte*>((*to)->untyped_data())});
  }
  return MovePages(Caller::kStoreBlocks, {handle.typed_data()[0], handle.typed_data()[1]}, layers);
}

XLA_FFI_DEFINE_HANDLER(kSwapIn, Transfer<false>, BindTransfer(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kWritePages, Transfer<true>, BindTransfer(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kStoreBlocks, StoreBlocks, BindStore(ffi::Ffi::Bind()));

}  // namespace

ffi::Error MovePages(Caller caller, Handle handle, const std::vector<LayerTransfer>& layers) {
  const bool writes = caller == Caller::kWritePages || caller == Caller::kStoreBlocks;
  const PagesInUse in_use = Registry::Get().Use(handle);
  const auto& pages = in_use.pages;
  if (pages == nullptr) {
    const Fault fault{FaultKind::kHandle, caller, handle.slot, handle.generation, 0, 0, 0, 0, 0, 0};
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, Describe(fault));
  }
  std::vector<Copy> copies;
  for (const LayerTransfer& layer : layers) {
    if (const auto fault = ResolveCopies(caller, *pages, layer, &copies)) {
      return ffi::Error::InvalidArgument(Describe(*fault));
    }
  }
  for (const Copy& copy : copies) {
    std::memcpy(writes ? copy.in_page : copy.in_slot, writes ? copy.in_slot : copy.in_page, pages->page_bytes);
  }
  PoolCounters& counters = *pages->counters;
  (writes ? counters.pages_written : counters.pages_read) += copies.size();
  ++(writes ? counters.write_calls : counters.read_calls);
  return ffi::Error::Success();
}

XLA_FFI_Handler* const kSwapInCpu = kSwapIn;
XLA_FFI_Handler* const kWritePagesCpu = kWritePages;
XLA_FFI_Handler* const kStoreBlocksCpu = kStoreBlocks;

}  // namespace nosa
