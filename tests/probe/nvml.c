/* A stand-in for libnvidia-ml.so.1. The variable FAKE_NVML names the GPUs, one word each:

     GPU-a            a GPU without MIG
     GPU-b:           one that could have MIG, off
     GPU-c:MIG-1,-    one under MIG: an instance in the first slot, nothing in the second
     lost             one that fell off the bus

   and `nodriver` alone stands for a library without a driver. The file FAKE_NVML_READINGS, read anew at every call, says
   what they read, in NVML's units; what it does not name is not supported:

     GPU-a util 37 12              GPU-a memory 5000000         GPU-a power 250000        GPU-a energy step:500:100
     GPU-a clock 1980 2619         GPU-a temperature 40         GPU-a throttle 4          GPU-a pcie 100 200
     GPU-a process 1234 6000000    GPU-a process 77 none        GPU-b util spike:60:1000  * init block

   A value is a number, `none`, `step:BY:MS` (grows by BY every MS), `spike:MS:EVERY` (100 for the first MS of EVERY), or
   in place of one: `unsupported`, `lost`, `block` (the call never returns). Times are those of CLOCK_MONOTONIC. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
enum { LONGEST = 96, MOST = 16, KEPT_BY_DRIVER = 1000 };
typedef unsigned long long u64;

typedef struct { char uuid[LONGEST]; int can_mig, slots; char mig[MOST][LONGEST]; } Gpu;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory2;
typedef struct { u64 total, free, used; } Memory1;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;
static Gpu gpus[MOST];
static int count;

static void read_gpu(Gpu *gpu, char *word) {
    char *colon = strchr(word, ':'), *rest = NULL;
    memset(gpu, 0, sizeof *gpu);
    gpu->can_mig = colon != NULL;
    if (colon) *colon = 0;
    strncpy(gpu->uuid, word, LONGEST - 1);
    for (char *slot = colon ? strtok_r(colon + 1, ",", &rest) : NULL; slot; slot = strtok_r(NULL, ",", &rest))
        strncpy(gpu->mig[gpu->slots++], slot, LONGEST - 1);
}

static int value_of(const char *word, u64 *value) {
    struct timespec now;
    u64 a, b, ms;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ms = now.tv_sec * 1000ull + now.tv_nsec / 1000000;
    if (!strcmp(word, "unsupported")) return NOT_SUPPORTED;
    if (!strcmp(word, "lost")) return GPU_IS_LOST;
    while (!strcmp(word, "block")) pause();
    if (!strcmp(word, "none")) *value = -1; /* NVML_VALUE_NOT_AVAILABLE */
    else if (sscanf(word, "step:%llu:%llu", &a, &b) == 2) *value = ms / b * a;
    else if (sscanf(word, "spike:%llu:%llu", &a, &b) == 2) *value = ms % b < a ? 100 : 0;
    else *value = strtoull(word, NULL, 10);
    return OK;
}

/* Find the nth line on a counter, and its values. */
static int reading(const void *handle, const char *counter, int nth, u64 *first, u64 *second) {
    const char *path = getenv("FAKE_NVML_READINGS");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], uuid[LONGEST], name[32], one[64], two[64];
    int code = NOT_SUPPORTED;
    while (file && fgets(line, sizeof line, file)) {
        int words = sscanf(line, "%95s %31s %63s %63s", uuid, name, one, two);
        if (words < 3 || strcmp(uuid, handle) || strcmp(name, counter) || nth--) continue;
        code = value_of(one, first);
        if (!code && second && words == 4) code = value_of(two, second);
        break;
    }
    if (file) fclose(file);
    return code;
}

static int read_unsigned(void *handle, const char *counter, int second, unsigned *answer) {
    u64 values[2] = {0, 0};
    int code = reading(handle, counter, 0, &values[0], &values[1]);
    *answer = values[second];
    return code;
}

int nvmlInitWithFlags(unsigned flags) {
    const char *variable = getenv("FAKE_NVML");
    char *text = strdup(variable ? variable : ""), *rest = NULL;
    u64 ignored;
    (void)flags;
    count = 0;
    reading("*", "init", 0, &ignored, NULL);
    if (!strcmp(text, "nodriver")) return DRIVER_NOT_LOADED;
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) read_gpu(&gpus[count++], word);
    free(text);
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stand-in"; }
int nvmlDeviceGetCount_v2(unsigned *answer) { *answer = count; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &gpus[index];
    return strcmp(gpus[index].uuid, "lost") ? OK : GPU_IS_LOST;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    for (int i = 0; i < count; i++) {
        if (!strcmp(gpus[i].uuid, uuid)) return *handle = &gpus[i], OK;
        for (int slot = 0; slot < gpus[i].slots; slot++)
            if (!strcmp(gpus[i].mig[slot], uuid)) return *handle = gpus[i].mig[slot], OK;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(void *handle, char *answer, unsigned length) { /* a UUID begins both a Gpu and a slot */
    strncpy(answer, (char *)handle, length);
    return OK;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    Gpu *gpu = handle;
    *current = *pending = gpu->slots > 0;
    return gpu->can_mig ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *answer) { *answer = ((Gpu *)handle)->slots; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **answer) {
    Gpu *gpu = handle;
    *answer = gpu->mig[index];
    return strcmp(gpu->mig[index], "-") ? OK : NOT_FOUND;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned rates[2]) {
    read_unsigned(handle, "util", 1, &rates[1]);
    return read_unsigned(handle, "util", 0, &rates[0]);
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, Memory2 *answer) {
    answer->reserved = KEPT_BY_DRIVER;
    return reading(handle, "memory", 0, &answer->used, &answer->total);
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory1 *answer) {
    int code = reading(handle, "memory", 0, &answer->used, &answer->total);
    answer->used += KEPT_BY_DRIVER;
    return code;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *length, Process *answer) {
    u64 pid, used, room = *length;
    int code;
    for (*length = 0; !(code = reading(handle, "process", *length, &pid, &used)); ++*length)
        if (answer && *length < room) answer[*length] = (Process){.pid = pid, .used = used};
    if (code != NOT_SUPPORTED) return code;
    return *length > room ? TOO_SMALL : OK;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *mw) { return read_unsigned(handle, "power", 0, mw); }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, u64 *mj) { return reading(handle, "energy", 0, mj, NULL); }
int nvmlDeviceGetClockInfo(void *handle, int which, unsigned *mhz) { return read_unsigned(handle, "clock", which == 2, mhz); }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *c) {
    return read_unsigned(handle, "temperature", sensor, c);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, u64 *mask) { return reading(handle, "throttle", 0, mask, NULL); }
int nvmlDeviceGetPcieThroughput(void *handle, int which, unsigned *kb_per_s) {
    usleep(20000);
    return read_unsigned(handle, "pcie", which, kb_per_s);
}
