// Decode attention over an int4 K/V cache with a scale and a shift per group, gfx950 and gfx942. int4_kernel.h and
// merge_kernel.h have the kernels. A variant serves one head dimension and one dtype of q.
#include <hip/hip_runtime.h>

#include "hipforge/module.h"
#include "int4_kernel.h"
#include "merge_kernel.h"

#if !defined(HF_HEAD_DIM) || !defined(HF_INPUT)
#error "build a variant: -DHF_HEAD_DIM=64, 128 or 256 and -DHF_INPUT=f16 or bf16"
#endif

using hf::OptionalTensor;
using hf::Tensor;
using namespace hf::decode_attention;

namespace {

struct input_f16 { using type = _Float16; };
struct input_bf16 { using type = hf::dev::bf16; };

#define HF_JOIN_(a, b) a##b
#define HF_JOIN(a, b) HF_JOIN_(a, b)
using Half = HF_JOIN(input_, HF_INPUT)::type;
constexpr hf_dtype kInputDtype = __is_same(Half, _Float16) ? HF_F16 : HF_BF16;
constexpr int kD = HF_HEAD_DIM;

constexpr int64_t kMaxGrid = 65535;  // of the grid's second and third axes
constexpr int64_t kMaxKeys = (int64_t{1} << 31) - 1 - kMaxBlockN;
// A tile of 16 keys is one raw buffer, of at most 2^31 - 1 bytes.
constexpr int64_t kMaxSlotStride = ((int64_t{1} << 31) - 1) / kTileN - kD;

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

void check_on_device(const Tensor& tensor, const char* name, const Tensor& like) {
  HF_CHECK(tensor.on_gpu() == like.on_gpu() && tensor.device_index() == like.device_index(), name,
           " must be on the device of q");
}

Cache cache_of(const Tensor& data, const char* name, int64_t words, const Tensor& q) {
  HF_CHECK(data.dtype() == HF_I32 && data.dim() == 4 && data.size(3) == words, name,
           " must be int32 [pages, page_size, Hkv, ", words, "], the words of scales and those of ", kD,
           " nibbles; got ", data);
  check_on_device(data, name, q);
  HF_CHECK(data.stride(3) == 1, name, " must have its last dimension contiguous; got stride ", data.stride(3));
  for (int axis = 0; axis < 3; ++axis)
    HF_CHECK(data.stride(axis) >= 0, name, " must not have negative strides; got ", data.stride(axis), " along axis ", axis);
  HF_CHECK(data.stride(1) <= kMaxSlotStride / 4, name, " has keys ", data.stride(1), " words apart; at most ",
           kMaxSlotStride / 4, " are addressed");
  Cache cache = {};
  cache.data = static_cast<const uint8_t*>(data.data());
  cache.page_stride = 4 * data.stride(0);
  cache.slot_stride = 4 * static_cast<uint32_t>(data.stride(1));
  cache.head_stride = 4 * data.stride(2);
  return cache;
}

}  // namespace

