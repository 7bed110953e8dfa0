/* Spikes on one core. usage: burst [cgroup.procs...]; then on each line of stdin "SECONDS" of CPU to burn at once;
 * prints "BEGIN END" on the monotonic clock for each. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "w");
        if (!file || fputs("0", file) < 0 || fclose(file)) { perror(argv[i]); return 1; }
    }
    puts("ready");
    fflush(stdout);
    char line[100];
    while (fgets(line, sizeof line, stdin)) {
        double begin = now(CLOCK_MONOTONIC), until = now(CLOCK_PROCESS_CPUTIME_ID) + atof(line);
        while (now(CLOCK_PROCESS_CPUTIME_ID) < until)
            ;
        printf("%.6f %.6f\n", begin, now(CLOCK_MONOTONIC));
        fflush(stdout);
    }
    return 0;
}
