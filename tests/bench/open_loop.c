/* Requests to a server on 127.0.0.1, each due at a time of its own, over some connections that are kept open.
 *
 * The latency of a request counts from its due time, so waiting for a free connection is part of it: a slow server is
 * not spared the requests that come meanwhile.
 *
 *   open_loop http|redis|postgresql PORT CONNECTIONS MESSAGES DUE START RESULT
 *
 * MESSAGES  file: a length (uint32) and so many bytes for each; the first greets on each new connection (empty: no
 *           greeting), the others are the requests, sent in turns
 * DUE       file: seconds after START (double), ascending, one for each request that is sent
 * START     seconds on CLOCK_MONOTONIC
 * RESULT    file: seconds from due to the whole answer (float), one for each request; negative: it failed, or had no
 *           answer PATIENCE_S after the last one was due */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { ANSWER_MAX = 1 << 20, EVENTS = 128, TIMER = -1 };
enum state { PARTIAL, GOOD, BAD };
static const double PATIENCE_S = 20.0;

struct message { char *bytes; uint32_t size; };
struct link { int fd; long request; size_t size; char answer[ANSWER_MAX]; };

static enum state (*parse)(const char *, const char *);
static int port, poller;
static struct message *messages;
static long message_count;

static double now_s(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

/* The line's end after "at"; NULL: it is not there yet. */
static const char *end_of_line(const char *at, const char *end) {
    return at < end ? memmem(at, end - at, "\r\n", 2) : NULL;
}

static enum state parse_http(const char *at, const char *end) {
    const char *line = end_of_line(at, end);
    if (!line) return PARTIAL;
    enum state whole = line - at >= 12 && at[9] == '2' ? GOOD : BAD;
    unsigned long length = 0;
    int is_chunked = 0;
    for (at = line + 2; (line = end_of_line(at, end)) && line > at; at = line + 2) {
        if (!strncasecmp(at, "content-length:", 15)) length = strtoul(at + 15, NULL, 10);
        if (!strncasecmp(at, "transfer-encoding: chunked", 26)) is_chunked = 1;
    }
    if (!line) return PARTIAL;
    at = line + 2;
    if (!is_chunked) return (unsigned long)(end - at) >= length ? whole : PARTIAL;
    while ((line = end_of_line(at, end))) {
        length = strtoul(at, NULL, 16);
        if ((unsigned long)(end - line) < length + 4) return PARTIAL;
        at = line + length + 4;
        if (!length) return whole;
    }
    return PARTIAL;
}

/* The end of one value of Redis; NULL: it is not whole. */
static const char *skip_value(const char *at, const char *end, int *failed) {
    const char *line = end_of_line(at, end);
    if (!line) return NULL;
    long number = strtol(at + 1, NULL, 10);
    const char kind = *at;
    at = line + 2;
    if (kind == '-') *failed = 1;
    if (kind == '$' && number >= 0) return end - at >= number + 2 ? at + number + 2 : NULL;
    for (; kind == '*' && number > 0 && at; number--) at = skip_value(at, end, failed);
    return at;
}

static enum state parse_redis(const char *at, const char *end) {
    int failed = 0;
    return !skip_value(at, end, &failed) ? PARTIAL : failed ? BAD : GOOD;
}

static enum state parse_postgresql(const char *at, const char *end) {
    enum state whole = GOOD;
    while (end - at >= 5) {
        uint32_t size;
        memcpy(&size, at + 1, sizeof size);
        size = ntohl(size);
        if (end - at < 1 + (long)size) return PARTIAL;
        if (*at == 'E') whole = BAD;
        if (*at == 'Z') return whole; /* ready for the next query */
        at += 1 + size;
    }
    return PARTIAL;
}

static char *read_file(const char *path, size_t *size) {
    struct stat about;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &about)) err(1, "%s", path);
    char *bytes = malloc(about.st_size + 1);
    if (!bytes || read(fd, bytes, about.st_size) != about.st_size) err(1, "%s", path);
    close(fd);
    *size = about.st_size;
    return bytes;
}

static void read_messages(const char *path) {
    size_t size;
    char *bytes = read_file(path, &size), *end = bytes + size;
    while (bytes < end) {
        messages = realloc(messages, (message_count + 1) * sizeof *messages);
        struct message *each = &messages[message_count++];
        memcpy(&each->size, bytes, sizeof each->size);
        each->bytes = bytes + sizeof each->size;
        bytes = each->bytes + each->size;
    }
    if (message_count < 2) errx(1, "%s has no requests", path);
}

