/* SPDX-License-Identifier: Apache-2.0 */
/* The other side of a TCP bootstrap. The fuzzed rank gets constants in place of random bytes,
 * and its clock stands still at first. So its hello is known before it is sent. */
#include "fuzz/script.h"

#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int listener = -1;
static epic_secret secret; /* kept, so that libcrypto is loaded only once */
static struct sockaddr_un place = {.sun_family = AF_UNIX};

int script_listener(void)
{
    if (listener >= 0) return listener;
    (void)epic_secret_open(&secret, SCRIPT_SECRET);
    snprintf(place.sun_path + 1, sizeof place.sun_path - 1, "epic.fuzz.%d", (int)getpid());
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (bind(listener, (struct sockaddr *)&place, sizeof place) != 0 ||
        listen(listener, 500) != 0)
        perror("listen");
    return listener;
}

/* Replaces the function of src/bootstrap/address.c. */
epic_result epic_tcp_endpoints(epic_endpoints *out, const epic_tcp *tcp, time_limit *limit)
{
    (void)tcp, (void)limit;
    script_listener();
    *out = (epic_endpoints){.count = 1};
    memcpy(&out->at[0].address, &place, sizeof place);
    out->at[0].bytes = sizeof place;
    return EPIC_OK;
}

epic_result epic_tcp_listen(int listeners[TCP_MAX_ENDPOINTS], int *num_listeners,
                            const epic_tcp *tcp, time_limit *limit)
{
    (void)tcp, (void)limit;
    listeners[0] = dup(script_listener());
    *num_listeners = 1;
    return EPIC_OK;
}

epic_result epic_tcp_no_socket(int wrong)
{
    return epic_fail(EPIC_EDEVICE, "%s", strerror(wrong));
}

uint8_t script_byte(script *s)
{
    if (s->left == 0) return 0;
    s->left--;
    return *s->at++;
}

static const uint8_t *take(script *s, size_t *bytes)
{
    const uint8_t *at = s->at;
    if (*bytes > s->left) *bytes = s->left;
    s->at += *bytes;
    s->left -= *bytes;
    return at;
}

/* The fuzzed rank does not read while this function writes, so bytes that do not fit into the
 * socket are lost. */
static void put(int socket, const void *bytes, size_t length)
{
    (void)!send(socket, bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static epic_hello hello_of(int rank, const script *s)
{
    epic_hello hello = {.magic = HELLO_MAGIC,
                        .version = FRAME_VERSION,
                        .rank = rank,
                        .num_ranks = s->num_ranks,
                        .left_ms = SCRIPT_MS,
                        .has_secret = s->has_secret};
    memset(hello.nonce, 0x11, sizeof hello.nonce);
    return hello;
}

/* Changes up to three bytes, chosen by the script. */
static void spoil(script *s, void *bytes, size_t length)
{
    for (int n = script_byte(s) % 4; n > 0 && length > 0; n--) {
        const size_t at = script_byte(s);
        ((uint8_t *)bytes)[at % length] = script_byte(s);
    }
}

static void put_hello(script *s, int socket)
{
    uint8_t proof[SECRET_PROOF] = {0};
    const int rank = script_byte(s) % (s->num_ranks + 1);
    epic_hello ours = hello_of(s->listener ? 0 : rank, s);
    epic_hello theirs = hello_of(s->listener ? 1 : 0, s);
    spoil(s, &ours, sizeof ours);
    put(socket, &ours, sizeof ours);
    if (!s->has_secret) return;
    const epic_hello *zero = s->listener ? &ours : &theirs;
    const epic_hello *other = s->listener ? &theirs : &ours;
    (void)epic_link_secure(&s->link, &secret, s->listener, zero, other);
    (void)epic_secret_prove(&secret, ROLE_CONNECTOR, zero, other, proof);
    if (!s->listener) put(socket, proof, sizeof proof);
}

static void put_frame(script *s, int socket)
{
    const epic_result result = script_byte(s) % 16 == 15 ? EPIC_EPEER : EPIC_OK;
    const uint64_t sequence = script_byte(s) % 8;
    size_t length = script_byte(s);
    const uint8_t *bytes = take(s, &length);
    const time_limit limit = time_limit_begin(INT32_MAX, NULL);
    const epic_frame frame =
        epic_link_make_frame(s->link.secret, result, sequence, bytes, length, &limit);
    epic_message message = epic_link_message(&s->link, &frame, bytes);
    spoil(s, &message.frame, sizeof message.frame);
    put(socket, &message.frame, sizeof message.frame);
    put(socket, bytes, length);
}

void script_play(script *s, int socket)
{
    s->link = (epic_link){.socket = socket, .listener = s->listener};
    while (s->left > 0) {
        size_t length;
        switch (script_byte(s) % 5) {
        case 0:
            put_hello(s, socket);
            break;
        case 1:
        case 2:
            put_frame(s, socket);
            break;
        case 3:
            length = script_byte(s);
            const uint8_t *bytes = take(s, &length);
            put(socket, bytes, length);
            break;
        default:
            if (script_byte(s) % 2) shutdown(socket, SHUT_WR);
            return;
        }
    }
}
