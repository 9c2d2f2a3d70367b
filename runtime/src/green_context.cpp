#include "apollo/green_context.h"

#include <vector>

namespace apollo {

GreenContext::GreenContext(const CudaDriver& driver, cuda::Device device, std::span<const cuda::DevResource> resources,
                           const std::string& where)
    : driver_(driver) {
  // The driver needs a mutable array of them; it keeps the description until the process ends.
  std::vector<cuda::DevResource> compact(resources.begin(), resources.end());
  cuda::ResourceDesc desc = nullptr;
  driver.check(driver.cuDevResourceGenerateDesc(&desc, compact.data(), static_cast<unsigned>(compact.size())),
               "cuDevResourceGenerateDesc", where);
  driver.check(driver.cuGreenCtxCreate(&handle_, desc, device, cuda::kGreenContextDefaultStream), "cuGreenCtxCreate",
               where);
  try {
    read_back(where);
  } catch (...) {
    driver.cuGreenCtxDestroy(handle_);  // the first failure is the better message
    throw;
  }
}

GreenContext::~GreenContext() { driver_.cuGreenCtxDestroy(handle_); }

void GreenContext::read_back(const std::string& where) {
  cuda::DevResource granted;
  driver_.check(driver_.cuGreenCtxGetDevResource(handle_, &granted, cuda::kResourceTypeSm), "cuGreenCtxGetDevResource",
                where);
  num_sms_ = static_cast<int>(granted.sm.sm_count);
}

GreenStream::GreenStream(const CudaDriver& driver, const GreenContext& context, const std::string& where)
    : driver_(driver) {
  driver.check(driver.cuGreenCtxStreamCreate(&handle_, context.handle(), cuda::kStreamNonBlocking, 0),
               "cuGreenCtxStreamCreate", where);
}

GreenStream::~GreenStream() { driver_.cuStreamDestroy(handle_); }

}  // namespace apollo
