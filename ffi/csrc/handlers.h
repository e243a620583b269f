// What the CPU and the CUDA handlers share: their names' meaning, argument bundles and shape checks.
//
// Letters: B rows, K KV heads, C wanted blocks, S slots, M blocks of a row, n entries of a transfer list.
// A block b of row r lies on host page (page_table[r, b] * n_layers + layer) * K + k, for each layer and KV head k.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace nosa {

namespace ffi = xla::ffi;
using Int32Buffer1 = ffi::Buffer<ffi::S32, 1>;
using Int32Buffer2 = ffi::Buffer<ffi::S32, 2>;
using Int32Buffer3 = ffi::Buffer<ffi::S32, 3>;
using PredBuffer1 = ffi::Buffer<ffi::PRED, 1>;
using Int32Result2 = ffi::Result<Int32Buffer2>;
using Int32Result3 = ffi::Result<Int32Buffer3>;

// One call of swap_in or write_pages, as sizes; a page is the bytes of one slot.
struct TransferSizes {
  int64_t rows, heads, slots, blocks, entries;
  int64_t page_bytes;
  int64_t layer, n_layers;
};

// Bytes of one slot of a cache [B, K, S, ...].
inline int64_t SlotBytes(const ffi::AnyBuffer& cache) {
  int64_t bytes = static_cast<int64_t>(ffi::ByteWidth(cache.element_type()));
  const auto dims = cache.dimensions();
  for (size_t i = 3; i < dims.size(); ++i) bytes *= dims[i];
  return bytes;
}

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
  *sizes = {dims[0], dims[1], dims[2], page_table.dimensions()[1], list[2], SlotBytes(cache), layer, n_layers};
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

// The token that fetch_blocks writes into the slot of block fresh_from: its key and value [B, K, H] and its position in
// the row [B]. All three are there or none.
struct Token {
  std::optional<ffi::AnyBuffer> k, v;
  std::optional<Int32Buffer1> position;
};

// Where a token goes in a slot [2, P, H].
struct TokenSizes {
  int64_t block_size = 0;
  int64_t row_bytes = 0;  // of the key or the value of one token; 0: there is no token
};

inline ffi::Error ReadTokenSizes(const char* name, const ffi::AnyBuffer& cache, const Token& token, TokenSizes* sizes) {
  const auto fail = [name](const std::string& what) {
    return ffi::Error::InvalidArgument(std::string(name) + ": " + what);
  };
  if (!token.k) return ffi::Error::Success();
  if (!token.v || !token.position) return fail("a token has a key, a value and a position");
  const auto dims = cache.dimensions(), k = token.k->dimensions(), v = token.v->dimensions();
  if (dims.size() != 6 || dims[3] != 2) return fail("a token goes into a cache [B, K, S, 2, P, H]");
  if (k.size() != 3 || !std::equal(k.begin(), k.end(), v.begin(), v.end()) || k[0] != dims[0] || k[1] != dims[1] ||
      k[2] != dims[5] || token.position->dimensions()[0] != dims[0]) {
    return fail("the token's key and value must be [B, K, H] and its position [B]");
  }
  if (token.k->element_type() != cache.element_type() || token.v->element_type() != cache.element_type()) {
    return fail("the token's key and value must have the cache's type");
  }
  *sizes = {dims[4], dims[5] * static_cast<int64_t>(ffi::ByteWidth(cache.element_type()))};
  return ffi::Error::Success();
}

// Checks the shapes of fetch_blocks' arguments: those of assign_slots, those of a transfer with C entries, and the
// token's.
inline ffi::Error ReadFetchSizes(const char* name, const Int32Buffer1& handle, const ffi::AnyBuffer& cache,
                                 const Int32Buffer3& wanted, const Int32Buffer3& slot_block,
                                 const Int32Buffer3& last_used, const Int32Buffer1& fresh_from,
                                 const Int32Buffer2& page_table, const Token& token, int64_t layer, int64_t n_layers,
                                 AssignSizes* assign, TransferSizes* transfer, TokenSizes* token_sizes) {
  const auto fail = [name](const std::string& what) {
    return ffi::Error::InvalidArgument(std::string(name) + ": " + what);
  };
  const auto dims = cache.dimensions();
  const auto table = slot_block.dimensions();
  if (handle.dimensions()[0] != 2) return fail("handle must be int32[2]");
  if (dims.size() < 3) return fail("the cache must have dimensions [B, K, S, ...]");
  for (int i = 0; i < 3; ++i) {
    if (dims[i] != table[i]) return fail("slot_block must have the cache's dimensions [B, K, S]");
  }
  if (page_table.dimensions()[0] != dims[0]) return fail("page_table must be int32[B, M]");
  if (layer < 0 || layer >= n_layers) {
    return fail("layer " + std::to_string(layer) + " is outside the " + std::to_string(n_layers) + " layers");
  }
  const int64_t n_blocks = page_table.dimensions()[1];
  auto error = ReadAssignSizes(wanted, slot_block, last_used, fresh_from, n_blocks, assign);
  if (error.success()) error = ReadTokenSizes(name, cache, token, token_sizes);
  if (error.failure()) return error;
  *transfer = {dims[0], dims[1], dims[2], n_blocks, assign->wanted, SlotBytes(cache), layer, n_layers};
  return ffi::Error::Success();
}

