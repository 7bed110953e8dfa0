/* The floor of the agent's cost: pread the counters of each cgroup from held descriptors, nothing else.
 * usage: floor ROUNDS PERIOD_US < list of counter files, one a line; prints the mean nanoseconds of CPU per file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 10, period_us = argc > 2 ? atoi(argv[2]) : 1000000;
    int count = 0, capacity = 1024;
    int *fds = malloc(sizeof(int) * capacity);
    char line[4096], buffer[1024];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (count == capacity) fds = realloc(fds, sizeof(int) * (capacity *= 2));
        if ((fds[count++] = open(line, O_RDONLY | O_CLOEXEC)) < 0) { perror(line); return 1; }
    }
    struct timespec from, to;
    double total_ns = 0;
    for (int round = 0; round < rounds; round++) {
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
        for (int i = 0; i < count; i++)
            if (pread(fds[i], buffer, sizeof buffer, 0) < 0) { perror("pread"); return 1; }
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
        total_ns += (to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec);
        usleep(period_us);
    }
    printf("%.1f\n", total_ns / rounds / count);
    return 0;
}
