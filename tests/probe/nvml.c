/* A stand-in for libnvidia-ml.so.1 that is driven by the variable FAKE_NVML: one word per GPU,

     GPU-a            a GPU without MIG
     GPU-b:           one that could have MIG, off
     GPU-c:MIG-1,-    one under MIG: an instance in the first slot, nothing in the second
     lost             one that fell off the bus

   and `nodriver` alone for a library without a driver. */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
enum { LONGEST = 96, MOST = 16 };

typedef struct { char uuid[LONGEST]; int can_mig, slots; char mig[MOST][LONGEST]; } Gpu;
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

int nvmlInitWithFlags(unsigned flags) {
    const char *variable = getenv("FAKE_NVML");
    char *text = strdup(variable ? variable : ""), *rest = NULL;
    (void)flags;
    count = 0;
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
