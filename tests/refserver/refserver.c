/* A server whose timing is known, to judge load generators; it computes nothing and judges nothing.
 *
 * It speaks the streaming part of vLLM's API. Token k of a request is written at arrival + T1 + k * T2, or, with
 * `--mode batch`, on a grid of T2 that all streams share, like the steps of an engine. Deadlines are absolute, so nothing
 * drifts. One thread: epoll and a heap of deadlines; it sleeps until SPIN before a deadline and then spins. What it says
 * about a request is written to the log at the end: one CSV row a request, times on CLOCK_MONOTONIC taken just before
 * the write.
 *
 *     refserver --port P [--t1 MS] [--t2 MS] [--mode phase|batch] [--fail-every N] [--stall-after S --stall-for S]
 *               [--log FILE] [--spin US] [--model NAME]
 *
 * A request may set its own times with the headers x-ref-t1-us and x-ref-t2-us, and name itself with an integer `"user"`
 * in its body. --fail-every N: of N requests, number N/4 gets HTTP 500, N/2 a closed connection in mid-stream, 3N/4 an
 * `error` object inside its 200. --stall-after: seconds after the first request the whole server stands still.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum kind { OK, HTTP_500, DISCONNECT, STREAM_ERROR, ABORTED };
static const char *const KIND_NAMES[] = {"ok", "http-error", "early-close", "stream-error", "client-abort"};

struct record { /* one generation request, kept for the log */
    int64_t first_byte_ns, arrival_ns;
    long user;
    size_t body_bytes;
    int prompt_tokens, tokens, sent, chat;
    enum kind kind;
    int32_t *written_us; /* after arrival, one a token */
};

struct connection {
    int fd;
    int heap_position; /* -1: no deadline */
    int waits_for_room;
    char *in;
    size_t in_length, in_capacity;
    char *out; /* what the kernel did not take yet */
    size_t out_length, out_capacity;
    int64_t first_byte_ns, due_ns, t2_ns;
    int wants_usage, active;
    char token[768]; /* the chunk of every token but the last */
    int token_length;
    struct record record;
};

static int64_t option_t1_ns = 50000000, option_t2_ns = 20000000, option_spin_ns = 80000;
static int64_t option_stall_after_ns, option_stall_for_ns;
static int option_batch, option_fail_every, option_port = 8200;
static const char *option_model = "reference", *option_log;

static struct connection **heap;
static int heap_length, heap_capacity;
static struct record *records;
static size_t record_count, record_capacity;
static unsigned long requests_seen, tokens_written;
static int epoll_fd, active_requests;
static int64_t stall_at_ns;
static long created;
static volatile sig_atomic_t stopping;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *grown(void *memory, size_t bytes) {
    memory = realloc(memory, bytes);
    if (!memory) {
        perror("realloc");
        exit(1);
    }
    return memory;
}

/* --- the heap of deadlines --- */

static void heap_put(int i, struct connection *c) {
    heap[i] = c;
    c->heap_position = i;
}

static void heap_up(int i) {
    struct connection *c = heap[i];
    for (int parent; i > 0 && heap[parent = (i - 1) / 2]->due_ns > c->due_ns; i = parent)
        heap_put(i, heap[parent]);
    heap_put(i, c);
}

static void heap_down(int i) {
    struct connection *c = heap[i];
    for (int child; (child = 2 * i + 1) < heap_length; i = child) {
        if (child + 1 < heap_length && heap[child + 1]->due_ns < heap[child]->due_ns)
            child++;
        if (heap[child]->due_ns >= c->due_ns)
            break;
        heap_put(i, heap[child]);
    }
    heap_put(i, c);
}

static void heap_push(struct connection *c) {
    if (heap_length == heap_capacity) {
        heap_capacity = heap_capacity ? 2 * heap_capacity : 256;
        heap = grown(heap, heap_capacity * sizeof *heap);
    }
    heap_put(heap_length, c);
    heap_up(heap_length++);
}

static void heap_remove(struct connection *c) {
    int i = c->heap_position;
    struct connection *last = heap[--heap_length];
    c->heap_position = -1;
    if (last != c) {
        heap_put(i, last);
        heap_up(i);
        heap_down(last->heap_position);
    }
}

