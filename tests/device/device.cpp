// A pretended accelerator: host memory and the CPU's arithmetic, with the rules of a GPU.
//
// It is torch's PrivateUse1 backend. It raises where a GPU does (tensors or generators of two
// devices), it has a current device for each thread and a generator for each device, and it counts
// launches and synchronisations. Not modelled: streams, speed, limits of memory.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;
thread_local DeviceIndex current = 0;
thread_local bool quiet = false;       // inside an operation: what it calls is no launch
std::atomic<int64_t> in_flight{0};     // collectives that have returned and are not done
std::mutex lock;
std::map<std::string, int64_t> counts;

struct Quiet {
  bool before = quiet;
  Quiet() { quiet = true; }
  ~Quiet() { quiet = before; }
};
void count(const std::string& name) {
  if (quiet) return;
  std::lock_guard<std::mutex> held(lock);
  counts[name]++;
}
// One stream: what is launched next begins when a collective is done.
void wait() {
  while (!quiet && in_flight > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
bool on(const Tensor& t) { return t.defined() && t.device().type() == KIND; }

// ---- memory
std::set<std::pair<const char*, const char*>> pinned;  // begin and end of blocks
struct Block {
  char* begin;
  size_t n;
  bool pins;
};
void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->pins) {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase({block->begin, block->begin + block->n});
  }
  free(block->begin);
  delete block;
}
struct Memory final : c10::Allocator {
  explicit Memory(bool pins) : pins(pins) {}
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 64, std::max<size_t>(n, 1)) == 0, "out of memory");
    auto* begin = static_cast<char*>(p);
    if (pins) {
      std::lock_guard<std::mutex> held(lock);
      pinned.insert({begin, begin + n});
    }
    auto device = pins ? Device(c10::kCPU) : Device(KIND, current);
    return {p, new Block{begin, n, pins}, &release, device};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool pins;
};
Memory memory{false}, pinning{true};
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  for (auto& [begin, end] : pinned)
    if (begin <= data && data < end) return true;
  return false;
}

// ---- generators
std::vector<at::Generator>& generators() {  // the devices' own come first
  static std::vector<at::Generator> all{at::detail::createCPUGenerator(1), at::detail::createCPUGenerator(2)};
  return all;
}
const at::Generator& generator(int64_t i) { return generators().at(i < 0 ? current : i); }

// ---- every operation
const std::set<std::string> READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal",
    "aten::bincount", "aten::repeat_interleave", "aten::is_nonzero"};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size(), begin = stack->size() - n;
  const std::string name = schema.name();
  const bool indexes = name.find("index") != std::string::npos;  // takes indices in host memory
  std::optional<Device> where;
  bool mixed = false, masked = false;
  auto look = [&](const Tensor& t) {
    if (on(t)) {
      TORCH_CHECK(!where || *where == t.device(), "Expected all tensors to be on the same device, but found at least ",
                  "two devices, ", *where, " and ", t.device(), "! (", name, ")");
      where = t.device();
      masked |= t.scalar_type() == at::kBool;
    } else if (t.defined()) {
      mixed |= t.dim() > 0 || !op.hasTag(at::Tag::pointwise);  // a number in host memory is an argument
    }
  };
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    if (v.isTensor()) look(v.toTensor());
    if (v.isTensorList()) for (const Tensor& t : v.toTensorList()) look(t);
    if (v.isOptionalTensorList())
      for (const std::optional<Tensor>& t : v.toOptionalTensorList()) if (t) look(*t);
    if (v.isDevice() && !where) where = v.toDevice();
  }
  bool numbers = name.find("fill_") != std::string::npos || name.find("where") != std::string::npos ||
                 name.find("_foreach") != std::string::npos;
  TORCH_CHECK(!mixed || indexes || numbers || !where || where->is_cpu(), "Expected all tensors to be on the same device, ",
              "but found at least two devices, ", *where, " and cpu! (", name, ")");
  const Device device = where && where->index() >= 0 ? *where : Device(KIND, current);
  for (size_t i = 0; i < n; i++) {
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
    auto& v = (*stack)[begin + i];
    if (v.isNone()) v = generator(device.index());
    const auto& all = generators();
    TORCH_CHECK(std::count(all.begin(), all.end(), v.toGenerator()), "Expected a '", device.type(),
                "' device type for generator but found 'cpu'");
  }
  count(name);
  if (READS.count(name)) count("sync: a value is read, " + name);
  if (indexes && masked) count("sync: a mask is counted, " + name);
  if (indexes && mixed) count("sync: indices are copied, " + name);
  wait();
  Quiet inside;
  c10::DeviceGuard guard(device);
  at::native::cpu_fallback(op, stack);
}

