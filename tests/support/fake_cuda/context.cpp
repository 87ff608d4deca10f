// cuCtx* and primary contexts.
#include "fake_cuda/driver.h"
#include "fake_cuda/stream.h"

namespace epd::fake_cuda {
namespace {

thread_local std::vector<std::weak_ptr<Context>> stack;  // the last one is current

CUcontext handle_of(const std::shared_ptr<Context>& context) {
  return reinterpret_cast<CUcontext>(context.get());
}

}  // namespace

Context::~Context() {
  // The end of the last context makes the device as new.
  if (--device.contexts == 0) device.error.store(CUDA_SUCCESS);
}

std::shared_ptr<Context> current_context() {
  if (stack.empty()) return nullptr;
  const std::shared_ptr<Context> context = stack.back().lock();
  return context == nullptr ? nullptr : driver()->contexts.find(context.get());
}

void make_current(const std::shared_ptr<Context>& context) {
  if (!stack.empty()) stack.pop_back();
  if (context != nullptr) stack.push_back(context);
}

}  // namespace epd::fake_cuda

using namespace epd::fake_cuda;

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  if (const CUresult error = enter("cuDevicePrimaryCtxRetain", Needs::kNothing)) return error;
  Device* const device = driver()->device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = device->admit()) return error;
  const std::lock_guard lock(driver()->mutex);
  Primary& primary = driver()->primaries[static_cast<std::size_t>(ordinal)];
  if (primary.context == nullptr) {
    primary.context = std::make_shared<Context>(*device, kNumSms);
    primary.context->primary = true;
    driver()->contexts.add(primary.context);
  }
  ++primary.retained;
  *context = handle_of(primary.context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice ordinal) {
  if (const CUresult error = enter("cuDevicePrimaryCtxRelease", Needs::kNothing)) return error;
  if (driver()->device(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::shared_ptr<Context> last;
  {
    const std::lock_guard lock(driver()->mutex);
    Primary& primary = driver()->primaries[static_cast<std::size_t>(ordinal)];
    if (primary.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary.retained == 0) last = std::move(primary.context);
  }
  if (last == nullptr) return CUDA_SUCCESS;
  driver()->contexts.remove(last.get());
  destroy_streams(*last);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxCreate(CUcontext* context, CUctxCreateParams* params, unsigned int, CUdevice ordinal) {
  if (const CUresult error = enter("cuCtxCreate", Needs::kNothing)) return error;
  Device* const device = driver()->device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = device->admit()) return error;
  unsigned sms = kNumSms;
  if (params != nullptr && params->numExecAffinityParams == 1 &&
      params->execAffinityParams->type == CU_EXEC_AFFINITY_TYPE_SM_COUNT) {
    sms = params->execAffinityParams->param.smCount.val;
    if (sms == 0 || sms > kNumSms) return CUDA_ERROR_INVALID_VALUE;
  }
  const auto made = std::make_shared<Context>(*device, sms);
  driver()->contexts.add(made);
  stack.push_back(made);
  *context = handle_of(made);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDestroy(CUcontext context) {
  if (const CUresult error = enter("cuCtxDestroy", Needs::kNothing)) return error;
  const std::shared_ptr<Context> known = driver()->contexts.find(context);
  if (known == nullptr || known->primary) return CUDA_ERROR_INVALID_CONTEXT;
  driver()->contexts.remove(context);
  if (!stack.empty() && stack.back().lock() == known) stack.pop_back();
  destroy_streams(*known);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
  if (const CUresult error = enter("cuCtxSetCurrent", Needs::kNothing)) return error;
  const std::shared_ptr<Context> known = driver()->contexts.find(context);
  if (context != nullptr && known == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  make_current(known);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  if (const CUresult error = enter("cuCtxGetCurrent", Needs::kNothing)) return error;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = handle_of(current_context());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  if (const CUresult error = enter("cuCtxPushCurrent", Needs::kNothing)) return error;
  const std::shared_ptr<Context> known = driver()->contexts.find(context);
  if (known == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  stack.push_back(known);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  if (const CUresult error = enter("cuCtxPopCurrent", Needs::kNothing)) return error;
  const std::shared_ptr<Context> current = current_context();
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  stack.pop_back();
  if (context != nullptr) *context = handle_of(current);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
  if (const CUresult error = enter("cuCtxGetDevice", Needs::kContext)) return error;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = current_context()->device.ordinal;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize() {
  if (const CUresult error = enter("cuCtxSynchronize", Needs::kContext)) return error;
  return synchronise_context(*current_context());
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (const CUresult error = enter("cuCtxGetStreamPriorityRange", Needs::kContext)) return error;
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return CUDA_SUCCESS;
}
