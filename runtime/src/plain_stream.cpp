#include "apollo/plain_stream.h"

namespace apollo {

PlainStream::PlainStream(const CudaDriver& driver, const std::string& where) : driver_(driver) {
  driver.check(driver.cuStreamCreate(&handle_, cuda::kStreamNonBlocking), "cuStreamCreate", where);
}

PlainStream::~PlainStream() { driver_.cuStreamDestroy(handle_); }

}  // namespace apollo
