# SPDX-License-Identifier: Apache-2.0
"""What EPIC raises: EpicError and its two kinds.

What a compiled program meets while it runs arrives as JAX's JaxRuntimeError, with the same
sentences: XLA makes the exception there.
"""


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