/// out like q [B, Mq, Hq, D]; lse float32 [B, Hq, Mq]; k, v int32 [pages, page_size, Hkv, groups + D/8], or
/// [B, Mkv, Hkv, groups + D/8] without block_tables int32 [B, max_pages]; seqlens int32 [B]; workspaces float32
/// [splits, B, Hq * Mq, D] and [splits, B, Hq * Mq] where splits > 1.
void decode_attention_int4_out(Tensor out, Tensor lse, OptionalTensor partial, OptionalTensor partial_lse, Tensor q, Tensor k,
                               Tensor v, OptionalTensor block_tables, Tensor seqlens, int64_t groups, double scale,
                               bool causal, int64_t waves, int64_t splits, hipStream_t stream) {
  HF_CHECK_ARCH(q, "gfx950", "gfx942");
  HF_CHECK(q.dtype() == kInputDtype && q.dim() == 4 && q.size(3) == kD, "q must be ", kInputDtype, " [B, Mq, Hq, ", kD,
           "] for this variant; got ", q);
  HF_CHECK(q.is_contiguous() && aligned(q.data(), 16), "q must be contiguous and start at a multiple of 16 bytes");
  const int64_t batch = q.size(0), mq = q.size(1), heads = q.size(2);
  HF_CHECK(mq >= 1 && mq <= kMaxMq, "Mq must be 1 to ", kMaxMq, " query tokens per sequence; got ", mq);
  Problem p = {};
  HF_CHECK(groups == 1 || groups == 2 || groups == 4 || groups == 8, "groups must be 1, 2, 4 or 8 per row; got ", groups);
  p.k = cache_of(k, "k", groups + kD / 8, q);
  p.v = cache_of(v, "v", groups + kD / 8, q);
  HF_CHECK(v.is_shape(k.size(0), k.size(1), k.size(2), k.size(3)), "v must have the shape of k, ", k, "; got ", v);
  const int64_t kv_heads = k.size(2);
  HF_CHECK(kv_heads >= 1 && heads >= 1 && heads % kv_heads == 0, "Hq must be a positive multiple of Hkv; got Hq = ", heads,
           " and Hkv = ", kv_heads);
  const int64_t rows = heads / kv_heads * mq;
  HF_CHECK(batch * kv_heads <= kMaxGrid, "B * Hkv must be at most ", kMaxGrid, "; got ", batch * kv_heads);
  HF_CHECK(waves == 1 || waves == 2 || waves == 4, "waves must be 1, 2 or 4; got ", waves);
  HF_CHECK(splits >= 1 && splits <= kMaxSplits, "split_k must be 1 to ", kMaxSplits, "; got ", splits);
  HF_CHECK(seqlens.dtype() == HF_I32 && seqlens.is_shape(batch) && seqlens.is_contiguous(),
           "seqlens must be contiguous int32 [", batch, "]; got ", seqlens);
  check_on_device(seqlens, "seqlens", q);
  int64_t max_keys = k.size(1);
  if (block_tables) {
    const Tensor tables = *block_tables;
    HF_CHECK(tables.dtype() == HF_I32 && tables.dim() == 2 && tables.size(0) == batch && tables.is_contiguous(),
             "block_tables must be contiguous int32 [", batch, ", max_pages]; got ", tables);
    check_on_device(tables, "block_tables", q);
    HF_CHECK(k.size(1) >= kTileN && k.size(1) % kTileN == 0, "page_size must be a positive multiple of ", kTileN,
             " (keys of one matrix instruction); got ", k.size(1));
    p.block_tables = tables.data<const int32_t>();
    p.max_pages = static_cast<uint32_t>(tables.size(1));
    max_keys *= tables.size(1);
  } else {
    p.block_tables = seqlens.data<const int32_t>();
    HF_CHECK(k.size(0) == batch, "k without block_tables must have a page per sequence, with B = ", batch, "; got ", k);
  }
  HF_CHECK(max_keys <= kMaxKeys, "a sequence may have at most ", kMaxKeys, " keys; got room for ", max_keys);
  HF_CHECK(out.dtype() == q.dtype() && out.is_shape(batch, mq, heads, kD) && out.is_contiguous() && aligned(out.data(), 8),
           "out must be contiguous and like q, ", q, "; got ", out);
  check_on_device(out, "out", q);
  HF_CHECK(lse.dtype() == HF_F32 && lse.is_shape(batch, heads, mq) && lse.is_contiguous(), "lse must be float32 [", batch,
           ", ", heads, ", ", mq, "]; got ", lse);
  check_on_device(lse, "lse", q);
  if (splits > 1) {
    HF_CHECK(partial && partial_lse, "split_k > 1 needs both workspaces");
    const Tensor values = *partial, statistics = *partial_lse;
    HF_CHECK(values.dtype() == HF_F32 && values.is_shape(splits, batch, heads * mq, kD) && values.is_contiguous() &&
                 aligned(values.data(), 16),
             "partial must be float32 [", splits, ", ", batch, ", ", heads * mq, ", ", kD, "]; got ", values);
    HF_CHECK(statistics.dtype() == HF_F32 && statistics.is_shape(splits, batch, heads * mq) && statistics.is_contiguous(),
             "partial_lse must be float32 [", splits, ", ", batch, ", ", heads * mq, "]; got ", statistics);
    p.partial = values.data<float>();
    p.partial_lse = statistics.data<float>();
  }
  if (batch == 0) return;
  p.q = q.data();
  p.out = out.data();
  p.lse = lse.data<float>();
  p.seqlens = seqlens.data<const int32_t>();
  p.page_size = static_cast<uint32_t>(k.size(1));
  p.max_keys = static_cast<uint32_t>(max_keys);
  p.kv_heads = static_cast<uint32_t>(kv_heads);
  p.group = static_cast<uint32_t>(heads / kv_heads);
  p.mq = static_cast<uint32_t>(mq);
  p.splits = static_cast<uint32_t>(splits);
  p.ranges = static_cast<uint32_t>(waves);
  p.causal = causal;
  p.factor = static_cast<float>(scale) * kLog2E;

  const auto pairs = static_cast<uint32_t>(batch * kv_heads);
  const dim3 grid(static_cast<uint32_t>((rows + kBlockM - 1) / kBlockM), pairs, p.splits);
  const auto threads = static_cast<uint32_t>(waves * hf::dev::kWaveSize);
  const uint32_t lds = int4_lds_bytes(kD, static_cast<int>(waves));
  decode_split_int4<Half, kD><<<grid, threads, lds, stream>>>(p, static_cast<uint32_t>(groups));
  HF_HIP(hipGetLastError());
  if (splits == 1) return;
  decode_merge<Half, kD><<<dim3(static_cast<uint32_t>(rows), pairs), kMergeThreads, 0, stream>>>(p);
  HF_HIP(hipGetLastError());
}
HF_EXPORT(decode_attention_int4_out);