// ---- what must know the device
Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(KIND, current)));
  return at::detail::empty_generic_symint(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(KIND, current)));
  return at::detail::empty_strided_symint_generic(size, stride, &memory,
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
Tensor as_host(const Tensor& t) {  // the same memory
  if (!on(t)) return t;
  auto seen = at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(c10::kCPU));
  seen._set_conj(t.is_conj());
  seen._set_neg(t.is_neg());
  return seen;
}
Tensor copied(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  if (on(from) && on(to)) count("copy on the device");
  else if (on(to)) count(non_blocking && is_pinned(from.data_ptr()) ? "copy to the device" : "sync: a copy to the device");
  else count(non_blocking && is_pinned(to.data_ptr()) ? "copy to the host" : "sync: a copy to the host");
  wait();
  at::AutoDispatchBelowADInplaceOrView below;
  as_host(to).copy_(as_host(from));
  return to;
}
Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copied(from, to, false);
}
Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, at::IntArrayRef stride, at::IntArrayRef padding,
                   at::IntArrayRef dilation, bool transposed, at::IntArrayRef more, int64_t groups) {
  TORCH_CHECK(on(x) && on(w), "Expected all tensors to be on the same device, but found at least two devices (convolution)");
  count("aten::convolution");
  wait();
  Quiet inside;
  auto bias = b && b->defined() ? std::optional<Tensor>(as_host(*b)) : std::nullopt;
  return at::convolution(as_host(x), as_host(w), bias, stride, padding, dilation, transposed, more, groups).to(x.device());
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef more, int64_t groups, std::array<bool, 3> mask) {
  TORCH_CHECK(on(g) && on(x) && on(w), "Expected all tensors to be on the same device, but found at least two devices (convolution)");
  for (bool wanted : mask) if (wanted) count("aten::convolution_backward");
  wait();
  Quiet inside;
  std::vector<int64_t> bias{g.size(1)};
  auto [a, b, c] = at::convolution_backward(as_host(g), as_host(x), as_host(w), bias, stride, padding, dilation, transposed, more, groups, mask);
  auto home = [&](const Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  return {home(a), home(b), home(c)};
}
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  auto kept = at::ones_like(x, x.options().dtype(at::kBool));
  if (train && !*train) return {x.clone(), kept};
  kept.bernoulli_(1 - p);
  return {x * kept * (p < 1 ? 1 / (1 - p) : 0.0), kept};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copied);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("native_dropout", &native_dropout);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// ---- torch's interfaces
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device getDevice() const override { return Device(KIND, current); }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "invalid device ordinal");
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return in_flight == 0; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeDevice(const DeviceIndex) const override {
    count("sync: of the device");
    wait();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? current : exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return generator(i); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    generators().push_back(at::detail::createCPUGenerator());
    return generators().back();
  }
  Device getDeviceFromPtr(void*) const override { return Device(KIND, current); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinning; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    c10::DeviceGuard guard(s.device());
    auto data = memory.allocate(n);
    memcpy(data.get(), s.data(), std::min(n, s.nbytes()));
    s.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
} hooks;

const bool begun = [] {
  c10::SetAllocator(KIND, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();
}  // namespace

TORCH_LIBRARY(pretended, m) {
  m.def("as_host", [](const Tensor& t) { return as_host(t); });
  m.def("get_rng_state", [](int64_t i) { return generator(i).get_state(); });
  m.def("set_rng_state", [](int64_t i, const Tensor& state) { at::Generator(generator(i)).set_state(state); });
  m.def("manual_seed", [](int64_t i, int64_t seed) { at::Generator(generator(i)).set_current_seed(seed); });
  m.def("fly", [](int64_t more) { in_flight += more; });
  m.def("forget", [] {
    std::lock_guard<std::mutex> held(lock);
    counts.clear();
  });
  m.def("counts", [] {
    std::lock_guard<std::mutex> held(lock);
    c10::Dict<std::string, int64_t> found;
    for (auto& [name, n] : counts) found.insert(name, n);
    return found;
  });
}
