/* SPDX-License-Identifier: Apache-2.0 */
/* Computes HMAC-SHA-256 and SHA-256 with libcrypto, which is loaded only if a secret is set. */
#include "bootstrap/secret.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define ROLE_BYTES 16

/* Loads libcrypto. On failure returns NULL and writes the reason to `why`, or "" if no
 * libcrypto exists. */
static void *load_libcrypto(char why[256])
{
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1"};
    why[0] = '\0';
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *const library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (library != NULL) return library;
        const char *message = dlerror();
        if (message == NULL || why[0] != '\0' || strstr(message, strerror(ENOENT))) continue;
        snprintf(why, 256, "%s", message);
    }
    return NULL;
}

/* Stores the address of a library function in the function pointer at `function`. Uses
 * memcpy(), because ISO C has no cast from an object pointer to a function pointer. */
static bool find_symbol(void *library, const char *name, void *function)
{
    void *const found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

epic_result epic_secret_open(epic_secret *out, const char *text)
{
    char why[256];
    *out = (epic_secret){.text = text};
    if (text == NULL) return EPIC_OK;
    if (text[0] == '\0')
        return epic_fail(EPIC_EINVAL,
                         "the secret (tcp.secret or EPIC_SECRET) is empty: must be at "
                         "least one character; unset it to use no secret");
    out->library = load_libcrypto(why);
    if (out->library == NULL && why[0] != '\0')
        return epic_fail(EPIC_ENOTSUP,
                         "a secret (tcp.secret or EPIC_SECRET) needs libcrypto, which "
                         "exists and cannot be loaded: %s",
                         why);
    if (out->library == NULL)
        return epic_fail(EPIC_ENOTSUP, "a secret (tcp.secret or EPIC_SECRET) needs "
                                       "libcrypto, and neither libcrypto.so.3 nor "
                                       "libcrypto.so.1.1 was found: install OpenSSL's library "
                                       "(Debian, Ubuntu: libssl3)");
    if (find_symbol(out->library, "EVP_sha256", &out->sha256) &&
        find_symbol(out->library, "HMAC", &out->hmac) &&
        find_symbol(out->library, "EVP_Digest", &out->digest) &&
        find_symbol(out->library, "CRYPTO_memcmp", &out->compare))
        return EPIC_OK;

    epic_secret_close(out);
    return epic_fail(EPIC_ENOTSUP,
                     "a secret (tcp.secret or EPIC_SECRET) needs libcrypto, and the "
                     "one found lacks EVP_sha256, EVP_Digest, HMAC or CRYPTO_memcmp");
}

void epic_secret_close(epic_secret *secret)
{
    if (secret->library != NULL) dlclose(secret->library);
    *secret = (epic_secret){0};
}

bool epic_secret_mac(const epic_secret *secret, const void *key, size_t key_bytes,
                     const void *data, size_t bytes, uint8_t out[SECRET_PROOF])
{
    unsigned int out_bytes = 0;
    return secret->hmac(secret->sha256(), key, (int)key_bytes, data, bytes, out, &out_bytes) !=
               NULL &&
           out_bytes == SECRET_PROOF;
}

bool epic_secret_digest(const epic_secret *secret, const void *data, size_t bytes,
                        uint8_t out[SECRET_PROOF])
{
    unsigned int out_bytes = 0;
    return secret->digest(data, bytes, out, &out_bytes, secret->sha256(), NULL) == 1 &&
           out_bytes == SECRET_PROOF;
}

bool epic_secret_prove(const epic_secret *secret, epic_role role, const epic_hello *listening,
                       const epic_hello *connecting, uint8_t proof[SECRET_PROOF])
{
    uint8_t data[ROLE_BYTES + 2 * sizeof(epic_hello)] = {0};
    strcpy((char *)data, role == ROLE_CONNECTOR ? "EPIC connector" : "EPIC session");
    memcpy(data + ROLE_BYTES, listening, sizeof *listening);
    memcpy(data + ROLE_BYTES + sizeof *listening, connecting, sizeof *connecting);
    return epic_secret_mac(secret, secret->text, strlen(secret->text), data, sizeof data,
                           proof);
}

bool epic_secret_check(const epic_secret *secret, epic_role role, const epic_hello *listening,
                       const epic_hello *connecting, const uint8_t proof[SECRET_PROOF])
{
    uint8_t right[SECRET_PROOF];
    return epic_secret_prove(secret, role, listening, connecting, right) &&
           secret->compare(right, proof, SECRET_PROOF) == 0;
}
