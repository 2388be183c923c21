"""An index in Redis: an address in, a place where one process builds an index and all others use it.

An index lies under a base name. Whoever holds the base name's lock clears what a dead builder left, builds, and sets
the marker last. The promise: a half-built index is never used; it is built again. The password comes from the
environment alone and is in no message.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training_io.errors import RecipeError, SourceError, StateMismatch

if TYPE_CHECKING:
    import redis
    from redis.lock import Lock

REDIS_VARIABLE = "CORPUSMILL_REDIS"
PASSWORD_VARIABLE = "CORPUSMILL_REDIS_PASSWORD"

LEASE_SECONDS = 60  # how long a builder may be silent before another one takes over
CONNECT_SECONDS = 5
ANSWER_SECONDS = 60
DELETED_AT_ONCE = 1_000


@dataclass(frozen=True, kw_only=True)
class RedisAddress:
    """Where a Redis server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def redis_address(given: str | None = None) -> RedisAddress | None:
    """The server that is given as HOST:PORT, else the one that CORPUSMILL_REDIS names, else none; RecipeError if wrong.

    >>> redis_address("127.0.0.1:6379").port
    6379
    """
    source = "--redis" if given else REDIS_VARIABLE
    value = given or os.environ.get(REDIS_VARIABLE, "")
    if not value:
        return None
    host, _, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if "@" in value or "/" in value or not host or not is_port:
        shown = "something else, not shown as it may hold a password" if "@" in value else repr(value)
        raise RecipeError(
            f"{source}: expected HOST:PORT such as 127.0.0.1:6379, found {shown}."
            f" Name host and port alone; a password goes into {PASSWORD_VARIABLE}."
        )
    return RedisAddress(host=host, port=int(port))


def storage_config(address: RedisAddress, basename: bytes) -> dict[str, Any]:
    """The storage of datasketch's index under a base name; it names the password's variable, not the password."""
    return {
        "type": "redis",
        "basename": basename,
        "redis": {**_connection(address), "password": {"env": PASSWORD_VARIABLE}},
        "redis_buffer": {"transaction": False},
    }


def _connection(address: RedisAddress) -> dict[str, Any]:
    return {
        "host": address.host,
        "port": address.port,
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": ANSWER_SECONDS,
    }


@contextlib.contextmanager
def talking_to(address: RedisAddress) -> Iterator[None]:
    """Whatever goes wrong with Redis inside becomes a SourceError that names the server; so does a missing client."""
    try:
        import redis  # an optional dependency
    except ImportError as error:
        raise SourceError(
            f"Redis at {address}: expected the Python client `redis`, found none installed."
            " pip install 'corpusmill[redis]', or look up without Redis."
        ) from error
    try:
        yield
    except redis.RedisError as error:
        raise SourceError(
            f"Redis at {address}: expected an answer, found {type(error).__name__}: {error}."
            f" Check the server, its memory and {PASSWORD_VARIABLE}, or look up without Redis."
        ) from error


def build_once(address: RedisAddress, basename: bytes, build: Callable[[Callable[[], Any]], int]) -> None:
    """See to it that the index under a base name is there, whole; the first who comes builds it, others wait.

    `build` inserts everything, calls what it is given more often than every LEASE_SECONDS, and returns the number of
    documents. SourceError when Redis cannot be used, StateMismatch when the builder was silent for too long.
    """
    with talking_to(address):
        import redis

        password = os.environ.get(PASSWORD_VARIABLE)
        with contextlib.closing(redis.Redis(**_connection(address), password=password)) as client:
            _refuse_eviction(client, address)
            if _is_whole(client, basename):
                return
            # A lost lock is told by `_mark`; releasing it would only hide that.
            with client.lock(b"lock_" + basename, timeout=LEASE_SECONDS, raise_on_release_error=False) as lock:
                if not _is_whole(client, basename):
                    _clear(client, basename)
                    num_documents = build(lock.reacquire)
                    _mark(client, basename, lock, num_documents)


def _marker(basename: bytes) -> bytes:
    return basename + b"_complete"


def _is_whole(client: "redis.Redis", basename: bytes) -> bool:
    """Whether the marker is there and datasketch's hash of all keys still holds what the builder counted."""
    marked = client.get(_marker(basename))
    return marked is not None and int(marked) == client.hlen(basename + b"_keys")


def _refuse_eviction(client: "redis.Redis", address: RedisAddress) -> None:
    policy = client.info("memory").get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys"):
        raise SourceError(
            f"Redis at {address}: expected a server that keeps what it is given, found maxmemory-policy {policy}."
            " Buckets would vanish unseen; use a server with the policy noeviction."
        )


def _clear(client: "redis.Redis", basename: bytes) -> None:
    client.delete(_marker(basename))
    found: list[bytes] = []
    for key in client.scan_iter(match=basename + b"_*", count=10 * DELETED_AT_ONCE):
        found.append(key)
        if len(found) == DELETED_AT_ONCE:
            client.unlink(*found)
            found.clear()
    if found:
        client.unlink(*found)


def _mark(client: "redis.Redis", basename: bytes, lock: "Lock", num_documents: int) -> None:
    """Set the marker, unless another builder took over meanwhile: it has begun by clearing what is here."""
    with client.pipeline() as pipe:
        pipe.watch(lock.name)
        if not lock.owned():
            raise StateMismatch(
                f"Redis index {basename.decode()}: expected to build it alone, found another builder after"
                f" {LEASE_SECONDS} s of silence. Look up again; the other one's index is used."
            )
        pipe.multi()
        pipe.set(_marker(basename), num_documents)
        pipe.execute()