// One call of store_blocks: n_layers caches of one shape, at most one block of each row, the same in every layer.
// Its variadic arguments are the caches and then, for each, the slots [B, K] that hold the block.
inline ffi::Error ReadStoreSizes(const Int32Buffer1& handle, const Int32Buffer1& block, const PredBuffer1& full,
                                 const Int32Buffer2& page_table, const ffi::RemainingArgs& arrays, size_t n_results,
                                 TransferSizes* sizes) {
  const auto fail = [](const std::string& what) { return ffi::Error::InvalidArgument("store_blocks: " + what); };
  if (handle.dimensions()[0] != 2) return fail("handle must be int32[2]");
  if (n_results == 0 || arrays.size() != 2 * n_results) return fail("every layer needs a cache and its slots");
  const auto cache = arrays.get<ffi::AnyBuffer>(0);
  if (cache.has_error() || cache->dimensions().size() < 3) return fail("a cache must have dimensions [B, K, S, ...]");
  const auto dims = cache->dimensions();
  for (size_t layer = 0; layer < n_results; ++layer) {
    const auto other = arrays.get<ffi::AnyBuffer>(layer);
    const auto slots = arrays.get<Int32Buffer2>(n_results + layer);
    if (other.has_error() || other->element_type() != cache->element_type() ||
        !std::equal(dims.begin(), dims.end(), other->dimensions().begin(), other->dimensions().end())) {
      return fail("the caches must have one shape and type");
    }
    if (slots.has_error() || slots->dimensions()[0] != dims[0] || slots->dimensions()[1] != dims[1]) {
      return fail("the slots of every layer must be int32[B, K]");
    }
  }
  if (block.dimensions()[0] != dims[0] || full.dimensions()[0] != dims[0]) return fail("block and full must be [B]");
  if (page_table.dimensions()[0] != dims[0]) return fail("page_table must be int32[B, M]");
  *sizes = {dims[0], dims[1], dims[2], page_table.dimensions()[1], 1, SlotBytes(*cache), 0,
            static_cast<int64_t>(n_results)};
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

template <typename Binding>
auto BindFetch(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<Int32Buffer1>()                // handle
      .template Arg<ffi::AnyBuffer>()              // cache [B, K, S, ...], aliased
      .template Arg<Int32Buffer3>()                // wanted
      .template Arg<Int32Buffer3>()                // slot_block, aliased
      .template Arg<Int32Buffer3>()                // last_used, aliased
      .template Arg<ffi::Buffer<ffi::S32, 0>>()    // step
      .template Arg<Int32Buffer1>()                // fresh_from
      .template Arg<Int32Buffer2>()                // page_table
      .template OptionalArg<ffi::AnyBuffer>()      // k [B, K, H] of a new token
      .template OptionalArg<ffi::AnyBuffer>()      // v
      .template OptionalArg<Int32Buffer1>()        // its position in the row [B]
      .template Ret<ffi::AnyBuffer>()              // cache
      .template Ret<Int32Buffer3>()                // slot_ids
      .template Ret<Int32Buffer3>()                // slot_block
      .template Ret<Int32Buffer3>()                // last_used
      .template Ret<Int32Buffer2>()                // hits
      .template Ret<Int32Buffer2>()                // misses
      .template Ret<Int32Buffer2>()                // tail_slot
      .template Ret<Int32Buffer3>()                // load.block } what is loaded, `misses` of them; fetch_blocks leaves
      .template Ret<Int32Buffer3>()                // load.slot  } them undefined where one launch does all
      .template Attr<int64_t>("layer")
      .template Attr<int64_t>("n_layers")
      .template Attr<int64_t>("n_ctas");
}

// As fetch_blocks, with lists of pages instead of copies.
template <typename Binding>
auto BindList(Binding&& binding) {
  return BindFetch(std::forward<Binding>(binding))
      .template Ret<Int32Buffer3>()   // late [B, K, C]
      .template Ret<Int32Buffer3>()   // arrived [B, K, S]
      .template Ret<Int32Buffer3>()   // pages [clusters, capacity, 4]
      .template Ret<Int32Buffer1>()   // n_pages [clusters]
      .template Attr<int64_t>("pieces");
}

template <typename Binding>
auto BindStore(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<Int32Buffer1>()      // handle
      .template Arg<Int32Buffer1>()      // block [B]
      .template Arg<PredBuffer1>()       // full [B]
      .template Arg<Int32Buffer2>()      // page_table
      .template Arg<ffi::AnyBuffer>()    // after: not read; the call comes after whatever computes it
      .RemainingArgs()                   // caches, aliased; then the slots of each
      .RemainingRets()                   // caches
      .template Attr<int64_t>("n_ctas");
}

}  // namespace nosa
