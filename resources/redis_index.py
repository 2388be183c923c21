"""An index in Redis: an address in, a place where one process builds an index and all others use it.

An index lies under a base name. Whoever holds the base name's lock clears what a dead builder left, builds, and sets
the marker last. The promise: a half-built index is never used; it is built again; one that lost whole keys, or holds
what nobody put there, gives no answer. The password comes from the environment alone and is in no message. Cost: an
index stays until `remove_indexes`, as another home may use it.
"""

import contextlib
import os
import struct
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from training_io.errors import FormatError, RecipeError, SourceError, StateMismatch

if TYPE_CHECKING:
    import redis
    from redis.lock import Lock

REDIS_VARIABLE = "CORPUSMILL_REDIS"
PASSWORD_VARIABLE = "CORPUSMILL_REDIS_PASSWORD"

INDEX_PREFIX = b"corpusmill:"
LOCK_PREFIX = b"lock_"
LEASE_SECONDS = 60  # how long a builder may be silent before another one takes over
CONNECT_SECONDS = 5
ANSWER_SECONDS = 60
DELETED_AT_ONCE = 1_000


class IndexDamaged(FormatError):
    """An index lost what was put into it, or holds what was not."""


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
    if "@" in value or "/" in value or not _is_host(host) or not is_port:
        shown = "something else, not shown as it may hold a password" if "@" in value else repr(value)
        raise RecipeError(
            f"{source}: expected HOST:PORT such as 127.0.0.1:6379, found {shown}."
            f" Name host and port alone; a password goes into {PASSWORD_VARIABLE}."
        )
    return RedisAddress(host=host, port=int(port))


def _is_host(name: str) -> bool:
    """Whether a resolver can be asked for the name at all."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


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
        "encoding_errors": "surrogateescape",  # a password's bytes as the environment holds them
    }


def _client(address: RedisAddress) -> "contextlib.closing[redis.Redis]":
    import redis

    return contextlib.closing(redis.Redis(**_connection(address), password=os.environ.get(PASSWORD_VARIABLE)))


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
            f"Redis at {address}: expected an answer, found {type(error).__name__}: {_without_password(str(error))}."
            f" Check the server, its memory and {PASSWORD_VARIABLE}, or look up without Redis."
        ) from error


def _without_password(said: str) -> str:
    """What a server said, unless it says back what it was sent, as one does that does not know the command."""
    password = os.fsencode(os.environ.get(PASSWORD_VARIABLE, "")).decode("utf-8", "replace")
    is_said_back = "args beginning with" in said or (password and password in said)
    return "something else, not shown as it may hold the password" if is_said_back else said


@dataclass(frozen=True, kw_only=True)
class WholeIndex:
    """An index that was whole when it was opened: where it is, and the marker that its builder set last."""

    address: RedisAddress
    basename: bytes
    num_bands: int
    marker: bytes

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read the index inside; FormatError when it was damaged or changed, and whoever looks next builds it again.

        The marker comes and goes with the whole index, so one that is the same afterwards covers all that was read.
        """
        with talking_to(self.address):
            import redis

            try:
                yield
            except IndexDamaged as error:
                self._refuse(str(error), error)
            except redis.ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                self._refuse(f"expected datasketch's hashes and sets, found a key of another type ({error}).", error)
            with _client(self.address) as client:
                marker = _marker_of_whole(client, self.basename, self.num_bands)
            if marker != self.marker:
                self._refuse("expected the same whole index before and after the look-up, found it changed.", None)

    def _refuse(self, what: str, cause: Exception | None) -> NoReturn:
        with _client(self.address) as client:
            if _marker_of_whole(client, self.basename, self.num_bands) == self.marker:
                client.delete(_marker(self.basename))
        raise FormatError(
            f"Redis at {self.address}: index {self.basename.decode()}: {what}"
            " It is built again by the next look-up; look up again, or without Redis."
        ) from cause


