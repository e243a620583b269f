// append_token: what one new token per row adds to the pooled statistics of a layer's cache, in one launch.
//
// One CTA per (row, KV head), one thread per element of the key. The sums are added in the order in which pooling a
// whole sequence adds them, without fused multiply-adds, so a window that completes here has the same bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_handlers.h"
#include "handlers.h"

namespace nosa {
namespace {

using FloatBuffer2 = ffi::Buffer<ffi::F32, 2>;
using FloatBuffer3 = ffi::Buffer<ffi::F32, 3>;
using FloatBuffer4 = ffi::Buffer<ffi::F32, 4>;

constexpr int kMaxHeadDim = 1024;  // threads of a CTA

template <typename Key>
struct AppendArgs {
  const Key* k;            // [B, K, H]
  const float* cis;        // [B, K]
  const float* ranking;    // [B, K]
  const int32_t* lengths;  // [B]
  const bool* active;      // [B]
  float* key_sums;         // [B, K, R, H]
  float* rank_sums;        // [B, K, R]
  Key* pooled_k;           // [B, K, W, H]
  float* block_rank;       // [B, K, M]
  float* cis_cache;        // [B, K, M, P]
  int32_t heads, strides, windows, blocks, block_size, stride;
};

__device__ float ToFloat(float x) { return x; }
__device__ float ToFloat(__half x) { return __half2float(x); }
__device__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void Store(float* to, float x) { *to = x; }
__device__ void Store(__half* to, float x) { *to = __float2half_rn(x); }
__device__ void Store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

// As jnp.maximum: NaN wins.
__device__ float Maximum(float a, float b) { return isnan(a) || a > b ? a : b; }

// Adds x to the sum of its stride; the mean of the window if this completes one (else undefined). `sums` is the element's
// place in the first stride of the ring, `step` the distance to its place in the next.
__device__ float Grow(float* sums, int64_t step, float x, int32_t stride_index, bool first, int32_t strides,
                      float window) {
  const int32_t newest = stride_index % strides;
  const float sum = first ? x : __fadd_rn(sums[newest * step], x);
  sums[newest * step] = sum;
  float total = 0;
  for (int32_t i = 0; i < strides; ++i) {  // the oldest stride first
    const int32_t place = (newest + 1 + i) % strides;
    const float part = place == newest ? sum : sums[place * step];
    total = i == 0 ? part : __fadd_rn(total, part);
  }
  return __fdiv_rn(total, window);
}

template <typename Key>
__global__ void AppendKernel(const __grid_constant__ AppendArgs<Key> args) {
  const int64_t pair = blockIdx.x;
  const auto row = static_cast<uint32_t>(pair) / static_cast<uint32_t>(args.heads);
  const int32_t head_dim = static_cast<int32_t>(blockDim.x), h = static_cast<int32_t>(threadIdx.x);
  const int32_t length = args.lengths[row];
  const float key = ToFloat(args.k[pair * head_dim + h]);
  if (!args.active[row]) return;
  const int32_t stride_index = length / args.stride, offset = length % args.stride;
  const int32_t window = stride_index - (args.strides - 1);
  const bool complete = offset == args.stride - 1 && window >= 0 && window < args.windows;
  const auto window_tokens = static_cast<float>(args.strides * args.stride);

  const float mean = Grow(args.key_sums + pair * args.strides * head_dim + h, head_dim, key, stride_index, offset == 0,
                          args.strides, window_tokens);
  if (complete) Store(args.pooled_k + (pair * args.windows + window) * head_dim + h, mean);
  if (h != 0) return;
  const float rank = Grow(args.rank_sums + pair * args.strides, 1, args.ranking[pair], stride_index, offset == 0,
                          args.strides, window_tokens);
  const int32_t block = length / args.block_size;
  if (block < args.blocks) {
    args.cis_cache[(pair * args.blocks + block) * args.block_size + length % args.block_size] = args.cis[pair];
  }
  if (!complete) return;
  const int32_t per_block = args.block_size / args.stride;
  // The last window of a block reaches into the next one.
  for (int32_t touched = window / per_block; touched <= (window + 1) / per_block; ++touched) {
    if (touched >= args.blocks) break;
    float& best = args.block_rank[pair * args.blocks + touched];
    best = Maximum(rank, best);
  }
}

template <typename From, typename To>
void CopyUnlessAliased(const From& from, To& to, cudaStream_t stream) {
  if (from.untyped_data() == to.untyped_data()) return;
  cudaMemcpyAsync(to.untyped_data(), from.untyped_data(), from.size_bytes(), cudaMemcpyDeviceToDevice, stream);
}

ffi::Error AppendToken(cudaStream_t stream, ffi::AnyBuffer k, FloatBuffer2 cis, FloatBuffer2 ranking,
                       Int32Buffer1 lengths, PredBuffer1 active, FloatBuffer4 key_sums, FloatBuffer3 rank_sums,
                       ffi::AnyBuffer pooled_k, FloatBuffer3 block_rank, FloatBuffer4 cis_cache,
                       ffi::Result<FloatBuffer4> new_key_sums, ffi::Result<FloatBuffer3> new_rank_sums,
                       ffi::Result<ffi::AnyBuffer> new_pooled_k, ffi::Result<FloatBuffer3> new_block_rank,
                       ffi::Result<FloatBuffer4> new_cis_cache, int64_t stride) {
  const auto fail = [](const std::string& what) { return ffi::Error::InvalidArgument("append_token: " + what); };
  const auto key = k.dimensions(), sums = key_sums.dimensions(), pooled = pooled_k.dimensions(),
             by_token = cis_cache.dimensions();
  if (key.size() != 3 || pooled.size() != 4) return fail("keys must be [B, K, H] and pooled keys [B, K, W, H]");
  const int64_t rows = key[0], heads = key[1], head_dim = key[2];
  if (sums[0] != rows || sums[1] != heads || sums[3] != head_dim || pooled[0] != rows || pooled[1] != heads ||
      pooled[3] != head_dim || by_token[0] != rows || by_token[1] != heads ||
      block_rank.dimensions()[2] != by_token[2] || rank_sums.dimensions()[2] != sums[2] ||
      lengths.dimensions()[0] != rows || active.dimensions()[0] != rows) {
    return fail("the arrays' shapes do not fit together");
  }
  if (pooled_k.element_type() != k.element_type()) return fail("keys and pooled keys must have one type");
  if (head_dim > kMaxHeadDim || stride < 1) return fail("head dimension or stride out of range");
  CopyUnlessAliased(key_sums, *new_key_sums, stream);
  CopyUnlessAliased(rank_sums, *new_rank_sums, stream);
  CopyUnlessAliased(pooled_k, *new_pooled_k, stream);
  CopyUnlessAliased(block_rank, *new_block_rank, stream);
  CopyUnlessAliased(cis_cache, *new_cis_cache, stream);
  if (rows * heads == 0) return ffi::Error::Success();
  const auto launch = [&](auto type) {
    using Key = decltype(type);
    const AppendArgs<Key> args{static_cast<const Key*>(k.untyped_data()),
                               cis.typed_data(),
                               ranking.typed_data(),
                               lengths.typed_data(),
                               active.typed_data(),
                               new_key_sums->typed_data(),
                               new_rank_sums->typed_data(),
                               static_cast<Key*>(new_pooled_k->untyped_data()),
                               new_block_rank->typed_data(),
                               new_cis_cache->typed_data(),
                               static_cast<int32_t>(heads),
                               static_cast<int32_t>(sums[2]),
                               static_cast<int32_t>(pooled[2]),
                               static_cast<int32_t>(by_token[2]),
                               static_cast<int32_t>(by_token[3]),
                               static_cast<int32_t>(stride)};
    AppendKernel<Key><<<static_cast<unsigned>(rows * heads), static_cast<unsigned>(head_dim), 0, stream>>>(args);
  };
  switch (k.element_type()) {
    case ffi::F32:
      launch(float{});
      break;
    case ffi::F16:
      launch(__half{});
      break;
    case ffi::BF16:
      launch(__nv_bfloat16{});
      break;
    default:
      return fail("keys must be float32, float16 or bfloat16");
  }
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    return ffi::Error::Internal(std::string("append_token: launch failed: ") + cudaGetErrorString(status));
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kHandler, AppendToken,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // k
                           .Arg<FloatBuffer2>()    // cis
                           .Arg<FloatBuffer2>()    // ranking
                           .Arg<Int32Buffer1>()    // lengths
                           .Arg<PredBuffer1>()     // active
                           .Arg<FloatBuffer4>()    // key_sums, aliased as all that follow
                           .Arg<FloatBuffer3>()    // rank_sums
                           .Arg<ffi::AnyBuffer>()  // pooled_k
                           .Arg<FloatBuffer3>()    // block_rank
                           .Arg<FloatBuffer4>()    // cis by block
                           .Ret<FloatBuffer4>()
                           .Ret<FloatBuffer3>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<FloatBuffer3>()
                           .Ret<FloatBuffer4>()
                           .Attr<int64_t>("stride"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void LoadAppendKernels() {
  cudaFuncAttributes unused;
  cudaFuncGetAttributes(&unused, AppendKernel<float>);
  cudaFuncGetAttributes(&unused, AppendKernel<__half>);
  cudaFuncGetAttributes(&unused, AppendKernel<__nv_bfloat16>);
}

XLA_FFI_Handler* const kAppendTokenCuda = kHandler;

}  // namespace nosa
