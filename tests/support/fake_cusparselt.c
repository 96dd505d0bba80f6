// A cuSPARSELt that multiplies nothing: its functions succeed, but for one that fails, and note their arguments.

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static char calls[1 << 16], failing[64];
static int alive;  // handles, descriptors, selections and plans made and not destroyed
int fake_minor = 8;
size_t fake_workspace = 4096;

// Each line is a function and its integers, without handles and descriptors.
const char *fake_calls(void) { return calls; }
int fake_alive(void) { return alive; }
void fake_reset(const char *fail) {
  calls[0] = 0;
  alive = 0;
  snprintf(failing, sizeof failing, "%s", fail);
}

static int note(const char *name, int makes, const char *format, ...) {
  size_t length = strlen(calls);
  va_list values;
  va_start(values, format);
  length += snprintf(calls + length, sizeof calls - length, "%s", name);
  length += vsnprintf(calls + length, sizeof calls - length, format, values);
  snprintf(calls + length, sizeof calls - length, "\n");
  va_end(values);
  if (!strcmp(name, failing)) return 7;
  alive += makes;
  return 0;
}

int cusparseLtInit(void *h) { return note("cusparseLtInit", 1, ""); }
int cusparseLtDestroy(void *h) { return note("cusparseLtDestroy", -1, ""); }
int cusparseLtGetProperty(int which, int *value) {
  *value = which == 1 ? fake_minor : 0;
  return note("cusparseLtGetProperty", 0, "");
}
const char *cusparseLtGetErrorName(int status) { return status == 7 ? "SEVEN" : "?"; }
const char *cusparseLtGetErrorString(int status) { return "words"; }
int cusparseLtDenseDescriptorInit(void *h, void *m, int64_t rows, int64_t cols, int64_t leading, uint32_t alignment,
                                  int type, int order) {
  return note("cusparseLtDenseDescriptorInit", 1, " %ld %ld %ld %u %d %d", rows, cols, leading, alignment, type, order);
}
int cusparseLtStructuredDescriptorInit(void *h, void *m, int64_t rows, int64_t cols, int64_t leading,
                                       uint32_t alignment, int type, int order, int sparsity) {
  return note("cusparseLtStructuredDescriptorInit", 1, " %ld %ld %ld %u %d %d %d", rows, cols, leading, alignment, type,
              order, sparsity);
}
int cusparseLtMatDescriptorDestroy(void *m) { return note("cusparseLtMatDescriptorDestroy", -1, ""); }
int cusparseLtMatmulDescriptorInit(void *h, void *p, int a, int b, void *ma, void *mb, void *mc, void *md, int type) {
  return note("cusparseLtMatmulDescriptorInit", 0, " %d %d %d", a, b, type);
}
int cusparseLtMatmulAlgSelectionInit(void *h, void *s, void *p, int algorithm) {
  return note("cusparseLtMatmulAlgSelectionInit", 1, " %d", algorithm);
}
int cusparseLtMatmulAlgSelectionDestroy(void *s) { return note("cusparseLtMatmulAlgSelectionDestroy", -1, ""); }
int cusparseLtMatmulAlgSetAttribute(void *h, void *s, int attribute, int *value, size_t bytes) {
  return note("cusparseLtMatmulAlgSetAttribute", 0, " %d %d %zu", attribute, *value, bytes);
}
int cusparseLtMatmulAlgGetAttribute(void *h, void *s, int attribute, int *value, size_t bytes) {
  *value = attribute == 1 ? 12 : -1;
  return note("cusparseLtMatmulAlgGetAttribute", 0, " %d %zu", attribute, bytes);
}
int cusparseLtMatmulPlanInit(void *h, void *plan, void *p, void *s) { return note("cusparseLtMatmulPlanInit", 1, ""); }
int cusparseLtMatmulPlanDestroy(void *plan) { return note("cusparseLtMatmulPlanDestroy", -1, ""); }
int cusparseLtMatmulGetWorkspace(void *h, void *plan, size_t *bytes) {
  *bytes = fake_workspace;
  return note("cusparseLtMatmulGetWorkspace", 0, "");
}
int cusparseLtMatmul(void *h, void *plan, float *alpha, void *a, void *b, float *beta, void *c, void *d,
                     void *workspace, void **streams, int32_t count) {
  return note("cusparseLtMatmul", 0, " %g %ld %ld %g %ld %ld %ld %ld %d", *alpha, (long)a, (long)b, *beta, (long)c,
              (long)d, (long)workspace, (long)streams[0], count);
}
int cusparseLtSpMMACompressedSize(void *h, void *plan, size_t *bytes, size_t *buffer) {
  *bytes = 1000;
  *buffer = 0;
  return note("cusparseLtSpMMACompressedSize", 0, "");
}
int cusparseLtSpMMACompress(void *h, void *plan, void *dense, void *compressed, void *buffer, void *stream) {
  return note("cusparseLtSpMMACompress", 0, " %ld %ld", (long)dense, (long)stream);
}