/* --- connections --- */

static void watch(struct connection *c, int operation, uint32_t events) {
    struct epoll_event event = {events, {.ptr = c}};
    epoll_ctl(epoll_fd, operation, c->fd, &event);
}

static void finish(struct connection *c, enum kind kind) {
    if (c->heap_position >= 0)
        heap_remove(c);
    if (!c->active)
        return;
    c->active = 0;
    active_requests--;
    c->record.kind = kind;
    if (record_count == record_capacity) {
        record_capacity = record_capacity ? 2 * record_capacity : 4096;
        records = grown(records, record_capacity * sizeof *records);
    }
    records[record_count++] = c->record;
}

static void drop(struct connection *c, enum kind kind) {
    finish(c, kind);
    close(c->fd);
    c->fd = -1; /* the struct stays: later events of this round may still name it */
}

static void put(struct connection *c, const char *data, size_t length) {
    if (!c->out_length) {
        ssize_t sent = send(c->fd, data, length, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN)
            return; /* the reading side will see the closed connection */
        if (sent > 0) {
            data += sent;
            length -= sent;
        }
    }
    if (!length)
        return;
    if (c->out_length + length > c->out_capacity) {
        c->out_capacity = 2 * (c->out_length + length);
        c->out = grown(c->out, c->out_capacity);
    }
    memcpy(c->out + c->out_length, data, length);
    c->out_length += length;
    if (!c->waits_for_room) {
        watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
        c->waits_for_room = 1;
    }
}

static void put_rest(struct connection *c) {
    ssize_t sent = send(c->fd, c->out, c->out_length, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
        memmove(c->out, c->out + sent, c->out_length - sent);
        c->out_length -= sent;
    }
    if (!c->out_length) {
        watch(c, EPOLL_CTL_MOD, EPOLLIN);
        c->waits_for_room = 0;
    }
}

/* --- answers --- */

static int http_chunk(char *to, const char *data, int length) {
    int n = sprintf(to, "%x\r\n", length);
    memcpy(to + n, data, length);
    memcpy(to + n + length, "\r\n", 2);
    return n + length + 2;
}

static int token_event(char *to, int chat, const char *finish_reason) {
    char event[700];
    int n;
    if (chat)
        n = sprintf(event,
                    "data: {\"id\":\"chatcmpl-%032lx\",\"object\":\"chat.completion.chunk\",\"created\":%ld,\"model\":\"%s\","
                    "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" the\"},\"logprobs\":null,\"finish_reason\":%s,"
                    "\"token_ids\":null}]}\n\n",
                    requests_seen, created, option_model, finish_reason);
    else
        n = sprintf(event,
                    "data: {\"id\":\"cmpl-%032lx\",\"object\":\"text_completion\",\"created\":%ld,\"model\":\"%s\","
                    "\"choices\":[{\"index\":0,\"text\":\" the\",\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null,"
                    "\"token_ids\":null,\"prompt_logprobs\":null,\"prompt_token_ids\":null}],\"usage\":null}\n\n",
                    requests_seen, created, option_model, finish_reason);
    return http_chunk(to, event, n);
}

static int role_event(char *to) {
    char event[700];
    int n = sprintf(event,
                    "data: {\"id\":\"chatcmpl-%032lx\",\"object\":\"chat.completion.chunk\",\"created\":%ld,\"model\":\"%s\","
                    "\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                    "\"finish_reason\":null}],\"prompt_token_ids\":null}\n\n",
                    requests_seen, created, option_model);
    return http_chunk(to, event, n);
}

