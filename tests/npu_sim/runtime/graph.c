/* Graph capture, task groups, update and replay.
 *
 * A graph is a list of nodes. Operator calls are kept on the Python side under a number; the two sides meet in
 * sim_stream_mode, sim_add_kernel and the three callbacks. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum SimMode { MODE_RUN = 0, MODE_CAPTURE = 1, MODE_UPDATE = 2 };

typedef int (*RunKernel)(int64_t kernel);
typedef void (*DropKernel)(int64_t kernel);
typedef void (*CaptureEnded)(uint64_t graph);

static RunKernel run_kernel;
static DropKernel drop_kernel;
static CaptureEnded capture_ended;
static SimGraph *captures; /* in progress */
static uint64_t next_graph_id = 1;
static int64_t counters[4]; /* captures, replays, task groups updated, graphs alive */
static __thread aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

void sim_set_callbacks(RunKernel run, DropKernel drop, CaptureEnded ended)
{
    run_kernel = run;
    drop_kernel = drop;
    capture_ended = ended;
}

int64_t sim_counter(int32_t which)
{
    return counters[which];
}

static void *grown(void *items, size_t count, size_t item_bytes)
{
    if ((count & (count + 1)) != 0 && count != 0) {
        return items; /* room is doubled whenever count + 1 is a power of two */
    }
    void *larger = realloc(items, 2 * (count + 1) * item_bytes);
    if (larger == NULL) {
        sim_die("no host memory for a graph");
    }
    return larger;
}

SimNode *sim_add_node(SimGraph *graph, enum SimNodeKind kind)
{
    SimNode *node = calloc(1, sizeof *node);
    if (node == NULL) {
        sim_die("no host memory for a graph");
    }
    node->kind = kind;
    graph->nodes = grown(graph->nodes, graph->count, sizeof *graph->nodes);
    graph->nodes[graph->count++] = node;
    return node;
}

SimGraph *sim_active_capture(uint64_t id)
{
    SimGraph *graph = captures;
    while (graph != NULL && graph->id != id) {
        graph = graph->next;
    }
    return id != 0 ? graph : NULL;
}

/* A call that would wait for the device is illegal while a capture runs: in the whole process for a "global"
 * capture, in the capturing thread for a "thread_local" one, nowhere for a "relaxed" one. */
aclError sim_check_unsafe(const char *what)
{
    if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) {
        return ACL_SUCCESS;
    }
    for (SimGraph *graph = captures; graph != NULL; graph = graph->next) {
        int mine = pthread_equal(graph->owner, pthread_self());
        int hit = graph->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL
                      ? mine || thread_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL
                      : graph->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL && mine;
        if (hit) {
            graph->broken = 1;
            return sim_fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s is not allowed while a graph is captured", what);
        }
    }
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode)
{
    aclmdlRICaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode)
{
    SimStream *on = stream;
    if (on == NULL || on->capture != NULL) {
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is captured already or is the default stream");
    }
    aclError taken = sim_take_stream(on->device, "aclmdlRICaptureBegin");
    if (taken != ACL_SUCCESS) {
        return taken;
    }
    SimGraph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) {
        sim_die("no host memory for a graph");
    }
    graph->device = on->device;
    graph->mode = mode;
    graph->owner = pthread_self();
    graph->origin = on;
    pthread_mutex_lock(&sim_lock);
    graph->id = next_graph_id++;
    graph->next = captures;
    captures = graph;
    pthread_mutex_unlock(&sim_lock);
    on->capture = graph;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *graph)
{
    SimGraph *active = stream != NULL ? ((SimStream *)stream)->capture : NULL;
    *status = active == NULL   ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : active->broken ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                               : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    *graph = active;
    return ACL_SUCCESS;
}

