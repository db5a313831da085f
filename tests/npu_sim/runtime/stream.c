/* Streams, events and synchronisation. A stream is only an identity and a capture state: work runs at once. */
#include <stdlib.h>

#include "sim.h"

#define DEFAULT_STREAM_LIMIT 2048

static SimStream *all_streams;
static int32_t live_streams[SIM_MAX_DEVICES];
static int32_t stream_limit = -1;
static int32_t next_stream_id = 1;

static int32_t limit_of_streams(void)
{
    if (stream_limit < 0) {
        stream_limit = (int32_t)sim_setting("NPU_SIM_STREAM_LIMIT", DEFAULT_STREAM_LIMIT);
    }
    return stream_limit;
}

void sim_set_stream_limit(int32_t limit)
{
    stream_limit = limit;
}

int32_t sim_stream_limit(void)
{
    return limit_of_streams();
}

int32_t sim_live_streams(int32_t device)
{
    return live_streams[device];
}

aclError sim_take_stream(int32_t device, const char *what)
{
    pthread_mutex_lock(&sim_lock);
    int32_t live = live_streams[device], limit = limit_of_streams();
    if (live < limit) {
        live_streams[device]++;
    }
    pthread_mutex_unlock(&sim_lock);
    if (live >= limit) {
        return sim_fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "%s: %d of %d streams of device %d are in use", what, live,
                        limit, device);
    }
    return ACL_SUCCESS;
}

void sim_give_stream(int32_t device)
{
    pthread_mutex_lock(&sim_lock);
    live_streams[device]--;
    pthread_mutex_unlock(&sim_lock);
}

aclError aclrtCreateStream(aclrtStream *stream)
{
    int32_t device = sim_current_device();
    aclError taken = sim_take_stream(device, "aclrtCreateStream");
    if (taken != ACL_SUCCESS) {
        return taken;
    }
    SimStream *created = calloc(1, sizeof *created);
    if (created == NULL) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    created->device = device;
    pthread_mutex_lock(&sim_lock);
    created->id = next_stream_id++;
    created->next = all_streams;
    all_streams = created;
    pthread_mutex_unlock(&sim_lock);
    *stream = created;
    return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag)
{
    (void)priority;
    (void)flag;
    return aclrtCreateStream(stream);
}

aclError aclrtDestroyStream(aclrtStream stream)
{
    pthread_mutex_lock(&sim_lock);
    for (SimStream **link = &all_streams; *link != NULL; link = &(*link)->next) {
        if (*link == (SimStream *)stream) {
            SimStream *gone = *link;
            *link = gone->next;
            live_streams[gone->device]--;
            free(gone);
            break;
        }
    }
    pthread_mutex_unlock(&sim_lock);
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream)
{
    return aclrtDestroyStream(stream);
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id)
{
    *id = stream != NULL ? ((SimStream *)stream)->id : 0;
    return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status)
{
    (void)stream;
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

void sim_leave_capture(SimGraph *graph)
{
    pthread_mutex_lock(&sim_lock);
    for (SimStream *stream = all_streams; stream != NULL; stream = stream->next) {
        if (stream->capture == graph) {
            stream->capture = NULL;
        }
    }
    pthread_mutex_unlock(&sim_lock);
}

aclError aclrtSynchronizeStream(aclrtStream stream)
{
    SimStream *on = stream;
    if (on != NULL && on->capture != NULL) {
        on->capture->broken = 1;
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured: it cannot be synchronised", on->id);
    }
    return sim_check_unsafe("aclrtSynchronizeStream");
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)
{
    (void)timeout;
    return aclrtSynchronizeStream(stream);
}

aclError aclrtSynchronizeDevice(void)
{
    return sim_check_unsafe("aclrtSynchronizeDevice");
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)
{
    (void)timeout;
    return aclrtSynchronizeDevice();
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag)
{
    (void)flag;
    SimEvent *created = calloc(1, sizeof *created);
    if (created == NULL) {
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    *event = created;
    return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag)
{
    return aclrtCreateEventExWithFlag(event, flag);
}

/* Events are not freed: a graph may still hold a destroyed one, and a test process is short. */
aclError aclrtDestroyEvent(aclrtEvent event)
{
    (void)event;
    return ACL_SUCCESS;
}

/* In a capture an event only ties streams together: waiting for it takes the waiting stream into the capture. */
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream)
{
    SimStream *on = stream;
    ((SimEvent *)event)->capture_id = on != NULL && on->capture != NULL ? on->capture->id : 0;
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)
{
    SimStream *on = stream;
    SimGraph *joined = sim_active_capture(((SimEvent *)event)->capture_id);
    if (on != NULL && on->capture == NULL && joined != NULL) {
        on->capture = joined;
    }
    return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream)
{
    (void)event;
    (void)stream;
    return ACL_SUCCESS;
}

/* torch_npu builds the events that update() records out of a word in device memory and these two calls. */
aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, aclrtStream stream)
{
    (void)flag;
    SimStream *on = stream;
    if (on != NULL && on->capture != NULL) {
        SimNode *node = sim_add_node(on->capture, NODE_VALUE_WRITE);
        node->destination = address;
        node->value = value;
        return ACL_SUCCESS;
    }
    *(uint64_t *)address = value;
    return ACL_SUCCESS;
}

aclError aclrtValueWait(void *address, uint64_t value, uint32_t flag, aclrtStream stream)
{
    SimStream *on = stream;
    if (flag != ACL_STREAM_WAIT_VALUE_EQ) {
        return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "npu simulator: aclrtValueWait with flag %u", flag);
    }
    if (on != NULL && on->capture != NULL) {
        SimNode *node = sim_add_node(on->capture, NODE_VALUE_WAIT);
        node->destination = address;
        node->value = value;
        return ACL_SUCCESS;
    }
    return *(uint64_t *)address == value
               ? ACL_SUCCESS
               : sim_fail(ACL_ERROR_RT_WAIT_TIMEOUT, "the stream would wait for ever for an event that nobody recorded");
}

aclError aclrtSynchronizeEvent(aclrtEvent event)
{
    (void)event;
    return sim_check_unsafe("aclrtSynchronizeEvent");
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status)
{
    (void)event;
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status)
{
    (void)event;
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end)
{
    (void)start;
    (void)end;
    *milliseconds = 0.0f;
    return ACL_SUCCESS;
}