static int end_of_stream(char *to) {
    return sprintf(to, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
}

static int usage_event(char *to, const struct record *r) {
    char event[700];
    int n = sprintf(event,
                    "data: {\"id\":\"cmpl-%032lx\",\"object\":\"%s\",\"created\":%ld,\"model\":\"%s\",\"choices\":[],"
                    "\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d}}\n\n",
                    requests_seen, r->chat ? "chat.completion.chunk" : "text_completion", created, option_model,
                    r->prompt_tokens, r->prompt_tokens + r->tokens, r->tokens);
    return http_chunk(to, event, n);
}

static void put_whole(struct connection *c, const char *status, const char *body) {
    char answer[2048];
    int n = snprintf(answer, sizeof answer,
                     "HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: application/json\r\n\r\n%s",
                     status, strlen(body), body);
    put(c, answer, n);
}

/* The deadline of a connection has come: write its next token. */
static void fire(struct connection *c) {
    struct record *r = &c->record;
    char out[3072];
    int n = 0;
    if (r->kind == DISCONNECT && r->sent >= r->tokens / 2) {
        drop(c, DISCONNECT);
        return;
    }
    if (r->kind == STREAM_ERROR && r->sent >= r->tokens / 2) {
        static const char event[] = "data: {\"error\":{\"message\":\"EngineCore encountered an issue.\","
                                    "\"type\":\"InternalServerError\",\"param\":null,\"code\":500}}\n\n";
        n = http_chunk(out, event, sizeof event - 1);
        n += end_of_stream(out + n);
        put(c, out, n);
        finish(c, STREAM_ERROR);
        return;
    }
    int last = r->sent + 1 == r->tokens;
    if (!r->sent && r->chat)
        n = role_event(out);
    if (last) {
        n += token_event(out + n, r->chat, "\"length\"");
    } else {
        memcpy(out + n, c->token, c->token_length);
        n += c->token_length;
    }
    r->written_us[r->sent++] = (now_ns() - r->arrival_ns) / 1000;
    tokens_written++;
    put(c, out, n);
    if (!last) {
        c->due_ns += c->t2_ns;
        heap_down(c->heap_position);
        return;
    }
    n = c->wants_usage ? usage_event(out, r) : 0;
    n += end_of_stream(out + n);
    put(c, out, n);
    finish(c, OK);
}

/* --- requests --- */

static const char *value_of(const char *body, size_t length, const char *name) {
    char quoted[64];
    const char *end = body + length;
    const char *at = memmem(body, length, quoted, sprintf(quoted, "\"%s\"", name));
    if (!at)
        return NULL;
    for (at += strlen(quoted); at < end && (*at == ' ' || *at == ':' || *at == '"'); at++)
        ;
    return at < end ? at : NULL;
}

static long number_of(const char *body, size_t length, const char *name, long otherwise) {
    const char *at = value_of(body, length, name);
    return at && *at >= '0' && *at <= '9' ? atol(at) : otherwise;
}

static int is_true(const char *body, size_t length, const char *name) {
    const char *at = value_of(body, length, name);
    return at && *at == 't';
}

/* Token ids are counted; text counts as a token for every six bytes of the body. */
static int prompt_tokens(const char *body, size_t length) {
    const char *at = value_of(body, length, "prompt"), *end = body + length;
    if (!at || *at != '[')
        return length / 6;
    int count = 1;
    for (; at < end && *at != ']'; at++)
        count += *at == ',';
    return count;
}

static long header_number(const char *head, const char *name, long otherwise) {
    const char *at = strcasestr(head, name);
    return at ? atol(at + strlen(name)) : otherwise;
}

static void answer_get(struct connection *c, const char *head) {
    char body[1024];
    if (!strncmp(head, "GET /v1/models", 14)) {
        snprintf(body, sizeof body,
                 "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":%ld,\"owned_by\":\"vllm\","
                 "\"root\":\"%s\",\"parent\":null,\"max_model_len\":131072,\"permission\":[]}]}",
                 option_model, created, option_model);
        put_whole(c, "200 OK", body);
    } else if (!strncmp(head, "GET /version", 12)) {
        put_whole(c, "200 OK", "{\"version\":\"0.32.0\"}");
    } else if (!strncmp(head, "GET /health", 11)) {
        put_whole(c, "200 OK", "");
    } else if (!strncmp(head, "GET /metrics", 12)) {
        snprintf(body, sizeof body,
                 "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\"} %d\n"
                 "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{engine=\"0\"} %lu\n",
                 active_requests, tokens_written);
        put_whole(c, "200 OK", body);
    } else {
        put_whole(c, "404 Not Found", "{\"detail\":\"Not Found\"}");
    }
}

static void begin(struct connection *c, const char *head, const char *body, size_t length) {
    static const char stream_head[] = "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
                                      "content-type: text/event-stream; charset=utf-8\r\n"
                                      "transfer-encoding: chunked\r\n\r\n";
    struct record *r = &c->record;
    int chat = !strncmp(head, "POST /v1/chat/completions", 25);
    if (!chat && strncmp(head, "POST /v1/completions", 20)) {
        answer_get(c, head);
        return;
    }
    memset(r, 0, sizeof *r);
    requests_seen++;
    r->first_byte_ns = c->first_byte_ns;
    r->arrival_ns = now_ns();
    r->chat = chat;
    r->body_bytes = length;
    r->prompt_tokens = prompt_tokens(body, length);
    r->user = number_of(body, length, "user", -1);
    r->tokens = number_of(body, length, "max_completion_tokens", number_of(body, length, "max_tokens", 16));
    c->wants_usage = is_true(body, length, "include_usage");
    c->t2_ns = header_number(head, "\r\nx-ref-t2-us:", option_t2_ns / 1000) * 1000;
    c->active = 1;
    active_requests++;
    if (!stall_at_ns)
        stall_at_ns = r->arrival_ns + option_stall_after_ns;
    if (option_fail_every) {
        int place = requests_seen % option_fail_every;
        if (place == option_fail_every / 4)
            r->kind = HTTP_500;
        else if (place == option_fail_every / 2)
            r->kind = DISCONNECT;
        else if (place == 3 * option_fail_every / 4)
            r->kind = STREAM_ERROR;
    }
    if (r->kind == HTTP_500 || !is_true(body, length, "stream") || r->tokens < 1) {
        put_whole(c, "500 Internal Server Error",
                  "{\"error\":{\"message\":\"injected\",\"type\":\"InternalServerError\",\"param\":null,\"code\":500}}");
        finish(c, HTTP_500);
        return;
    }
    r->written_us = grown(NULL, r->tokens * sizeof *r->written_us);
    c->token_length = token_event(c->token, chat, "null");
    put(c, stream_head, sizeof stream_head - 1);
    c->due_ns = r->arrival_ns + header_number(head, "\r\nx-ref-t1-us:", option_t1_ns / 1000) * 1000;
    if (option_batch)
        c->due_ns = (c->due_ns + option_t2_ns - 1) / option_t2_ns * option_t2_ns;
    heap_push(c);
}

static void read_requests(struct connection *c) {
    for (;;) {
        if (c->in_capacity - c->in_length < 65536) {
            c->in_capacity = c->in_length + 262144;
            c->in = grown(c->in, c->in_capacity);
        }
        size_t room = c->in_capacity - c->in_length - 1;
        ssize_t n = recv(c->fd, c->in + c->in_length, room, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
            drop(c, ABORTED);
            return;
        }
        if (n < 0)
            break;
        if (!c->in_length)
            c->first_byte_ns = now_ns();
        c->in_length += n;
        if ((size_t)n < room)
            break;
    }
    while (c->in_length && !c->active && c->fd >= 0) {
        c->in[c->in_length] = 0;
        char *end = memmem(c->in, c->in_length, "\r\n\r\n", 4);
        if (!end)
            return;
        size_t head_length = end + 4 - c->in;
        char after_head = c->in[head_length];
        c->in[head_length] = 0;
        size_t length = header_number(c->in, "\r\ncontent-length:", 0);
        int expects = strcasestr(c->in, "\r\nexpect: 100") != NULL;
        c->in[head_length] = after_head;
        if (c->in_length < head_length + length) {
            if (expects && c->in_length == head_length)
                put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
            return;
        }
        end[3] = 0; /* ends the head as a string */
        begin(c, c->in, c->in + head_length, length);
        c->in_length -= head_length + length;
        memmove(c->in, c->in + head_length + length, c->in_length);
    }
}

/* --- the loop --- */

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct connection *c = calloc(1, sizeof *c);
        if (!c)
            exit(1);
        c->fd = fd;
        c->heap_position = -1;
        watch(c, EPOLL_CTL_ADD, EPOLLIN);
    }
}

