# SPDX-License-Identifier: Apache-2.0
"""JAX's distributed key-value store, over which the ranks of a group find each other."""

from typing import Any


def distributed_store() -> Any:
    """Return the client of JAX's distributed key-value store; None without jax.distributed.

    The name is private to JAX, and only this function uses it.  If a later JAX does not have it,
    programs must pass a Tcp or an exchange as bootstrap=.
    """
    try:
        from jax._src import distributed
    except ImportError:
        return None
    return getattr(getattr(distributed, "global_state", None), "client", None)


class JaxStore:
    """JAX's key-value store with the operations that epic.store needs."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        self.client.key_value_set_bytes(key, value, allow_overwrite=True)

    def put_first(self, key: str, value: bytes) -> bytes:
        """Set a key unless it has a value; return the value that it has then."""
        try:
            self.client.key_value_set_bytes(key, value)
        except Exception as error:
            if not str(error).startswith("ALREADY_EXISTS"):
                raise
            return self.get(key)
        return value

    def has(self, key: str) -> bool:
        """Return whether the key has a value."""
        try:
            self.get(key)
        except Exception as error:
            if not str(error).startswith("NOT_FOUND"):
                raise
            return False
        return True

    def get(self, key: str) -> bytes:
        """Return the value of a key that has one."""
        return self.client.key_value_try_get_bytes(key)

    def remove(self, key: str) -> None:
        """Delete a key."""
        self.client.key_value_delete(key)
