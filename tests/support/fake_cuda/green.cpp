// Green contexts: a context on some of the SMs. Which ones does not matter here, only how many.
#include "fake_cuda/driver.h"
#include "fake_cuda/stream.h"

#include <algorithm>
#include <cstring>

using namespace epd::fake_cuda;

namespace {

constexpr unsigned kSmUnit = 8;  // that are scheduled together, of compute capability 9.0

struct Description {
  unsigned sms = 0;
};

struct Green {
  std::shared_ptr<Context> context;
};

Table<Description>& descriptions() {
  static auto* const table = new Table<Description>;
  return *table;
}
Table<Green>& greens() {
  static auto* const table = new Table<Green>;
  return *table;
}

CUdevResource sms_of(unsigned count) {
  CUdevResource resource;
  std::memset(&resource, 0, sizeof(resource));
  resource.type = count == 0 ? CU_DEV_RESOURCE_TYPE_INVALID : CU_DEV_RESOURCE_TYPE_SM;
  resource.sm.smCount = count;
  resource.sm.minSmPartitionSize = kSmUnit;
  resource.sm.smCoscheduledAlignment = kSmUnit;
  return resource;
}

CUresult get_resource(CUdevResource* resource, CUdevResourceType type, unsigned sms) {
  if (resource == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  *resource = sms_of(sms);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult CUDAAPI cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  if (const CUresult error = enter("cuDeviceGetDevResource", Needs::kNothing)) return error;
  if (driver()->device(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  return get_resource(resource, type, kNumSms);
}

CUresult CUDAAPI cuCtxGetDevResource(CUcontext context, CUdevResource* resource, CUdevResourceType type) {
  if (const CUresult error = enter("cuCtxGetDevResource", Needs::kNothing)) return error;
  const std::shared_ptr<Context> known = driver()->contexts.find(context);
  if (known == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return get_resource(resource, type, known->num_sms);
}

CUresult CUDAAPI cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource* resource, CUdevResourceType type) {
  if (const CUresult error = enter("cuGreenCtxGetDevResource", Needs::kNothing)) return error;
  const std::shared_ptr<Green> known = greens().find(green);
  if (known == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return get_resource(resource, type, known->context->num_sms);
}

CUresult CUDAAPI cuDevSmResourceSplitByCount(CUdevResource* result, unsigned int* num_groups,
                                             const CUdevResource* input, CUdevResource* remaining,
                                             unsigned int flags, unsigned int min_count) {
  if (const CUresult error = enter("cuDevSmResourceSplitByCount", Needs::kNothing)) return error;
  if (num_groups == nullptr || input == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (input->type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  const unsigned unit = (flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) != 0 ? 2 : kSmUnit;
  const unsigned size = (std::max(min_count, 1u) + unit - 1) / unit * unit;
  const unsigned most = input->sm.smCount / size;
  if (most == 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  if (result == nullptr) {
    *num_groups = most;
    return CUDA_SUCCESS;
  }
  *num_groups = std::min(*num_groups, most);
  // `input` may be one of those that are written.
  const unsigned rest = input->sm.smCount - *num_groups * size;
  std::fill_n(result, *num_groups, sms_of(size));
  if (remaining != nullptr) *remaining = sms_of(rest);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevResourceGenerateDesc(CUdevResourceDesc* description, CUdevResource* resources,
                                           unsigned int count) {
  if (const CUresult error = enter("cuDevResourceGenerateDesc", Needs::kNothing)) return error;
  if (description == nullptr || resources == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  const auto made = std::make_shared<Description>();
  for (unsigned i = 0; i < count; ++i) {
    if (resources[i].type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    made->sms += resources[i].sm.smCount;
  }
  if (made->sms == 0 || made->sms > kNumSms) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  *description = reinterpret_cast<CUdevResourceDesc>(descriptions().add(made));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGreenCtxCreate(CUgreenCtx* green, CUdevResourceDesc description, CUdevice ordinal,
                                  unsigned int flags) {
  if (const CUresult error = enter("cuGreenCtxCreate", Needs::kNothing)) return error;
  const std::shared_ptr<Description> known = descriptions().find(description);
  Device* const device = driver()->device(ordinal);
  if (device == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (green == nullptr || known == nullptr || flags != CU_GREEN_CTX_DEFAULT_STREAM)
    return CUDA_ERROR_INVALID_VALUE;
  const auto made = std::make_shared<Green>();
  made->context = std::make_shared<Context>(*device, known->sms);
  made->context->primary = true;  // cuCtxDestroy is not for it
  *green = reinterpret_cast<CUgreenCtx>(greens().add(made));
  driver()->contexts.add(made->context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx green) {
  if (const CUresult error = enter("cuGreenCtxDestroy", Needs::kNothing)) return error;
  const std::shared_ptr<Green> known = greens().remove(green);
  if (known == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  driver()->contexts.remove(known->context.get());
  destroy_streams(*known->context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxFromGreenCtx(CUcontext* context, CUgreenCtx green) {
  if (const CUresult error = enter("cuCtxFromGreenCtx", Needs::kNothing)) return error;
  const std::shared_ptr<Green> known = greens().find(green);
  if (known == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *context = reinterpret_cast<CUcontext>(known->context.get());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx green, unsigned int flags, int) {
  if (const CUresult error = enter("cuGreenCtxStreamCreate", Needs::kNothing)) return error;
  const std::shared_ptr<Green> known = greens().find(green);
  if (known == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;  // required, says cuda.h
  if (const CUresult error = known->context->device.check()) return error;
  return make_stream(known->context, false, stream);
}
