// nosa_jax.ffi._cpu: the host pool and the handlers of platform cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "cpu_handlers.h"
#include "handlers.h"
#include "host_pool.h"

namespace nb = nanobind;

namespace nosa {
namespace {

// Where the CUDA library was not built, these stand in for its handlers: the same calls compile, and say so when they
// run.
constexpr const char* kCudaNames[] = {"nosa_append_token", "nosa_assign_slots", "nosa_fetch_blocks", "nosa_list_blocks",
                                      "nosa_store_blocks", "nosa_swap_in",      "nosa_write_pages"};

template <size_t kIndex>
ffi::Error NotBuilt(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    std::string(kCudaNames[kIndex]) +
                        ": nosa_jax.ffi was built without its CUDA library (" NOSA_CUDA_STATE
                        "): install nvcc >= 12.8, put it on PATH and install nosa-jax again (`make setup`), or keep "
                        "the arrays on the CPU");
}

template <size_t kIndex>
XLA_FFI_Error* CallNotBuilt(XLA_FFI_CallFrame* frame) {
  static auto* const handler =
      ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs().To(NotBuilt<kIndex>).release();
  return handler->Call(frame);
}

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict Handlers() {
  nb::dict handlers;
  handlers["nosa_assign_slots"] = Capsule(kAssignSlotsCpu);
  handlers["nosa_swap_in"] = Capsule(kSwapInCpu);
  handlers["nosa_write_pages"] = Capsule(kWritePagesCpu);
  handlers["nosa_fetch_blocks"] = Capsule(kFetchBlocksCpu);
  handlers["nosa_store_blocks"] = Capsule(kStoreBlocksCpu);
  return handlers;
}

template <size_t... kIndices>
nb::dict NotBuiltHandlers(std::index_sequence<kIndices...>) {
  nb::dict handlers;
  ((handlers[kCudaNames[kIndices]] = Capsule(&CallNotBuilt<kIndices>)), ...);
  return handlers;
}

nb::dict Stats(const HostPool& pool) {
  nb::dict stats;
  stats["pages_read"] = pool.counters().pages_read.load();
  stats["pages_written"] = pool.counters().pages_written.load();
  stats["read_calls"] = pool.counters().read_calls.load();
  stats["write_calls"] = pool.counters().write_calls.load();
  return stats;
}

nb::bytes ReadPage(const HostPool& pool, int64_t index) {
  std::string page(pool.page_bytes, '\0');
  pool.ReadPage(index, reinterpret_cast<std::byte*>(page.data()));
  return nb::bytes(page.data(), page.size());
}

void WritePage(HostPool& pool, int64_t index, const nb::bytes& data) {
  if (data.size() != pool.page_bytes) {
    throw std::invalid_argument("a page has " + std::to_string(pool.page_bytes) + " bytes, got " +
                                std::to_string(data.size()));
  }
  pool.WritePage(index, reinterpret_cast<const std::byte*>(data.data()));
}

NB_MODULE(_cpu, m) {
  nb::exception<HostMemoryError>(m, "HostMemoryError", PyExc_MemoryError);
  nb::exception<PoolClosedError>(m, "PoolClosedError", PyExc_RuntimeError);
  nb::class_<HostPool>(m, "HostPool")
      .def(nb::init<uint64_t, uint64_t, uint64_t>(), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &HostPool::Close, nb::call_guard<nb::gil_scoped_release>())
      .def("renew", &HostPool::Renew, nb::call_guard<nb::gil_scoped_release>())
      .def("stats", &Stats)
      .def("read_page", &ReadPage)
      .def("write_page", &WritePage)
      .def_prop_ro("closed", &HostPool::closed)
      .def_prop_ro("address", [](const HostPool& pool) { return reinterpret_cast<uintptr_t>(pool.base()); })
      .def_prop_ro("handle", [](const HostPool& pool) {
        return nb::make_tuple(pool.handle().slot, pool.handle().generation);
      });
  m.def("available_bytes", &AvailableBytes, nb::arg("proc_root") = "/proc",
        nb::arg("cgroup_root") = "/sys/fs/cgroup");
  m.def("handlers", &Handlers);
  m.def("not_built_handlers", [] { return NotBuiltHandlers(std::make_index_sequence<std::size(kCudaNames)>()); });
  m.attr("CUDA_STATE") = NOSA_CUDA_STATE;
}

}  // namespace
}  // namespace nosa