/* Connect, greet and wait for the answer to that. */
static void open_link(struct link *link, int number) {
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(port)};
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    link->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (link->fd < 0 || connect(link->fd, (struct sockaddr *)&server, sizeof server)) err(1, "port %d", port);
    int on = 1;
    setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    link->request = -1;
    link->size = 0;
    if (messages[0].size) {
        if (send(link->fd, messages[0].bytes, messages[0].size, MSG_NOSIGNAL) < 0) err(1, "greeting");
        enum state state;
        while ((state = parse(link->answer, link->answer + link->size)) == PARTIAL) {
            ssize_t got = read(link->fd, link->answer + link->size, ANSWER_MAX - link->size);
            if (got <= 0) err(1, "no answer to the greeting");
            link->size += got;
        }
        if (state == BAD) errx(1, "greeting refused: %.*s", (int)link->size, link->answer);
        link->size = 0;
    }
    fcntl(link->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = number};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, link->fd, &event)) err(1, "epoll");
}

static void reopen_link(struct link *link, int number) {
    close(link->fd);
    open_link(link, number);
}

/* Read what is there; PARTIAL also where an idle connection has nothing to say. */
static enum state read_answer(struct link *link, int *is_broken) {
    ssize_t got = read(link->fd, link->answer + link->size, ANSWER_MAX - link->size);
    *is_broken = !got || (got < 0 && errno != EAGAIN);
    if (*is_broken) return BAD;
    if (got < 0 || link->request < 0) return PARTIAL;
    link->size += got;
    return parse(link->answer, link->answer + link->size);
}

/* Wake up at this time of CLOCK_MONOTONIC; 0: not at all. */
static void set_timer(int timer, double at_s) {
    struct itimerspec when = {.it_value = {(time_t)at_s, (long)((at_s - (time_t)at_s) * 1e9)}};
    if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL)) err(1, "timer");
}

int main(int argc, char **argv) {
    if (argc != 8) errx(2, "see the beginning of the source");
    parse = !strcmp(argv[1], "http") ? parse_http : !strcmp(argv[1], "redis") ? parse_redis : parse_postgresql;
    port = atoi(argv[2]);
    int link_count = atoi(argv[3]);
    read_messages(argv[4]);
    size_t size;
    const double *due_s = (double *)read_file(argv[5], &size);
    const long total = size / sizeof *due_s;
    const double start_s = atof(argv[6]), give_up_s = start_s + PATIENCE_S + (total ? due_s[total - 1] : 0.0);

    float *result = calloc(total + 1, sizeof *result);
    struct link *links = calloc(link_count, sizeof *links);
    int *idle = calloc(link_count, sizeof *idle), idle_count = 0;
    poller = epoll_create1(EPOLL_CLOEXEC);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event ticks = {.events = EPOLLIN, .data.fd = TIMER};
    if (!result || !links || !idle || epoll_ctl(poller, EPOLL_CTL_ADD, timer, &ticks)) err(1, "start");
    for (int number = 0; number < link_count; number++) {
        open_link(&links[number], number);
        idle[idle_count++] = number;
    }

    long sent = 0, answered = 0;
    while (answered < total && now_s() < give_up_s) {
        while (idle_count && sent < total && start_s + due_s[sent] <= now_s()) {
            int number = idle[--idle_count];
            const struct message *message = &messages[1 + sent % (message_count - 1)];
            links[number].request = sent++;
            links[number].size = 0;
            if (send(links[number].fd, message->bytes, message->size, MSG_NOSIGNAL) != (ssize_t)message->size)
                shutdown(links[number].fd, SHUT_RDWR); /* seen below as an end without an answer */
        }
        set_timer(timer, idle_count && sent < total ? start_s + due_s[sent] : give_up_s);
        struct epoll_event events[EVENTS];
        int count = epoll_wait(poller, events, EVENTS, -1);
        for (int i = 0; i < count; i++) {
            int number = events[i].data.fd, is_broken;
            if (number == TIMER) {
                uint64_t ignored;
                if (read(timer, &ignored, sizeof ignored) < 0 && errno != EAGAIN) err(1, "timer");
                continue;
            }
            struct link *link = &links[number];
            enum state state = read_answer(link, &is_broken);
            if (state == PARTIAL) continue;
            if (link->request >= 0) {
                float took_s = now_s() - start_s - due_s[link->request];
                result[link->request] = state == GOOD ? took_s : -took_s;
                answered++;
                idle[idle_count++] = number;
            }
            link->request = -1;
            if (is_broken) reopen_link(link, number);
        }
    }
    for (long each = 0; each < total; each++)
        if (result[each] == 0.0f) result[each] = -(float)(now_s() - start_s - due_s[each]);
    int fd = open(argv[7], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, result, total * sizeof *result) != (ssize_t)(total * sizeof *result)) err(1, "%s", argv[7]);
    return 0;
}
