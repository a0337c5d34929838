/* A stand-in for a phone's libcdsprpc.so: the functions that the QNN provider takes from it, on memfds.

   Every call is a line of the file named by CDSPRPC_LOG. Tests say through the standin_ functions which allocations are
   refused, and ask what was not returned. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST 4096

static struct mapping {
    void *address;
    size_t size;
    int fd;
} mappings[MOST]; /* address 0: free */
static size_t refuse_above = (size_t)-1;
static int refuse_from, refuse_count, allocations, without_fd, strays;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void say(const char *format, ...) {
    const char *name = getenv("CDSPRPC_LOG");
    FILE *log = name ? fopen(name, "a") : NULL;
    va_list values;
    if (!log) return;
    va_start(values, format);
    vfprintf(log, format, values);
    va_end(values);
    fclose(log);
}

/* Refuses allocations of more than `bytes`, and `count` allocations beginning with the n-th from now on. */
void standin_refuse(size_t bytes, int nth, int count) {
    refuse_above = bytes;
    refuse_from = allocations + nth;
    refuse_count = count;
}

/* No mapping has a descriptor. */
void standin_without_descriptors(int yes) { without_fd = yes; }

int standin_mappings(void) {
    int count = 0;
    for (int i = 0; i < MOST; i++) count += mappings[i].address != NULL;
    return count;
}

size_t standin_bytes(void) {
    size_t bytes = 0;
    for (int i = 0; i < MOST; i++)
        if (mappings[i].address) bytes += mappings[i].size;
    return bytes;
}

/* Addresses that were freed and are none. */
int standin_strays(void) { return strays; }

void *rpcmem_alloc2(int heap, unsigned flags, size_t size) {
    void *address = NULL;
    int fd = -1, slot = 0;
    pthread_mutex_lock(&lock);
    allocations++;
    while (slot < MOST && mappings[slot].address) slot++;
    int unlucky = allocations >= refuse_from && allocations - refuse_from < refuse_count;
    if (size == 0 || size > refuse_above || unlucky || slot == MOST) {
        say("refused %zu\n", size);
    } else if ((fd = memfd_create("rpcmem", MFD_CLOEXEC)) >= 0) {
        if (!ftruncate(fd, (off_t)size)) address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (!address || address == MAP_FAILED) {
            close(fd);
            address = NULL;
        } else {
            mappings[slot] = (struct mapping){address, size, fd};
            say("alloc %p %zu heap %d flags %u\n", address, size, heap, flags);
        }
    }
    pthread_mutex_unlock(&lock);
    return address;
}

void *rpcmem_alloc(int heap, unsigned flags, int size) { return size < 0 ? NULL : rpcmem_alloc2(heap, flags, (size_t)size); }

void rpcmem_free(void *address) {
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < MOST && (!address || mappings[i].address != address)) i++;
    if (i == MOST) {
        strays++;
        say("stray %p\n", address);
    } else {
        munmap(address, mappings[i].size);
        close(mappings[i].fd);
        mappings[i].address = NULL;
        say("free %p\n", address);
    }
    pthread_mutex_unlock(&lock);
}

int rpcmem_to_fd(void *address) {
    int fd = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (mappings[i].address == address && address && !without_fd) fd = mappings[i].fd;
    pthread_mutex_unlock(&lock);
    say("to_fd %p %d\n", address, fd);
    return fd;
}

void remote_register_buf_attr2(void *address, size_t size, int fd, int attributes) {
    say("register %p %zu %d %d\n", address, size, fd, attributes);
}

void remote_register_buf_attr(void *address, int size, int fd, int attributes) {
    remote_register_buf_attr2(address, (size_t)size, fd, attributes);
}

void remote_register_buf(void *address, int size, int fd) { remote_register_buf_attr2(address, (size_t)size, fd, 0); }