static void stall_if_due(void) {
    if (!option_stall_for_ns || !stall_at_ns || now_ns() < stall_at_ns)
        return;
    struct timespec time = {option_stall_for_ns / 1000000000, option_stall_for_ns % 1000000000};
    option_stall_for_ns = 0;
    nanosleep(&time, NULL);
}

static void serve(int listener) {
    struct epoll_event events[256];
    while (!stopping) {
        stall_if_due();
        int64_t now = now_ns();
        /* At most 64, so that requests are read in time even when every stream is due. */
        for (int n = 0; n < 64 && heap_length && heap[0]->due_ns <= now; n++)
            fire(heap[0]);
        int64_t wait_ns = 200000000;
        if (heap_length) {
            wait_ns = heap[0]->due_ns - now_ns() - option_spin_ns;
            wait_ns = wait_ns < 0 ? 0 : wait_ns;
        }
        struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
        int n = epoll_pwait2(epoll_fd, events, 256, &wait, NULL);
        for (int i = 0; i < n; i++) {
            struct connection *c = events[i].data.ptr;
            if (!c) {
                accept_all(listener);
                continue;
            }
            if (c->fd >= 0 && (events[i].events & EPOLLOUT) && c->out_length)
                put_rest(c);
            if (c->fd >= 0 && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
                read_requests(c);
        }
    }
}

static void write_log(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) {
        perror(path);
        return;
    }
    fprintf(file, "user,kind,body_bytes,first_byte_ns,arrival_ns,tokens,written_us\n");
    for (size_t i = 0; i < record_count; i++) {
        struct record *r = records + i;
        fprintf(file, "%ld,%s,%zu,%ld,%ld,%d,", r->user, KIND_NAMES[r->kind], r->body_bytes, (long)r->first_byte_ns,
                (long)r->arrival_ns, r->tokens);
        for (int k = 0; k < r->sent; k++)
            fprintf(file, k ? " %d" : "%d", r->written_us[k]);
        fputc('\n', file);
    }
    fclose(file);
}

