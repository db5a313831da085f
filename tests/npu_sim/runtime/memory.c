/* Device memory: one arena of host address space a device.
 *
 * An arena is never given back, so a graph that reads memory which has been freed reads poison or somebody else's
 * data instead of crashing the process: that is the fault a test wants to see. Memory is filled with 0xFF (NaN in
 * every float format) when it is handed out and when it is freed. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "sim.h"

#define GRAIN 512u
#define DEFAULT_MEMORY (1ll << 30)

typedef struct Block {
    char *start;
    size_t bytes;
    int used;
    struct Block *next;
} Block;

typedef struct {
    Block *blocks; /* sorted by address, without gaps */
    size_t limit;
    size_t used;
} Arena;

static Arena arenas[SIM_MAX_DEVICES];

static Block *new_block(char *start, size_t bytes, Block *next)
{
    Block *block = malloc(sizeof *block);
    if (block == NULL) {
        sim_die("no host memory for the block list");
    }
    *block = (Block){.start = start, .bytes = bytes, .used = 0, .next = next};
    return block;
}

/* Twice the limit of address space, so that fragmentation never fails before the limit does. */
static Arena *arena_of(int32_t device)
{
    Arena *arena = &arenas[device];
    if (arena->blocks == NULL) {
        arena->limit = (size_t)sim_setting("NPU_SIM_MEMORY_BYTES", DEFAULT_MEMORY);
        size_t span = (2 * arena->limit + GRAIN - 1) / GRAIN * GRAIN;
        void *base = mmap(NULL, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) {
            sim_die("cannot reserve address space for NPU_SIM_MEMORY_BYTES");
        }
        arena->blocks = new_block(base, span, NULL);
    }
    return arena;
}

static void *take(Arena *arena, size_t bytes)
{
    for (Block *block = arena->blocks; block != NULL; block = block->next) {
        if (block->used || block->bytes < bytes) {
            continue;
        }
        if (block->bytes > bytes) {
            block->next = new_block(block->start + bytes, block->bytes - bytes, block->next);
            block->bytes = bytes;
        }
        block->used = 1;
        arena->used += bytes;
        memset(block->start, 0xFF, bytes);
        return block->start;
    }
    return NULL;
}

static void absorb_next(Block *block)
{
    Block *next = block->next;
    if (next != NULL && !next->used && !block->used) {
        block->bytes += next->bytes;
        block->next = next->next;
        free(next);
    }
}

static int give_back(Arena *arena, void *pointer)
{
    Block *before = NULL;
    for (Block *block = arena->blocks; block != NULL; before = block, block = block->next) {
        if (block->start != pointer || !block->used) {
            continue;
        }
        memset(block->start, 0xFF, block->bytes);
        block->used = 0;
        arena->used -= block->bytes;
        absorb_next(block);
        if (before != NULL) {
            absorb_next(before);
        }
        return 1;
    }
    return 0;
}

/* Allowed during a capture: torch_npu's allocator calls it there without asking for the relaxed mode first. */
aclError aclrtMalloc(void **pointer, size_t bytes, aclrtMemMallocPolicy policy)
{
    (void)policy;
    int32_t device = sim_current_device();
    size_t rounded = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    pthread_mutex_lock(&sim_lock);
    Arena *arena = arena_of(device);
    size_t used = arena->used, limit = arena->limit;
    *pointer = used + rounded <= limit ? take(arena, rounded) : NULL;
    pthread_mutex_unlock(&sim_lock);
    if (*pointer == NULL) {
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d: %zu bytes wanted, %zu of %zu in use", device,
                        rounded, used, limit);
    }
    return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void **pointer, size_t bytes, aclrtMemMallocPolicy policy)
{
    return aclrtMalloc(pointer, bytes, policy);
}

aclError aclrtFree(void *pointer)
{
    int found = 0;
    pthread_mutex_lock(&sim_lock);
    for (int32_t device = 0; device < SIM_MAX_DEVICES && !found; device++) {
        found = give_back(&arenas[device], pointer);
    }
    pthread_mutex_unlock(&sim_lock);
    return found ? ACL_SUCCESS : sim_fail(ACL_ERROR_RT_MEMORY_FREE, "aclrtFree of %p, which is not allocated", pointer);
}

aclError aclrtMallocHost(void **pointer, size_t bytes)
{
    return posix_memalign(pointer, GRAIN, bytes > 0 ? bytes : GRAIN) == 0 ? ACL_SUCCESS
                                                                          : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

aclError aclrtFreeHost(void *pointer)
{
    free(pointer);
    return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total)
{
    (void)attribute;
    pthread_mutex_lock(&sim_lock);
    Arena *arena = arena_of(sim_current_device());
    *total = arena->limit;
    *free_bytes = arena->limit > arena->used ? arena->limit - arena->used : 0;
    pthread_mutex_unlock(&sim_lock);
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void *destination, size_t room, const void *source, size_t bytes, aclrtMemcpyKind kind)
{
    (void)kind;
    aclError unsafe = sim_check_unsafe("aclrtMemcpy");
    if (unsafe != ACL_SUCCESS) {
        return unsafe;
    }
    if (bytes > room) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpy of %zu bytes into %zu", bytes, room);
    }
    memmove(destination, source, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *destination, size_t room, const void *source, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream)
{
    (void)kind;
    SimStream *on = stream;
    if (bytes > room) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpyAsync of %zu bytes into %zu", bytes, room);
    }
    if (on != NULL && on->capture != NULL) {
        SimNode *node = sim_add_node(on->capture, NODE_COPY);
        node->destination = destination;
        node->source = source;
        node->bytes = bytes;
        return ACL_SUCCESS;
    }
    memmove(destination, source, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemset(void *destination, size_t room, int32_t value, size_t bytes)
{
    aclError unsafe = sim_check_unsafe("aclrtMemset");
    if (unsafe != ACL_SUCCESS) {
        return unsafe;
    }
    if (bytes > room) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset of %zu bytes into %zu", bytes, room);
    }
    memset(destination, value, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *destination, size_t room, int32_t value, size_t bytes, aclrtStream stream)
{
    SimStream *on = stream;
    if (bytes > room) {
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemsetAsync of %zu bytes into %zu", bytes, room);
    }
    if (on != NULL && on->capture != NULL) {
        SimNode *node = sim_add_node(on->capture, NODE_FILL);
        node->destination = destination;
        node->value = (uint64_t)value;
        node->bytes = bytes;
        return ACL_SUCCESS;
    }
    memset(destination, value, bytes);
    return ACL_SUCCESS;
}

/* A test narrows the memory of a running process with this; what is in use already stays. */
void sim_set_memory_limit(int32_t device, uint64_t bytes)
{
    pthread_mutex_lock(&sim_lock);
    arena_of(device)->limit = (size_t)bytes;
    pthread_mutex_unlock(&sim_lock);
}

uint64_t sim_memory_limit(int32_t device)
{
    pthread_mutex_lock(&sim_lock);
    uint64_t limit = arena_of(device)->limit;
    pthread_mutex_unlock(&sim_lock);
    return limit;
}

uint64_t sim_used_memory(int32_t device)
{
    pthread_mutex_lock(&sim_lock);
    uint64_t used = arena_of(device)->used;
    pthread_mutex_unlock(&sim_lock);
    return used;
}
