# SPDX-License-Identifier: Apache-2.0
"""The exceptions of EPIC: EpicError and its subclasses.

If an error occurs while a compiled JAX program runs, XLA raises it, as a JaxRuntimeError that
contains EPIC's text. error_code() finds the code in both kinds of exceptions.
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
    """The arguments are correct, but their combination is not supported.

    The text names an alternative.
    """

    def __init__(self, sentence: str) -> None:
        RuntimeError.__init__(self, sentence)
        self.code = "EPIC_ENOTSUP"


class EpicNonFiniteError(EpicError, FloatingPointError):
    """A row of a layer contains a NaN or an infinity.

    `epic.torch.check_finite` and `epic.jax.check_finite` raise it.

    Attributes:
        layer: Name of the layer in the model.
        rank: Rank that passed the token of the row to the layer.
        token: Index of the token on that rank.
        expert: Expert that computed the row; None if the row belongs to no expert.
    """

    def __init__(
        self, what: str, remedy: str, layer: str, rank: int, token: int, expert: int | None
    ) -> None:
        where = f"layer {layer!r}, rank {rank}, token {token}"
        where += "" if expert is None else f", expert {expert}"
        super().__init__("EPIC_EINVAL", f"{what} is not finite: {where}; {remedy}")
        self.layer, self.rank, self.token, self.expert = layer, rank, token, expert


def error_code(error: BaseException | None) -> str | None:
    """Return the code of the EPIC error that caused an exception, or None.

    Args:
        error: Any exception: one of EPIC, one of XLA that contains EPIC's text, or one that was
            raised while such an exception was handled.

    Returns:
        The code, for example "EPIC_EPEER"; None if no EPIC error is the cause.

    Example:
        >>> from epic.errors import error_code
        >>> error_code(ValueError("no error of EPIC")) is None
        True
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
