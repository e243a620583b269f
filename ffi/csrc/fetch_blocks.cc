// fetch_blocks on the CPU: assign_slots and swap_in of one layer in one call.
#include "cpu_handlers.h"
#include "cpu_tables.h"

namespace nosa {
namespace {

ffi::Error FetchBlocks(Int32Buffer1 handle, ffi::AnyBuffer cache, Int32Buffer3 wanted, Int32Buffer3 slot_block,
                       Int32Buffer3 last_used, ffi::Buffer<ffi::S32, 0> step, Int32Buffer1 fresh_from,
                       Int32Buffer2 page_table, ffi::Result<ffi::AnyBuffer> new_cache, Int32Result3 slot_ids,
                       Int32Result3 new_slot_block, Int32Result3 new_last_used, Int32Result2 hits,
                       Int32Result2 misses, Int32Result2 tail_slot, Int32Result3 load_block, Int32Result3 load_slot,
                       int64_t layer, int64_t n_layers, int64_t /*n_ctas*/) {
  AssignSizes assign{};
  TransferSizes transfer{};
  if (auto error = ReadFetchSizes(handle, cache, wanted, slot_block, last_used, fresh_from, page_table, layer,
                                  n_layers, &assign, &transfer);
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
  return MovePages(Caller::kFetchBlocks, {handle.typed_data()[0], handle.typed_data()[1]},
                   {{transfer, load_block->typed_data(), load_slot->typed_data(), misses->typed_data(),
                     page_table.typed_data(), static_cast<std::byte*>(new_cache->untyped_data())}});
}

XLA_FFI_DEFINE_HANDLER(kHandler, FetchBlocks, BindFetch(ffi::Ffi::Bind()));

}  // namespace

XLA_FFI_Handler* const kFetchBlocksCpu = kHandler;

}  // namespace nosa