def build_once(
    address: RedisAddress, basename: bytes, num_bands: int, build: Callable[[Callable[[], Any]], None]
) -> WholeIndex:
    """See to it that the index under a base name is there, whole; the first who comes builds it, others wait.

    `build` inserts everything and calls what it is given more often than every LEASE_SECONDS. SourceError when Redis
    cannot be used, StateMismatch when the builder was silent for too long.
    """
    with talking_to(address), _client(address) as client:
        _refuse_eviction(client, address)
        marker = _marker_of_whole(client, basename, num_bands)
        if marker is None:
            # A lost lock is told by `_mark`; releasing it would only hide that.
            with client.lock(LOCK_PREFIX + basename, timeout=LEASE_SECONDS, raise_on_release_error=False) as lock:
                marker = _marker_of_whole(client, basename, num_bands)
                if marker is None:
                    _clear(client, basename)
                    build(lock.reacquire)
                    marker = _mark(client, basename, num_bands, lock)
    return WholeIndex(address=address, basename=basename, num_bands=num_bands, marker=marker)


def _marker(basename: bytes) -> bytes:
    return basename + b"_complete"


def _hashes(basename: bytes, num_bands: int) -> list[bytes]:
    """Where datasketch lists all documents, and the buckets of each band."""
    bands = (basename + b"_bucket_" + struct.pack(">H", band) for band in range(num_bands))
    return [basename + b"_keys", *bands]


def _marker_of_whole(client: "redis.Redis", basename: bytes, num_bands: int) -> bytes | None:
    """The marker, where it is there and datasketch's lists are as long as the builder counted: all of one moment."""
    with client.pipeline() as pipe:
        pipe.get(_marker(basename))
        for name in _hashes(basename, num_bands):
            pipe.hlen(name)
        marker, *lengths = pipe.execute(raise_on_error=False)  # a key of another type gives an error: no length
    is_whole = isinstance(marker, bytes) and marker.split()[1:] == [str(length).encode() for length in lengths]
    return marker if is_whole else None


def _refuse_eviction(client: "redis.Redis", address: RedisAddress) -> None:
    try:
        policy = client.info("memory").get("maxmemory_policy", "noeviction")
    except (ValueError, AttributeError) as error:  # what the client makes of an answer that is not Redis's
        raise SourceError(
            f"Redis at {address}: expected a Redis server, found one that answers otherwise. Check the address."
        ) from error
    if policy.startswith("allkeys"):
        raise SourceError(
            f"Redis at {address}: expected a server that keeps what it is given, found maxmemory-policy {policy}."
            " Buckets would vanish unseen; use a server with the policy noeviction."
        )


def _clear(client: "redis.Redis", basename: bytes) -> None:
    client.delete(_marker(basename))
    _unlink(client, basename + b"_*")


def remove_indexes(address: RedisAddress) -> None:
    """Remove every index of corpusmill, old ones and those in use; whoever builds one at that moment is told."""
    with talking_to(address), _client(address) as client:
        _unlink(client, LOCK_PREFIX + INDEX_PREFIX + b"*")  # first, so that no builder marks what was thinned out
        _unlink(client, INDEX_PREFIX + b"*")


def _unlink(client: "redis.Redis", pattern: bytes) -> None:
    found: list[bytes] = []
    for key in client.scan_iter(match=pattern, count=10 * DELETED_AT_ONCE):
        found.append(key)
        if len(found) == DELETED_AT_ONCE:
            client.unlink(*found)
            found.clear()
    if found:
        client.unlink(*found)


def _mark(client: "redis.Redis", basename: bytes, num_bands: int, lock: "Lock") -> bytes:
    """Set the marker, unless another builder took over meanwhile: it has begun by clearing what is here.

    It names this very build and counts documents and each band's buckets.
    """
    with client.pipeline() as pipe:
        pipe.watch(lock.name)
        if not lock.owned():
            raise StateMismatch(
                f"Redis index {basename.decode()}: expected to build it alone, found another builder after"
                f" {LEASE_SECONDS} s of silence. Look up again; the other one's index is used."
            )
        lengths = [pipe.hlen(name) for name in _hashes(basename, num_bands)]
        marker = " ".join([uuid.uuid4().hex, *map(str, lengths)]).encode()
        pipe.multi()
        pipe.set(_marker(basename), marker)
        pipe.execute()
    return marker
