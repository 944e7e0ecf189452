/* CANN without a device: what torch_npu calls while it sets a device up.
 *
 * Memory is host memory, copies are memcpy, streams and events are numbers, nothing is ever pending. There are no
 * kernels: whatever would launch one fails. cann_stub.py appends a STUB(...) line for each entry point that torch_npu
 * wants and that has no body here.
 *
 * Environment:
 *     CANN_STUB_DEVICES   number of devices that torch.npu sees (default 0)
 *     CANN_STUB_SOC       name of the SoC that it sees (default Ascend910B3)
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, BAD_SIZE = 107002, OUT_OF_MEMORY = 207001, NO_DRIVER = 507899 };

static __thread int device;

static int device_count(void)
{
    const char *count = getenv("CANN_STUB_DEVICES");
    return count ? atoi(count) : 0;
}

static int new_number(void **number)
{
    static size_t last;
    *number = (void *)__atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return OK;
}

/* Devices */

int aclrtGetDeviceCount(unsigned *count) { *count = device_count(); return OK; }
int aclrtSetDevice(int index) { return index < 0 || index >= device_count() ? NO_DRIVER : (device = index, OK); }
int aclrtGetDevice(int *index) { *index = device; return device_count() ? OK : NO_DRIVER; }
int aclrtGetCurrentContext(void **context) { *context = &device; return OK; }
const char *aclrtGetSocName(void) { const char *name = getenv("CANN_STUB_SOC"); return name ? name : "Ascend910B3"; }
int aclGetDeviceCapability(unsigned index, int what, long *value) { *value = 24; return OK; }
int aclrtGetMemInfo(int kind, size_t *unused, size_t *total) { *unused = *total = 64UL << 30; return OK; }

/* Options */

int aclGetCompileopt(int option, char *value, size_t size) { snprintf(value, size, "disable"); return OK; }
int aclrtGetSysParamOpt(int option, long *value) { *value = 0; return OK; }

/* Streams and events */

int aclrtCreateStreamWithConfig(void **stream, unsigned priority, unsigned flag) { return new_number(stream); }
int aclrtCreateEventWithFlag(void **event, unsigned flag) { return new_number(event); }
int aclrtCreateEventExWithFlag(void **event, unsigned flag) { return new_number(event); }
int aclrtStreamQuery(void *stream, int *pending) { *pending = 0; return OK; }
int aclrtQueryEventStatus(void *event, int *done) { *done = 1; return OK; }

/* Memory */

int aclrtMallocHost(void **memory, size_t size) { return posix_memalign(memory, 512, size) ? OUT_OF_MEMORY : OK; }
int aclrtMalloc(void **memory, size_t size, int policy) { return aclrtMallocHost(memory, size); }
int aclrtMallocAlign32(void **memory, size_t size, int policy) { return aclrtMallocHost(memory, size); }
int aclrtFree(void *memory) { free(memory); return OK; }
int aclrtFreeHost(void *memory) { free(memory); return OK; }

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind)
{
    return size > room ? BAD_SIZE : (memcpy(to, from, size), OK);
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream)
{
    return aclrtMemcpy(to, room, from, size, kind);
}

/* The bounded string functions that CANN ships */

int vsnprintf_s(char *to, size_t room, size_t count, const char *format, va_list arguments)
{
    return vsnprintf(to, room, format, arguments);
}

int snprintf_s(char *to, size_t room, size_t count, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf(to, room, format, arguments);
    va_end(arguments);
    return written;
}

int strcpy_s(char *to, size_t room, const char *from) { return snprintf(to, room, "%s", from) < (int)room ? OK : 34; }

/* Everything else. A C entry point returns a fixed code. A C++ one might have to return an object, which no stub can
 * make: it ends the process with its name. */

static long unsupported(const char *name)
{
    fprintf(stderr, "%s needs CANN, and this is a stub of it without kernels\n", name);
    abort();
}

#define STUB(id, name, result)           \
    long stub_##id(void) __asm__(name);  \
    long stub_##id(void) { return result; }

