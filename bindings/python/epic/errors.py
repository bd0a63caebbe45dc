# SPDX-License-Identifier: Apache-2.0
"""Exceptions of EPIC: EpicError and its subclasses.

While a compiled JAX program runs, XLA makes the exception, a JaxRuntimeError with the same text.
error_code() finds the code in both kinds.
"""

import re


class EpicError(RuntimeError):
    """A group failed, or a call of the core failed.

    Attributes:
        code: Name of the result, for example "EPIC_EPEER". The reference lists all codes.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code


class EpicArgumentError(EpicError, ValueError):
    """An argument or an option is invalid; the call did nothing.

    The text has the form "NAME is VALUE: must be RULE".
    """

    def __init__(self, sentence: str) -> None:
        RuntimeError.__init__(self, sentence)
        self.code = "EPIC_EINVAL"


class EpicUnsupportedError(EpicError, NotImplementedError):
    """A correct combination that is not supported; the text names an alternative."""

    def __init__(self, sentence: str) -> None:
        RuntimeError.__init__(self, sentence)
        self.code = "EPIC_ENOTSUP"


class EpicNonFiniteError(EpicError, FloatingPointError):
    """A row of a layer holds a NaN or an infinity, as epic.torch.check_finite found.

    Attributes:
        layer: Name of the layer in the model.
        rank: Rank of the group whose token it is.
        token: Number of the token on that rank.
        expert: The expert that computed the row; None if it belongs to no expert.
    """

    def __init__(
        self, what: str, remedy: str, layer: str, rank: int, token: int, expert: int | None
    ) -> None:
        where = f"layer {layer!r}, rank {rank}, token {token}"
        where += "" if expert is None else f", expert {expert}"
        super().__init__("EPIC_EINVAL", f"{what} is not finite: {where}; {remedy}")
        self.layer, self.rank, self.token, self.expert = layer, rank, token, expert


def error_code(error: BaseException | None) -> str | None:
    """Return the code of EPIC's error in an exception, for example "EPIC_EPEER", or None.

    error: any exception.  EPIC raises it, or XLA, which puts the sentence of EPIC into its own
    exception, or a program that used a result of a failed call.  The causes of the exception are
    searched too.
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
