// cuGetErrorName, cuGetErrorString, cuGetProcAddress.
#include "fake_cuda/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>

namespace {

struct ErrorText {
  CUresult error;
  const char* name;
  const char* text;
};
#define EPD_ERROR(name, text) \
  { name, #name, text }
constexpr ErrorText kErrors[] = {
    EPD_ERROR(CUDA_SUCCESS, "no error"),
    EPD_ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    EPD_ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    EPD_ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    EPD_ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    EPD_ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    EPD_ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    EPD_ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    EPD_ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    EPD_ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    EPD_ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    EPD_ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    EPD_ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    EPD_ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    EPD_ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    EPD_ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
              "operation failed due to a previous error during capture"),
    EPD_ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    EPD_ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    EPD_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    EPD_ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    EPD_ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    EPD_ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    EPD_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    EPD_ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    EPD_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
              "part or all of the requested memory range is already mapped"),
    EPD_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
              "pointer does not correspond to a registered memory region"),
    EPD_ERROR(CUDA_ERROR_HARDWARE_STACK_ERROR, "hardware stack error"),
    EPD_ERROR(CUDA_ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered"),
    EPD_ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    EPD_ERROR(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks in cooperative launch"),
    EPD_ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    EPD_ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    EPD_ERROR(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    EPD_ERROR(CUDA_ERROR_MPS_CONNECTION_FAILED, "MPS client failed to connect to the MPS control daemon"),
    EPD_ERROR(CUDA_ERROR_MPS_SERVER_NOT_READY, "MPS server is not ready to accept new MPS client requests"),
    EPD_ERROR(CUDA_ERROR_MPS_CLIENT_TERMINATED, "MPS client has been terminated by the MPS server"),
    EPD_ERROR(CUDA_ERROR_INVALID_RESOURCE_TYPE, "invalid resource type"),
    EPD_ERROR(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, "invalid resource configuration"),
    EPD_ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef EPD_ERROR

const ErrorText* find_error(CUresult error) {
  const auto* const found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                         [error](const ErrorText& each) { return each.error == error; });
  return found == std::end(kErrors) ? nullptr : found;
}

}  // namespace

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) {
  const ErrorText* const found = find_error(error);
  if (name != nullptr) *name = found == nullptr ? nullptr : found->name;
  return found == nullptr || name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  const ErrorText* const found = find_error(error);
  if (text != nullptr) *text = found == nullptr ? nullptr : found->text;
  return found == nullptr || text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// The newest that there is of the name, whatever version is asked for; per-thread default streams are not
// known.
CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** function, int, cuuint64_t,
                                  CUdriverProcAddressQueryResult* status) {
  if (symbol == nullptr || function == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Dl_info self{};
  ::dladdr(reinterpret_cast<const void*>(&find_error), &self);
  void* const library = ::dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* const version : {"_v4", "_v3", "_v2", ""}) {
    if (*function == nullptr) *function = ::dlsym(library, (std::string(symbol) + version).c_str());
  }
  if (library != nullptr) ::dlclose(library);
  const bool found = *function != nullptr;
  if (status != nullptr) {
    *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
