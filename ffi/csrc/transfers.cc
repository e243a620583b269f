// swap_in and write_pages on the CPU: pages between the host pool and the slots of a cache.
#include <cstring>
#include <string>
#include <vector>

#include "cpu_handlers.h"
#include "handlers.h"
#include "host_pool.h"

namespace nosa {
namespace {

enum class Direction { kSwapIn, kWritePages };

struct Copy {
  int64_t page;  // of the pool
  int64_t slot;  // of the whole cache: (row * K + head) * S + slot
};

// Turns the lists into copies. Everything is checked before anything is moved.
ffi::Error ResolveCopies(const std::string& name, const TransferSizes& sizes, const Pages& pages,
                         const int32_t* block, const int32_t* slot, const int32_t* count, const int32_t* page_table,
                         std::vector<Copy>* copies) {
  if (static_cast<uint64_t>(sizes.page_bytes) != pages.page_bytes) {
    return ffi::Error::InvalidArgument(name + ": a slot of the cache has " + std::to_string(sizes.page_bytes) +
                                       " bytes, a page of the host pool " + std::to_string(pages.page_bytes));
  }
  for (int64_t h = 0; h < sizes.rows * sizes.heads; ++h) {
    const int64_t row = h / sizes.heads, head = h % sizes.heads;
    const std::string where = " (row " + std::to_string(row) + ", KV head " + std::to_string(head) + ")";
    if (count[h] < 0 || count[h] > sizes.entries) {
      return ffi::Error::InvalidArgument(name + ": count " + std::to_string(count[h]) + where +
                                         " is outside the list's " + std::to_string(sizes.entries) + " entries");
    }
    for (int64_t j = h * sizes.entries; j < h * sizes.entries + count[h]; ++j) {
      if (block[j] < 0 || block[j] >= sizes.blocks) {
        return ffi::Error::InvalidArgument(name + ": block " + std::to_string(block[j]) + where + " is outside the " +
                                           std::to_string(sizes.blocks) + " blocks of the page table");
      }
      if (slot[j] < 0 || slot[j] >= sizes.slots) {
        return ffi::Error::InvalidArgument(name + ": slot " + std::to_string(slot[j]) + where + " is outside the " +
                                           std::to_string(sizes.slots) + " slots of the cache");
      }
      const int64_t entry = page_table[row * sizes.blocks + block[j]];
      const int64_t page = (entry * sizes.n_layers + sizes.layer) * sizes.heads + head;
      if (entry < 0 || page >= static_cast<int64_t>(pages.n_pages)) {
        return ffi::Error::InvalidArgument(
            name + ": page table entry " + std::to_string(entry) + " of block " + std::to_string(block[j]) + where +
            " is page " + std::to_string(page) + ", outside the host pool's " + std::to_string(pages.n_pages));
      }
      copies->push_back({page, h * sizes.slots + slot[j]});
    }
  }
  return ffi::Error::Success();
}

template <Direction direction>
ffi::Error Transfer(Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 block, Int32Buffer3 slot,
                    Int32Buffer2 count, Int32Buffer2 page_table, ffi::Result<ffi::AnyBuffer> result, int64_t layer,
                    int64_t n_layers) {
  const std::string name = direction == Direction::kSwapIn ? "swap_in" : "write_pages";
  TransferSizes sizes;
  if (auto error = ReadTransferSizes(name.c_str(), handle, cache, block, slot, count, page_table, layer, n_layers,
                                     &sizes);
      error.failure()) {
    return error;
  }
  std::string reason;
  const auto pages = Registry::Get().Find({handle.typed_data()[0], handle.typed_data()[1]}, &reason);
  if (pages == nullptr) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, name + ": " + reason);
  std::vector<Copy> copies;
  if (auto error = ResolveCopies(name, sizes, *pages, block.typed_data(), slot.typed_data(), count.typed_data(),
                                 page_table.typed_data(), &copies);
      error.failure()) {
    return error;
  }

  auto* slots = static_cast<std::byte*>(result->untyped_data());
  if (slots != cache.untyped_data()) std::memcpy(slots, cache.untyped_data(), cache.size_bytes());
  const size_t bytes = pages->page_bytes;
  for (const Copy& copy : copies) {
    std::byte* const in_slot = slots + copy.slot * bytes;
    std::byte* const in_page = pages->page(copy.page);
    if (direction == Direction::kSwapIn) {
      std::memcpy(in_slot, in_page, bytes);
    } else {
      std::memcpy(in_page, in_slot, bytes);
    }
  }
  PoolCounters& counters = *pages->counters;
  if (direction == Direction::kSwapIn) {
    counters.pages_read += copies.size();
    ++counters.read_calls;
  } else {
    counters.pages_written += copies.size();
    ++counters.write_calls;
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kSwapIn, Transfer<Direction::kSwapIn>, BindTransfer(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kWritePages, Transfer<Direction::kWritePages>, BindTransfer(ffi::Ffi::Bind()));

}  // namespace

XLA_FFI_Handler* const kSwapInCpu = kSwapIn;
XLA_FFI_Handler* const kWritePagesCpu = kWritePages;

}  // namespace nosa
