#include "apollo/plain_stream.h"

namespace apollo {

PlainStream::PlainStream(const CudaDriver& driver, int priority, const std::string& where) : driver_(driver) {
  driver.check(driver.cuStreamCreateWithPriority(&handle_, cuda::kStreamNonBlocking, priority),
               "cuStreamCreateWithPriority", where);
}

PlainStream::~PlainStream() { driver_.cuStreamDestroy(handle_); }

}  // namespace apollo