static void on_signal(int number) {
    (void)number;
    stopping = 1;
}

static int read_options(int count, char **words) {
    for (int i = 1; i + 1 < count; i += 2) {
        const char *name = words[i], *value = words[i + 1];
        if (!strcmp(name, "--port"))
            option_port = atoi(value);
        else if (!strcmp(name, "--t1"))
            option_t1_ns = atof(value) * 1e6;
        else if (!strcmp(name, "--t2"))
            option_t2_ns = atof(value) * 1e6;
        else if (!strcmp(name, "--mode"))
            option_batch = !strcmp(value, "batch");
        else if (!strcmp(name, "--fail-every"))
            option_fail_every = atoi(value);
        else if (!strcmp(name, "--stall-after"))
            option_stall_after_ns = atof(value) * 1e9;
        else if (!strcmp(name, "--stall-for"))
            option_stall_for_ns = atof(value) * 1e9;
        else if (!strcmp(name, "--log"))
            option_log = value;
        else if (!strcmp(name, "--spin"))
            option_spin_ns = atof(value) * 1e3;
        else if (!strcmp(name, "--model") && strlen(value) < 100) /* it goes into buffers of fixed size */
            option_model = value;
        else
            return 0;
    }
    return count % 2;
}

int main(int count, char **words) {
    if (!read_options(count, words)) {
        fprintf(stderr, "usage: see the head of refserver.c\n");
        return 2;
    }
    created = time(NULL);
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(option_port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t address_length = sizeof address;
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 8192)) {
        perror("bind or listen");
        return 1;
    }
    getsockname(listener, (void *)&address, &address_length);
    epoll_fd = epoll_create1(0);
    struct epoll_event event = {EPOLLIN, {.ptr = NULL}};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    printf("%d\n", ntohs(address.sin_port)); /* port 0 asks for a free one */
    fflush(stdout);
    serve(listener);
    if (option_log)
        write_log(option_log);
    return 0;
}
