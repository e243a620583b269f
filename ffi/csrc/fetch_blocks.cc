// fetch_blocks on the CPU: assign_slots and swap_in of one layer in one call, and the new token.
#include <algorithm>

#include "cpu_handlers.h"
#include "cpu_tables.h"

namespace nosa {
namespace {

// Writes the token's key and value into the slot of each row's block fresh_from.
void WriteToken(const TransferSizes& sizes, const TokenSizes& token_sizes, const Token& token, const int32_t* tail_slot,
                std::byte* cache) {
  if (token_sizes.row_bytes == 0) return;
  const auto* const k = static_cast<const std::byte*>(token.k->untyped_data());
  const auto* const v = static_cast<const std::byte*>(token.v->untyped_data());
  const int64_t row_bytes = token_sizes.row_bytes;
  for (int64_t h = 0; h < sizes.rows * sizes.heads; ++h) {
    const int64_t position = token.position->typed_data()[h / sizes.heads];
    if (tail_slot[h] < 0 || position < 0) continue;
    std::byte* const at = cache + (h * sizes.slots + tail_slot[h]) * sizes.page_bytes +
                          position % token_sizes.block_size * row_bytes;
    std::memcpy(at, k + h * row_bytes, row_bytes);
    std::memcpy(at + token_sizes.block_size * row_bytes, v + h * row_bytes, row_bytes);
  }
}

ffi::Error Fetch(Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 wanted, Int32Buffer3 slot_block,
                 Int32Buffer3 last_used, ffi::Buffer<ffi::S32, 0> step, Int32Buffer1 fresh_from,
                 Int32Buffer2 page_table, std::optional<ffi::AnyBuffer> k, std::optional<ffi::AnyBuffer> v,
                 std::optional<Int32Buffer1> position, ffi::Result<ffi::AnyBuffer> new_cache, Int32Result3 slot_ids,
                 Int32Result3 new_slot_block, Int32Result3 new_last_used, Int32Result2 hits, Int32Result2 misses,
                 Int32Result2 tail_slot, Int32Result3 load_block, Int32Result3 load_slot, int64_t layer,
                 int64_t n_layers, int64_t /*n_ctas*/) {
  constexpr Caller caller = Caller::kFetchBlocks;
  const Token token{k, v, position};
  AssignSizes assign{};
  TransferSizes transfer{};
  TokenSizes token_sizes{};
  if (auto error = ReadFetchSizes(NameOf(caller), handle, cache, wanted, slot_block, last_used, fresh_from, page_table,
                                  token, layer, n_layers, &assign, &transfer, &token_sizes);
      error.failure()) {
    return error;
  }
  CopyUnlessAliased(slot_block, *new_slot_block);
  CopyUnlessAliased(last_used, *new_last_used);
  CopyUnlessAliased(cache, *new_cache);
  Assign(assign, {wanted.typed_data(), step.typed_data(), fresh_from.typed_data(), slot_ids->typed_data(),
                  new_slot_block->typed_data(), new_last_used->typed_data(), load_block->typed_data(),
                  load_slot->typed_data(), misses->typed_data(), hits->typed_data(), misses->typed_data(),
                  tail_slot->typed_data()});
  auto* const slots = static_cast<std::byte*>(new_cache->untyped_data());
  auto error = MovePages(caller, {handle.typed_data()[0], handle.typed_data()[1]},
                         {{transfer, load_block->typed_data(), load_slot->typed_data(), misses->typed_data(),
                           page_table.typed_data(), slots}});
  if (error.success()) WriteToken(transfer, token_sizes, token, tail_slot->typed_data(), slots);
  return error;
}

XLA_FFI_DEFINE_HANDLER(kFetch, Fetch, BindFetch(ffi::Ffi::Bind()));

}  // namespace

XLA_FFI_Handler* const kFetchBlocksCpu = kFetch;

}  // namespace nosa