aclError aclmdlRIDestroy(aclmdlRI model)
{
    SimGraph *graph = model;
    for (size_t i = 0; i < graph->count; i++) {
        if (graph->nodes[i]->kind == NODE_KERNEL && drop_kernel != NULL) {
            drop_kernel(graph->nodes[i]->kernel);
        }
        free(graph->nodes[i]);
    }
    while (graph->groups != NULL) {
        SimGroup *group = graph->groups;
        graph->groups = group->next;
        free(group->nodes);
        free(group);
    }
    sim_give_stream(graph->device);
    if (graph->open_group != NULL) {
        free(graph->open_group->nodes);
        free(graph->open_group);
    }
    free(graph->nodes);
    graph->nodes = NULL;
    graph->count = 0;
    counters[3]--; /* the struct stays: torch_npu tells graphs apart by their address, so none may return */
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model)
{
    SimStream *on = stream;
    SimGraph *graph = on != NULL ? on->capture : NULL;
    *model = NULL;
    if (graph == NULL || graph->origin != on) {
        return sim_fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "no capture was begun on this stream");
    }
    pthread_mutex_lock(&sim_lock);
    SimGraph **link = &captures;
    while (*link != graph) {
        link = &(*link)->next;
    }
    *link = graph->next;
    pthread_mutex_unlock(&sim_lock);
    sim_leave_capture(graph);
    if (capture_ended != NULL) {
        capture_ended(graph->id);
    }
    counters[3]++;
    if (graph->broken || graph->open_group != NULL) {
        aclmdlRIDestroy(graph);
        return sim_fail(ACL_ERROR_RT_STREAM_UNJOINED, "the capture is invalid: an illegal call was made during it");
    }
    counters[0]++;
    *model = graph;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream)
{
    SimGraph *graph = ((SimStream *)stream)->capture;
    if (graph == NULL || graph->open_group != NULL) {
        return sim_fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group needs a capture and no other open group");
    }
    graph->open_group = calloc(1, sizeof *graph->open_group);
    if (graph->open_group == NULL) {
        sim_die("no host memory for a task group");
    }
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle)
{
    SimGraph *graph = ((SimStream *)stream)->capture;
    if (graph == NULL || graph->open_group == NULL) {
        return sim_fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group is open on this stream");
    }
    SimGroup *group = graph->open_group;
    graph->open_group = NULL;
    group->next = graph->groups;
    graph->groups = group;
    *handle = group;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle)
{
    SimStream *on = stream;
    if (on->updating != NULL || on->capture != NULL) {
        return sim_fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "the stream is busy with an update or a capture");
    }
    on->updating = handle;
    on->updated = 0;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream)
{
    SimStream *on = stream;
    SimGroup *group = on->updating;
    on->updating = NULL;
    if (group == NULL || on->updated != group->count) {
        return sim_fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "the update launched %zu tasks, the group has %zu",
                        on->updated, group != NULL ? group->count : 0);
    }
    counters[2]++;
    return ACL_SUCCESS;
}

int32_t sim_stream_mode(void *stream)
{
    SimStream *on = stream;
    return on == NULL ? MODE_RUN : on->updating != NULL ? MODE_UPDATE : on->capture != NULL ? MODE_CAPTURE : MODE_RUN;
}

uint64_t sim_captured_graph(void *stream)
{
    SimStream *on = stream;
    return on != NULL && on->capture != NULL ? on->capture->id : 0;
}

/* Records a kernel in the capture, or puts it in the place of the group's next one. */
aclError sim_add_kernel(void *stream, int64_t kernel)
{
    SimStream *on = stream;
    if (on->updating != NULL) {
        if (on->updated >= on->updating->count) {
            return sim_fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "the update launched more tasks than its group has");
        }
        SimNode *node = on->updating->nodes[on->updated++];
        drop_kernel(node->kernel);
        node->kernel = kernel;
        return ACL_SUCCESS;
    }
    SimGraph *graph = on->capture;
    SimNode *node = sim_add_node(graph, NODE_KERNEL);
    node->kernel = kernel;
    SimGroup *group = graph->open_group;
    if (group != NULL) {
        group->nodes = grown(group->nodes, group->count, sizeof *group->nodes);
        group->nodes[group->count++] = node;
    }
    return ACL_SUCCESS;
}

static aclError run_node(const SimNode *node)
{
    switch (node->kind) {
    case NODE_KERNEL:
        return run_kernel(node->kernel) == 0 ? ACL_SUCCESS : ACL_ERROR_RT_INTERNAL_ERROR;
    case NODE_VALUE_WAIT:
        if (*(uint64_t *)node->destination != node->value) {
            return sim_fail(ACL_ERROR_RT_WAIT_TIMEOUT,
                            "replay would wait for ever: update() must come before each replay()");
        }
        return ACL_SUCCESS;
    case NODE_VALUE_WRITE:
        *(uint64_t *)node->destination = node->value;
        return ACL_SUCCESS;
    case NODE_COPY:
        memmove(node->destination, node->source, node->bytes);
        return ACL_SUCCESS;
    case NODE_FILL:
        memset(node->destination, (int)node->value, node->bytes);
        return ACL_SUCCESS;
    }
    return ACL_ERROR_RT_INTERNAL_ERROR;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream)
{
    (void)stream;
    SimGraph *graph = model;
    for (size_t i = 0; i < graph->count; i++) {
        aclError code = run_node(graph->nodes[i]);
        if (code != ACL_SUCCESS) {
            return code;
        }
    }
    counters[1]++;
    return ACL_SUCCESS;
}
