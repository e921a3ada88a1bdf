// The entries that the tests of the binding call, and stand-ins for the emulator and the HIP runtime.
#include <signal.h>
#include <time.h>
#include <stdexcept>
#include "hipforge/host/export.h"

// facts: [dtype, ndim, address, contiguous, numel, element bytes, device type, device index, sizes..., strides...]
static void describe(hf::Tensor out, hf::Tensor x) {
  int64_t* facts = static_cast<int64_t*>(out.data());
  *facts++ = x.dtype();
  *facts++ = x.dim();
  *facts++ = reinterpret_cast<int64_t>(x.data());
  *facts++ = x.is_contiguous();
  *facts++ = x.numel();
  *facts++ = x.element_bytes();
  *facts++ = x.view().device_type;
  *facts++ = x.device_index();
  for (int64_t i = 0; i < x.dim(); ++i) *facts++ = x.size(i);
  for (int64_t i = 0; i < x.dim(); ++i) *facts++ = x.stride(i);
}
HF_EXPORT(describe);

static void scalars(hf::Tensor out, hf::OptionalTensor maybe, int64_t i, double d, bool b, const char* s) {
  double* values = out.data<double>();
  values[0] = maybe ? 1 : 0;
  values[1] = static_cast<double>(i);
  values[2] = d;
  values[3] = b;
  int64_t length = 0;
  while (s[length]) ++length;
  values[4] = static_cast<double>(length);
  static_cast<int64_t*>(out.data())[5] = i;
}
HF_EXPORT(scalars);

// Reads `x` as the type that `type` names.
static void read_as(hf::Tensor x, hf::OptionalTensor y, const char* type) {
#define HF_TRY(T) \
  if (!__builtin_strcmp(type, #T)) (void)x.data<T>(), (void)x.data<const T>(), (void)y.data<T>();
  HF_TRY(char) HF_TRY(bool) HF_TRY(uint8_t) HF_TRY(uint16_t) HF_TRY(uint32_t) HF_TRY(uint64_t)
  HF_TRY(int8_t) HF_TRY(int16_t) HF_TRY(int32_t) HF_TRY(int64_t) HF_TRY(float) HF_TRY(double)
#undef HF_TRY
}
HF_EXPORT(read_as);

static void fail_with(hf::Tensor out, int64_t kind, const char* text) {
  if (kind == 10) throw std::runtime_error(text);
  if (kind == 11) throw 5;
  HF_FAIL(static_cast<hf_error_kind>(kind), text, " with ", out, " ", -7, " ", 7u, " ", 0.5, " ", true);
}
HF_EXPORT(fail_with);

static void guard(hf::Tensor out, int64_t axis) {
  HF_CHECK(out.dim() == 2, "out must be [M, K]; got ", out);
  HF_CHECK(out.is_shape(2, 3), "out must be 2 by 3");
  (void)out.size(axis);
}
HF_EXPORT(guard);

// Waits until another thread writes out[0]: impossible while the caller holds the GIL.
static void wait_for_write(hf::Tensor out) {
  volatile int64_t* flag = out.data<int64_t>();
  for (int i = 0; i < 2000; ++i) {
    if (*flag) return;
    timespec pause = {0, 1000000};
    nanosleep(&pause, nullptr);
  }
  HF_FAIL(HF_ERROR_OTHER, "nobody wrote");
}
HF_EXPORT(wait_for_write);

static void interrupted(hf::Tensor out) {
  (void)out;
  raise(SIGINT);
  HF_FAIL(HF_ERROR_LAUNCH, "aborted");
}
HF_EXPORT(interrupted);

// What the emulator's poll does when a signal handler raises in mid-launch.
extern "C" {
extern void* PyExc_OSError;
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_SetString(void*, const char*);
}
static void handler_raised(hf::Tensor out) {
  const int state = PyGILState_Ensure();
  PyErr_SetString(PyExc_OSError, "from a signal handler");
  PyGILState_Release(state);
  HF_CHECK(out.numel() == 0, "aborted");
}
HF_EXPORT(handler_raised);

static void add(hf::Tensor out, hf::Tensor x, int64_t n) {
  for (int64_t i = 0; i < out.numel(); ++i) out.data<int64_t>()[i] = x.data<int64_t>()[i] + n;
}
HF_EXPORT_AS(renamed_add, add);

static int64_t last_stream;
static void with_stream(hf::Tensor out, void* stream) {
  (void)out;
  last_stream = reinterpret_cast<int64_t>(stream);
}
HF_EXPORT(with_stream);
extern "C" HF_API int64_t seen_stream() { return last_stream; }
extern "C" HF_API void* emulator_stream() { return reinterpret_cast<void*>(0x77); }

// Stand-ins for the emulator's and HIP's functions, recording what they are told.
struct Extent { const char* name; uint64_t base, bytes; uint32_t writable, reserved; };
static Extent live[16];
static int live_count, depth, deepest, cleared;
static const char* fault;
static void count_extents(hf::Tensor out, hf::OptionalTensor x, hf::OptionalTensor y) {
  (void)x, (void)y;
  int64_t* facts = out.data<int64_t>();
  facts[0] = live_count;
  for (int i = 0; i < live_count; ++i) {
    facts[1 + 4 * i] = live[i].name[0];
    facts[2 + 4 * i] = static_cast<int64_t>(live[i].base);
    facts[3 + 4 * i] = static_cast<int64_t>(live[i].bytes);
    facts[4 + 4 * i] = live[i].writable;
  }
}
HF_EXPORT(count_extents);
extern "C" {
HF_API void push(const Extent* extents, int32_t count) {
  live_count = count;
  for (int i = 0; i < count; ++i) live[i] = extents[i];
  ++depth;
  ++deepest;
}
HF_API void pop() { --depth; }
HF_API const char* last_error() { return fault; }
HF_API void clear_error() { ++cleared; }
HF_API void set_fault(const char* text) { fault = text; }
HF_API int open_scopes() { return depth; }
HF_API int scopes_so_far() { return deepest; }
HF_API int errors_cleared() { return cleared; }

static int current = 3;
static int history[8], changes;
HF_API int get_device(int* out) { *out = current; return 0; }
HF_API int set_device(int index) { if (index == 66) return 101; current = history[changes++ % 8] = index; return 0; }
HF_API int device_change(int i) { return i < changes ? history[i] : -1; }
HF_API void forget_changes() { changes = 0; current = 3; }
// As c10::cuda::getCurrentCUDAStream: a device, type and index, and a number.
struct StreamName { int8_t type, index; int64_t id; };
static int64_t stream_id[8];
HF_API StreamName name_stream(int8_t index) { return {1, static_cast<int8_t>(index == 7 ? 0 : index), stream_id[index]}; }
HF_API void set_stream_id(int index, int64_t id) { stream_id[index] = id; }
}
