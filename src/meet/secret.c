/* SPDX-License-Identifier: Apache-2.0 */
/* A secret that the ranks of a group share. */
#include "meet/secret.h"

#include <dlfcn.h>
#include <string.h>

#define ROLE_BYTES 16

epic_result epic_secret_open(epic_secret *out, const char *text)
{
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1"};
    *out = (epic_secret){.text = text};
    if (text == NULL) return EPIC_OK;
    if (text[0] == '\0')
        return epic_fail(EPIC_EINVAL,
                         "the secret (tcp.secret or EPIC_SECRET) is empty: give one, "
                         "or leave it unset for none");
    for (size_t i = 0; i < sizeof names / sizeof *names && out->library == NULL; i++)
        out->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (out->library == NULL)
        return epic_fail(EPIC_ENOTSUP, "a secret (tcp.secret or EPIC_SECRET) is proved with "
                                       "libcrypto, and neither libcrypto.so.3 nor "
                                       "libcrypto.so.1.1 can be loaded: install OpenSSL");

    /* memcpy: ISO C has no cast from an object pointer to a function pointer */
    void *const sha256 = dlsym(out->library, "EVP_sha256");
    void *const hmac = dlsym(out->library, "HMAC");
    void *const compare = dlsym(out->library, "CRYPTO_memcmp");
    memcpy(&out->sha256, &sha256, sizeof sha256);
    memcpy(&out->hmac, &hmac, sizeof hmac);
    memcpy(&out->compare, &compare, sizeof compare);
    if (sha256 != NULL && hmac != NULL && compare != NULL) return EPIC_OK;

    epic_secret_close(out);
    return epic_fail(EPIC_ENOTSUP,
                     "a secret (tcp.secret or EPIC_SECRET) is proved with libcrypto, "
                     "and the one here lacks EVP_sha256, HMAC or CRYPTO_memcmp");
}

void epic_secret_close(epic_secret *secret)
{
    if (secret->library != NULL) dlclose(secret->library);
    *secret = (epic_secret){0};
}

bool epic_secret_prove(const epic_secret *secret, bool listener, const epic_hello *listening,
                       const epic_hello *connecting, uint8_t proof[SECRET_PROOF])
{
    uint8_t data[ROLE_BYTES + 2 * sizeof(epic_hello)] = {0};
    unsigned int bytes = 0;
    strcpy((char *)data, listener ? "EPIC listener" : "EPIC connector");
    memcpy(data + ROLE_BYTES, listening, sizeof *listening);
    memcpy(data + ROLE_BYTES + sizeof *listening, connecting, sizeof *connecting);
    return secret->hmac(secret->sha256(), secret->text, (int)strlen(secret->text), data,
                        sizeof data, proof, &bytes) != NULL &&
           bytes == SECRET_PROOF;
}

bool epic_secret_check(const epic_secret *secret, bool listener, const epic_hello *listening,
                       const epic_hello *connecting, const uint8_t proof[SECRET_PROOF])
{
    uint8_t right[SECRET_PROOF];
    return epic_secret_prove(secret, listener, listening, connecting, right) &&
           secret->compare(right, proof, SECRET_PROOF) == 0;
}
