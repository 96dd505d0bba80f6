#include <cusparseLt.h>

#include "fake.h"

extern "C" {

#define FAKE_DEFINE(name, parameters, ...)                                          \
  cusparseStatus_t name parameters {                                                \
    return Called(CUSPARSE_STATUS_NOT_SUPPORTED, #name, #__VA_ARGS__, __VA_ARGS__); \
  }
FAKE_FUNCTIONS(FAKE_DEFINE)

cusparseStatus_t cusparseLtGetProperty(libraryPropertyType property, int* value) {
  Call call("cusparseLtGetProperty", "");
  if (call.failed()) return CUSPARSE_STATUS_NOT_SUPPORTED;
  *value = static_cast<int>(call.Setting("version" + std::to_string(property)));
  return CUSPARSE_STATUS_SUCCESS;
}

const char* cusparseLtGetErrorName(cusparseStatus_t) { return "CUSPARSE_STATUS_NOT_SUPPORTED"; }
const char* cusparseLtGetErrorString(cusparseStatus_t) { return "fake words"; }

}  // extern "C"
