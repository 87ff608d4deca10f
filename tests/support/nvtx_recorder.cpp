// A tool that listens to NVTX ranges, as profilers do: loaded by NVTX_INJECTION64_PATH, it prints them.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {

nvtxDomainHandle_t create(const char* name) {
  static int domain;
  std::printf("nvtx domain %s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}
int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  std::printf("nvtx begins %s\n", attributes->message.ascii);
  return 0;
}
int pop(nvtxDomainHandle_t) {
  std::printf("nvtx ends\n");
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t tables) {
  const auto* const callbacks = static_cast<const NvtxExportTableCallbacks*>(tables(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &count) == 0)
    return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
