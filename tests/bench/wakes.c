/* One process in each cgroup that wakes up in each enforcement period and does next to nothing, until this one ends:
 * the counters of periods go on, as those of working jobs do.
 * usage: wakes PERIOD_US < lines of cgroup.procs files, those of one job on one line, blanks between them; prints a
 * line when all are there. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int period_us = argc > 1 ? atoi(argv[1]) : 100000;
    static char line[16384];
    int ready[2];
    if (pipe(ready)) return 1;
    int jobs = 0;
    for (; fgets(line, sizeof line, stdin); jobs++) {
        line[strcspn(line, "\n")] = 0;
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (char *path = strtok(line, " "); path; path = strtok(NULL, " ")) {
                FILE *file = fopen(path, "w");
                if (!file || fputs("0", file) < 0 || fclose(file)) { perror(path); return 1; }
            }
            if (write(ready[1], "x", 1) != 1) return 1;
            for (;;) usleep(period_us);
        }
    }
    for (char byte; jobs > 0; jobs--)
        if (read(ready[0], &byte, 1) != 1) return 1;
    puts("ready");
    fflush(stdout);
    pause();
    return 0;
}
