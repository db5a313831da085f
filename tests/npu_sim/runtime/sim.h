/* Shared declarations of the simulated Ascend runtime: host memory, streams, events and graph calls.
 *
 * The functions whose names begin with "acl" have the names and signatures that torch_npu links against; the wheel's
 * own headers declare them, so the compiler checks every signature. The functions whose names begin with "sim_" are
 * for the Python side. Everything runs synchronously, on the thread that calls. */
#ifndef NPU_SIM_H
#define NPU_SIM_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"
#include "acl/error_codes/rt_error_codes.h"

#define SIM_MAX_DEVICES 16

typedef struct SimNode SimNode;
typedef struct SimGroup SimGroup;
typedef struct SimGraph SimGraph;

typedef struct SimStream {
    int32_t id;
    int32_t device;
    SimGraph *capture;  /* the graph that records this stream, or NULL */
    SimGroup *updating; /* the task group that this stream rewrites, or NULL */
    size_t updated;     /* tasks of that group rewritten so far */
    struct SimStream *next;
} SimStream;

typedef struct SimEvent {
    uint64_t capture_id; /* the capture that recorded it, 0 = none */
} SimEvent;

enum SimNodeKind { NODE_KERNEL, NODE_VALUE_WAIT, NODE_VALUE_WRITE, NODE_COPY, NODE_FILL };

struct SimNode {
    enum SimNodeKind kind;
    int64_t kernel; /* the Python side's number of the recorded operator call */
    void *destination;
    const void *source;
    size_t bytes;
    uint64_t value; /* what is waited for, written, or filled in */
};

struct SimGroup {
    SimNode **nodes;
    size_t count;
    SimGroup *next;
};

struct SimGraph {
    uint64_t id;
    int32_t device;
    aclmdlRICaptureMode mode;
    pthread_t owner;
    SimStream *origin;
    int broken; /* an illegal call ended the capture */
    SimNode **nodes;
    size_t count;
    SimGroup *groups;
    SimGroup *open_group;
    SimGraph *next; /* list of the captures in progress */
};

extern pthread_mutex_t sim_lock;

aclError sim_fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
void sim_die(const char *message) __attribute__((noreturn));

/* device.c */
int32_t sim_current_device(void);
int32_t sim_device_count(void);
int64_t sim_setting(const char *name, int64_t otherwise);

/* stream.c */
aclError sim_take_stream(int32_t device, const char *what);
void sim_give_stream(int32_t device);
void sim_leave_capture(SimGraph *graph);

/* graph.c */
SimNode *sim_add_node(SimGraph *graph, enum SimNodeKind kind);
SimGraph *sim_active_capture(uint64_t id);
aclError sim_check_unsafe(const char *what);

#endif
