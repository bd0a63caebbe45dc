# SPDX-License-Identifier: Apache-2.0
"""What EPIC raises: EpicError and its two kinds.

Errors that a compiled JAX program meets while it runs arrive as JAX's JaxRuntimeError, with the
same sentences: XLA makes the exception there.  error_code() finds the code in either.
"""

import re


class EpicError(RuntimeError):
    """A group failed, or a call of the core: its sentence, and `code`, the name of its result."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code


class EpicArgumentError(EpicError, ValueError):
    """An argument or an option is wrong; nothing was done.  It says which, its value, the rule."""

    def __init__(self, sentence: str) -> None:
        RuntimeError.__init__(self, sentence)
        self.code = "EPIC_EINVAL"


class EpicUnsupportedError(EpicError, NotImplementedError):
    """Right in itself, but nothing here does it; the sentence says what does instead."""

    def __init__(self, sentence: str) -> None:
        RuntimeError.__init__(self, sentence)
        self.code = "EPIC_ENOTSUP"


def error_code(error: BaseException | None) -> str | None:
    """Return the code of what EPIC reported, "EPIC_EPEER" for example; None: EPIC did not fail.

    error: any exception.  It may come from EPIC itself, from XLA, which puts the sentence into an
    exception of its own, or from a program that used a result of a call that failed.  The causes
    of the exception are searched too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, EpicError):
            return error.code
        found = re.search(r"epic\.jax\..*\[(EPIC_E[A-Z]+)\]", str(error), re.DOTALL)
        if found:
            return found[1]
        error = error.__cause__ or error.__context__
    return None
