/* Devices, contexts, errors and the settings that the environment carries. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;

static __thread char error_text[1024];
static __thread int32_t current_device = -1; /* a thread has none until it sets one */
static int context_marks[SIM_MAX_DEVICES];

aclError sim_fail(aclError code, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(error_text, sizeof error_text, format, values);
    va_end(values);
    return code;
}

void sim_die(const char *message)
{
    fprintf(stderr, "npu simulator: %s\n", message);
    abort();
}

/* The Python side puts the text of a failed kernel here, so that torch_npu's error carries it. */
void sim_set_error(const char *text)
{
    snprintf(error_text, sizeof error_text, "%s", text);
}

const char *aclGetRecentErrMsg(void)
{
    static __thread char handed_out[1024];
    memcpy(handed_out, error_text, sizeof handed_out);
    error_text[0] = '\0';
    return handed_out;
}

int64_t sim_setting(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtoll(text, NULL, 10) : otherwise;
}

static int32_t physical_devices(void)
{
    int64_t count = sim_setting("NPU_SIM_DEVICE_COUNT", 1);
    if (count < 0 || count > SIM_MAX_DEVICES) {
        sim_die("NPU_SIM_DEVICE_COUNT is outside 0..16");
    }
    return (int32_t)count;
}

/* ASCEND_RT_VISIBLE_DEVICES counts only the ids that exist: the real runtime drops the others without a word. */
int32_t sim_device_count(void)
{
    const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    int32_t physical = physical_devices();
    if (visible == NULL) {
        return physical;
    }
    int32_t count = 0;
    while (*visible != '\0') {
        char *end = NULL;
        long id = strtol(visible, &end, 10);
        if (end == visible) {
            break;
        }
        if (id >= 0 && id < physical) {
            count++;
        }
        visible = *end == ',' ? end + 1 : end;
    }
    return count;
}

int32_t sim_current_device(void)
{
    return current_device >= 0 ? current_device : 0;
}

aclError aclrtGetDeviceCount(uint32_t *count)
{
    *count = (uint32_t)sim_device_count();
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device)
{
    if (device < 0 || device >= sim_device_count()) {
        return sim_fail(ACL_ERROR_RT_INVALID_DEVICEID, "device %d does not exist: %d visible", device,
                        sim_device_count());
    }
    current_device = device;
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device)
{
    if (current_device < 0) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    }
    *device = current_device;
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context)
{
    if (current_device < 0) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device was set in this thread");
    }
    *context = &context_marks[current_device];
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context)
{
    ptrdiff_t device = (int *)context - context_marks;
    if (device < 0 || device >= SIM_MAX_DEVICES) {
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "unknown context");
    }
    return aclrtSetDevice((int32_t)device);
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    (void)device;
    if (flags != NULL) {
        *flags = 0;
    }
    *active = 1;
    return ACL_SUCCESS;
}

const char *aclrtGetSocName(void)
{
    const char *name = getenv("NPU_SIM_DEVICE_NAME");
    return name != NULL && *name != '\0' ? name : "Ascend910B2";
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    (void)device;
    (void)peer;
    *can = 1;
    return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value)
{
    (void)device;
    (void)info;
    *value = 0;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value)
{
    (void)device;
    (void)attribute;
    *value = 20;
    return ACL_SUCCESS;
}
