// What the CPU and the CUDA handlers share: their names' meaning, argument bundles and shape checks.
//
// Letters: B rows, K KV heads, C wanted blocks, S slots, M blocks of a row, n entries of a transfer list.
// A block b of row r lies on host page (page_table[r, b] * n_layers + layer) * K + k, for each layer and KV head k.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace nosa {

namespace ffi = xla::ffi;
using Int32Buffer1 = ffi::Buffer<ffi::S32, 1>;
using Int32Buffer2 = ffi::Buffer<ffi::S32, 2>;
using Int32Buffer3 = ffi::Buffer<ffi::S32, 3>;
using Int32Result2 = ffi::Result<Int32Buffer2>;
using Int32Result3 = ffi::Result<Int32Buffer3>;

// One call of swap_in or write_pages, as sizes; a page is the bytes of one slot.
struct TransferSizes {
  int64_t rows, heads, slots, blocks, entries;
  int64_t page_bytes;
  int64_t layer, n_layers;
};

// Checks the shapes of swap_in's and write_pages' arguments against one another.
inline ffi::Error ReadTransferSizes(const char* name, const Int32Buffer1& handle, const ffi::AnyBuffer& cache,
                                    const Int32Buffer3& block, const Int32Buffer3& slot, const Int32Buffer2& count,
                                    const Int32Buffer2& page_table, int64_t layer, int64_t n_layers,
                                    TransferSizes* sizes) {
  const auto dims = cache.dimensions();
  const auto list = block.dimensions();
  const auto fail = [name](const std::string& what) {
    return ffi::Error::InvalidArgument(std::string(name) + ": " + what);
  };
  if (handle.dimensions()[0] != 2) return fail("handle must be int32[2]");
  if (dims.size() < 3) return fail("the cache must have dimensions [B, K, S, ...]");
  if (list[0] != dims[0] || list[1] != dims[1]) {
    return fail("the transfer list has " + std::to_string(list[0]) + " rows and " + std::to_string(list[1]) +
                " KV heads, the cache " + std::to_string(dims[0]) + " and " + std::to_string(dims[1]));
  }
  for (int i = 0; i < 3; ++i) {
    if (slot.dimensions()[i] != list[i]) return fail("the list's blocks and slots differ in shape");
  }
  if (count.dimensions()[0] != dims[0] || count.dimensions()[1] != dims[1]) return fail("count must be int32[B, K]");
  if (page_table.dimensions()[0] != dims[0]) return fail("page_table must be int32[B, M]");
  if (layer < 0 || layer >= n_layers) {
    return fail("layer " + std::to_string(layer) + " is outside the " + std::to_string(n_layers) + " layers");
  }
  int64_t page_bytes = static_cast<int64_t>(ffi::ByteWidth(cache.element_type()));
  for (size_t i = 3; i < dims.size(); ++i) page_bytes *= dims[i];
  *sizes = {dims[0], dims[1], dims[2], page_table.dimensions()[1], list[2], page_bytes, layer, n_layers};
  return ffi::Error::Success();
}

// One call of assign_slots.
struct AssignSizes {
  int64_t rows, heads, wanted, slots, n_blocks;
};

inline ffi::Error ReadAssignSizes(const Int32Buffer3& wanted, const Int32Buffer3& slot_block,
                                  const Int32Buffer3& last_used, const Int32Buffer1& fresh_from, int64_t n_blocks,
                                  AssignSizes* sizes) {
  const auto want = wanted.dimensions();
  const auto table = slot_block.dimensions();
  const auto fail = [](const std::string& what) { return ffi::Error::InvalidArgument("assign_slots: " + what); };
  for (int i = 0; i < 3; ++i) {
    if (last_used.dimensions()[i] != table[i]) return fail("slot_block and last_used differ in shape");
  }
  if (table[0] != want[0] || table[1] != want[1] || fresh_from.dimensions()[0] != want[0]) {
    return fail("wanted, slot_block and fresh_from must agree on rows and KV heads");
  }
  if (table[2] < want[2]) {
    return fail(std::to_string(table[2]) + " slots cannot hold " + std::to_string(want[2]) + " wanted blocks");
  }
  if (n_blocks < 0) return fail("n_blocks=" + std::to_string(n_blocks) + " must not be negative");
  *sizes = {want[0], want[1], want[2], table[2], n_blocks};
  return ffi::Error::Success();
}

// Bindings, the same on every platform but for the leading context (a stream on CUDA, nothing on the CPU).
template <typename Binding>
auto BindTransfer(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<Int32Buffer1>()      // handle
      .template Arg<ffi::AnyBuffer>()    // cache [B, K, S, ...], aliased with the result
      .template Arg<Int32Buffer3>()      // block
      .template Arg<Int32Buffer3>()      // slot
      .template Arg<Int32Buffer2>()      // count
      .template Arg<Int32Buffer2>()      // page_table
      .template Ret<ffi::AnyBuffer>()
      .template Attr<int64_t>("layer")
      .template Attr<int64_t>("n_layers")
      .template Attr<int64_t>("n_ctas");
}

template <typename Binding>
auto BindAssign(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<Int32Buffer3>()                // wanted
      .template Arg<Int32Buffer3>()                // slot_block, aliased
      .template Arg<Int32Buffer3>()                // last_used, aliased
      .template Arg<ffi::Buffer<ffi::S32, 0>>()    // step
      .template Arg<Int32Buffer1>()                // fresh_from
      .template Ret<Int32Buffer3>()                // slot_ids
      .template Ret<Int32Buffer3>()                // slot_block
      .template Ret<Int32Buffer3>()                // last_used
      .template Ret<Int32Buffer3>()                // load.block
      .template Ret<Int32Buffer3>()                // load.slot
      .template Ret<Int32Buffer2>()                // load.count
      .template Ret<Int32Buffer2>()                // hits
      .template Ret<Int32Buffer2>()                // misses
      .template Attr<int64_t>("n_blocks");
}

}  // namespace nosa
