"""The index of kept documents in a real Redis server: built once, reused, never half-built, its password never shown.

Damage to it is noticed: an answer is the one of the search, or there is none and the next look-up builds the index again.
"""

import contextlib
import re
import shlex
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import small_corpus
from small_corpus import Built

from pipeline_assets.__main__ import main
from pipeline_assets.lookup import Lookup, find_texts, look_up, memory_index, open_lookup, redis_index
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.references import Pipeline
from pipeline_assets.transforms.lookup import minhash_of
from pipeline_assets.transforms.minhash import sign_documents
from resources.artifact_store import ArtifactStore
from resources.redis_index import (
    PASSWORD_VARIABLE,
    REDIS_VARIABLE,
    RedisAddress,
    WholeIndex,
    build_once,
    remove_indexes,
)
from training_io.errors import FormatError, SourceError, StateMismatch

SERVER = shutil.which("redis-server")
PASSWORD = "not-to-be-shown-4711"
NEAR = small_corpus.NEAR_ORIGINAL.rsplit(" ", 2)[0] + " yet another ending"
UNKNOWN = small_corpus.sentences(99_999)
TEXTS = [small_corpus.CROSS_POOL, small_corpus.NEAR_COPY, NEAR, small_corpus.WORDLESS, UNKNOWN, ""]
NAME = b"a-name"

pytestmark = pytest.mark.skipif(SERVER is None, reason="no redis-server on this machine")


@dataclass(frozen=True)
class Server:
    """A server on loopback that keeps nothing on disk."""

    address: RedisAddress
    process: subprocess.Popen

    def client(self):
        import redis

        return redis.Redis(host=self.address.host, port=self.address.port, password=PASSWORD)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    settings = f'bind 127.0.0.1\nport {port}\nrequirepass {PASSWORD}\nsave ""\nappendonly no\ndir {folder}\n'
    process = subprocess.Popen([SERVER, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        process.stdin.write(settings)
        process.stdin.close()
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ready to accept connections" in line:
                break
        else:
            raise AssertionError("".join(said))
        # nobody may be left writing into a full pipe
        reader = threading.Thread(target=process.stdout.read, daemon=True)
        reader.start()
        yield Server(RedisAddress(host="127.0.0.1", port=port), process)
    finally:
        process.terminate()
        process.wait(30)
    reader.join(30)
    process.stdout.close()
    assert not list(folder.iterdir())


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, empty, and its password in the environment."""
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    monkeypatch.delenv(REDIS_VARIABLE, raising=False)
    with running.client() as client:
        client.flushall()
        client.config_resetstat()
    yield running
    with running.client() as client:
        client.config_set("maxmemory-policy", "noeviction")


@pytest.fixture(scope="session")
def lookup(clean: Built) -> Lookup:
    return open_lookup(pipeline_of(clean))


def pipeline_of(built: Built) -> Pipeline:
    return Pipeline(store=ArtifactStore(built.home.resolve()), recipe=load_recipe(str(built.recipe)))


def num_inserted(server: Server) -> int:
    """How many times anything was put into a band's bucket since the test began."""
    with server.client() as client:
        return client.info("commandstats").get("cmdstat_sadd", {"calls": 0})["calls"]


def num_signed_and_kept(lookup: Lookup) -> int:
    return len(memory_index(lookup).keys)


def test_redis_gives_the_same_answers_as_the_search_and_is_built_once(server: Server, lookup: Lookup) -> None:
    expected = find_texts(lookup, TEXTS)
    assert look_up(lookup.stage.pipeline, TEXTS, server.address) == expected
    assert num_inserted(server) == 14 * num_signed_and_kept(lookup) > 0
    assert look_up(lookup.stage.pipeline, TEXTS, server.address) == expected
    assert num_inserted(server) == 14 * num_signed_and_kept(lookup)


def test_keys_are_hex_doc_ids_and_nothing_is_pickled(server: Server, lookup: Lookup) -> None:
    index, _ = redis_index(lookup, server.address)
    assert not index.prepickle
    assert {key.decode() for key in index.keys.keys()} == set(memory_index(lookup).keys.keys())  # noqa: SIM118


def test_other_clusters_have_an_index_of_their_own(server: Server, lookup: Lookup, tmp_path: Path) -> None:
    folder = small_corpus.write_corpus(tmp_path)
    small_corpus.write_rows(folder / "alpha" / "a_009.parquet", [{"text": UNKNOWN}])
    changed = small_corpus.build(small_corpus.write_recipe(folder), tmp_path / "home", upto="lsh_clusters")
    assert not look_up(lookup.stage.pipeline, [UNKNOWN], server.address)[0].matches
    assert look_up(pipeline_of(changed), [UNKNOWN], server.address)[0].is_identical
    assert not look_up(lookup.stage.pipeline, [UNKNOWN], server.address)[0].matches


def test_a_half_built_index_is_never_used(server: Server, clean: Built, tmp_path: Path) -> None:
    copy = small_corpus.copy_home(clean, tmp_path / "home")
    lookup = open_lookup(pipeline_of(copy))
    last = lookup.stage.store.folder(lookup.signed[-1]) / "signatures.npy"
    last.rename(tmp_path / "aside")
    with pytest.raises(FormatError, match="found no file"):
        redis_index(lookup, server.address)
    assert 0 < num_inserted(server) < 14 * num_signed_and_kept(open_lookup(pipeline_of(clean)))
    (tmp_path / "aside").rename(last)
    index, _ = redis_index(lookup, server.address)
    assert find_texts(lookup, TEXTS, index) == find_texts(lookup, TEXTS)
    assert len(index.keys) == num_signed_and_kept(lookup)
    assert {len(bands) for bands in index.keys.getmany(*index.keys)} == {14}  # what the first one left is gone


def test_what_a_killed_builder_left_is_taken_over(server: Server, lookup: Lookup) -> None:
    name = name_of(lookup)
    with server.client() as client:
        client.set(b"lock_" + name, b"of a process that is gone", px=300)
        client.sadd(name + b"_bucket_\0\0stale", b"ff" * 32)
        client.hset(name + b"_keys", b"ff" * 32, b"stale")
        index, _ = redis_index(lookup, server.address)
        assert not client.exists(name + b"_bucket_\0\0stale")
    assert len(index.keys) == num_signed_and_kept(lookup)
    assert find_texts(lookup, TEXTS, index) == find_texts(lookup, TEXTS)


def test_a_builder_that_was_silent_for_too_long_does_not_finish(server: Server) -> None:
    with server.client() as client:

        def build(still_here) -> None:
            client.set(b"lock_" + NAME, b"another one")

        with pytest.raises(StateMismatch, match="expected to build it alone"):
            build_once(server.address, NAME, 2, build)
        assert not client.exists(NAME + b"_complete")
        assert client.get(b"lock_" + NAME) == b"another one"


def test_a_builder_notices_while_it_builds(server: Server) -> None:
    with server.client() as client:

        def build(still_here) -> None:
            still_here()
            client.delete(b"lock_" + NAME)
            still_here()
            raise AssertionError("it went on")

        with pytest.raises(SourceError, match="Lock"):
            build_once(server.address, NAME, 2, build)


def test_two_at_once_build_it_once(server: Server, lookup: Lookup) -> None:
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: look_up(lookup.stage.pipeline, TEXTS, server.address), range(4)))
    assert answers == [find_texts(lookup, TEXTS)] * 4
    assert num_inserted(server) == 14 * num_signed_and_kept(lookup)


def name_of(lookup: Lookup) -> bytes:
    return b"corpusmill:" + lookup.identity[:32].encode()


def near_bucket(lookup: Lookup) -> bytes:
    """The key of a bucket that holds what is near to NEAR."""
    index = memory_index(lookup)
    values = minhash_of(sign_documents(pa.array([NEAR]), lookup.params)[0][0], lookup.params).hashvalues
    for band, (start, end) in enumerate(index.hashranges):
        bucket = values[start:end].byteswap().tobytes()
        if index.hashtables[band].get(bucket):
            return name_of(lookup) + b"_bucket_" + band.to_bytes(2, "big") + bucket
    raise AssertionError("nothing is near")


def of_type(client, kind: bytes, name: bytes) -> list[bytes]:
    return [key for key in client.scan_iter(match=name + b"_*") if client.type(key) == kind]


# Each does its damage to an index of a base name that has a bucket.
LISTS_LOST = {
    "every document's entry": lambda client, name, bucket: client.delete(name + b"_keys"),
    "every list of buckets": lambda client, name, bucket: client.delete(*of_type(client, b"hash", name)),
    "one list of buckets": lambda client, name, bucket: client.delete(bucket[:-32]),
    "one line of a list, and its bucket": lambda client, name, bucket: (
        client.hdel(bucket[:-32], bucket[-32:]) and client.delete(bucket)
    ),
    "a list of another type": lambda client, name, bucket: (
        client.delete(bucket[:-32]) and client.set(bucket[:-32], b"text")
    ),
    "all but the marker": lambda client, name, bucket: client.delete(
        *(key for key in client.scan_iter(match=name + b"_*") if not key.endswith(b"_complete"))
    ),
    "the marker": lambda client, name, bucket: client.delete(name + b"_complete"),
    "an empty marker": lambda client, name, bucket: client.set(name + b"_complete", b""),
    "a number": lambda client, name, bucket: client.set(name + b"_complete", b"150"),
    "no text": lambda client, name, bucket: client.set(name + b"_complete", b"\xff\xfe \0 1 2"),
    "a marker of another type": lambda client, name, bucket: (
        client.delete(name + b"_complete") and client.rpush(name + b"_complete", b"1")
    ),
}
BUCKETS_DAMAGED = {
    "every bucket": lambda client, name, bucket: client.delete(*of_type(client, b"set", name)),
    "one bucket": lambda client, name, bucket: client.delete(bucket),
    "a bucket of another type": lambda client, name, bucket: client.delete(bucket) and client.set(bucket, b"text"),
    "a member of no hex": lambda client, name, bucket: client.sadd(bucket, b"zz" * 32),
    "a member of no text": lambda client, name, bucket: client.sadd(bucket, b"\xff\x1b[2J"),
    "a short member": lambda client, name, bucket: client.sadd(bucket, b"ab"),
    "an odd member": lambda client, name, bucket: client.sadd(bucket, b"abc"),
    "an empty member": lambda client, name, bucket: client.sadd(bucket, b""),
    "a document that is nowhere": lambda client, name, bucket: client.sadd(bucket, b"ab" * 32),
    "a document of another bucket": lambda client, name, bucket: client.sadd(
        bucket, small_corpus.doc_id(small_corpus.UNIQUE).hex().encode()
    ),
    "another document in its place": lambda client, name, bucket: (
        client.delete(bucket) and client.sadd(bucket, small_corpus.doc_id(small_corpus.UNIQUE).hex().encode())
    ),
}
Damage = Callable[..., object]


@pytest.mark.parametrize("damage", LISTS_LOST.values(), ids=LISTS_LOST)
def test_an_index_that_lost_or_changed_its_lists_is_built_again(server: Server, lookup: Lookup, damage: Damage) -> None:
    redis_index(lookup, server.address)
    with server.client() as client:
        assert damage(client, name_of(lookup), near_bucket(lookup))
    assert look_up(lookup.stage.pipeline, TEXTS, server.address) == find_texts(lookup, TEXTS)
    assert num_inserted(server) == 2 * 14 * num_signed_and_kept(lookup)


@pytest.mark.parametrize("damage", BUCKETS_DAMAGED.values(), ids=BUCKETS_DAMAGED)
def test_a_damaged_bucket_gives_no_answer_and_the_next_look_up_builds_again(
    server: Server, lookup: Lookup, damage: Damage
) -> None:
    redis_index(lookup, server.address)
    with server.client() as client:
        assert damage(client, name_of(lookup), near_bucket(lookup))
    where = re.escape(f"Redis at {server.address}: index {name_of(lookup).decode()}: expected")
    with pytest.raises(FormatError, match=f"^{where} .*look up again") as caught:
        look_up(lookup.stage.pipeline, [NEAR], server.address)
    assert str(caught.value).isprintable()
    assert look_up(lookup.stage.pipeline, TEXTS, server.address) == find_texts(lookup, TEXTS)
    assert num_inserted(server) >= 2 * 14 * num_signed_and_kept(lookup)


def test_the_lost_bucket_is_named(server: Server, lookup: Lookup) -> None:
    redis_index(lookup, server.address)
    with server.client() as client:
        client.delete(near_bucket(lookup))
    with pytest.raises(FormatError) as caught:
        look_up(lookup.stage.pipeline, [NEAR], server.address)
    assert repr(near_bucket(lookup)) in str(caught.value)


def test_whichever_single_key_is_lost_the_answer_is_right_or_refused(server: Server, lookup: Lookup) -> None:
    _, whole = redis_index(lookup, server.address)
    expected = find_texts(lookup, [NEAR])
    near = near_bucket(lookup)
    refused = 0
    with server.client() as client:
        others = of_type(client, b"set", name_of(lookup))
        for key in [near, *others[:20]]:
            kept = client.dump(key)
            client.delete(key)
            try:
                with whole.reading():
                    assert find_texts(lookup, [NEAR], redis_index(lookup, server.address)[0]) == expected
            except FormatError:
                refused += 1
                client.set(whole.basename + b"_complete", whole.marker)
            client.restore(key, 0, kept)
    assert 0 < refused < 21


def test_an_index_that_changes_while_it_is_read_gives_no_answer(server: Server, lookup: Lookup) -> None:
    def reading() -> WholeIndex:
        return redis_index(lookup, server.address)[1]

    with server.client() as client:
        marker = name_of(lookup) + b"_complete"
        with pytest.raises(FormatError, match="found it changed"), reading().reading():
            client.delete(marker)
        first, second = reading(), []
        with pytest.raises(FormatError, match="found it changed"), first.reading():
            second += [client.delete(marker), reading()]
        assert client.get(marker) == second[1].marker != first.marker  # another builder's index stays
    with second[1].reading():
        pass


def test_old_indexes_are_removed_by_the_command_of_the_readme(server: Server, lookup: Lookup) -> None:
    redis_index(lookup, server.address)
    with server.client() as client:
        client.set("another program's", b"kept")
        client.sadd(b"corpusmill:0123_bucket_\0\0\n * ' \xff", b"of earlier clusters")
    readme = (small_corpus.ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^`(python -c .*remove_indexes.*)`\.$", readme, re.MULTILINE)
    _, *arguments = shlex.split(line.replace("HOST:PORT", str(server.address)))
    subprocess.run([sys.executable, *arguments], cwd=small_corpus.ROOT, check=True)
    with server.client() as client:
        assert client.keys() == [b"another program's"]
    assert look_up(lookup.stage.pipeline, TEXTS, server.address) == find_texts(lookup, TEXTS)


def test_a_builder_notices_that_its_index_is_removed(server: Server) -> None:
    name = b"corpusmill:ab"
    with server.client() as client:

        def build(still_here) -> None:
            client.hset(name + b"_keys", b"a", b"b")
            remove_indexes(server.address)
            client.hset(name + b"_keys", b"c", b"d")

        with pytest.raises(StateMismatch, match="expected to build it alone"):
            build_once(server.address, name, 2, build)
        assert not client.exists(name + b"_complete")


def test_a_server_that_may_forget_is_refused(server: Server, lookup: Lookup) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(SourceError, match="allkeys-lru"):
        redis_index(lookup, server.address)


def test_a_full_server_is_an_error_and_leaves_no_whole_index(server: Server, lookup: Lookup) -> None:
    with server.client() as client:
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(SourceError, match="OutOfMemoryError"):
                redis_index(lookup, server.address)
        finally:
            client.config_set("maxmemory", 0)
    assert look_up(lookup.stage.pipeline, TEXTS, server.address) == find_texts(lookup, TEXTS)


@pytest.mark.parametrize("password", ["wrong-but-not-to-be-shown", None])
def test_a_wrong_password_is_an_error_that_does_not_show_it(
    server: Server, lookup: Lookup, password: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if password is None:
        monkeypatch.delenv(PASSWORD_VARIABLE)
    else:
        monkeypatch.setenv(PASSWORD_VARIABLE, password)
    with pytest.raises(SourceError, match=f"AuthenticationError.*{PASSWORD_VARIABLE}") as caught:
        redis_index(lookup, server.address)
    assert "not-to-be-shown" not in str(caught.value)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_password_of_any_bytes_is_sent_as_it_is_and_never_shown(
    server: Server, lookup: Lookup, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "not-to-be-\udcffshown")  # how Python reads the byte 0xff
    with server.client() as client:
        client.config_set("requirepass", b"not-to-be-\xffshown" if is_right else b"another")
        try:
            if is_right:
                assert look_up(lookup.stage.pipeline, TEXTS, server.address) == find_texts(lookup, TEXTS)
            else:
                with pytest.raises(SourceError, match=f"AuthenticationError.*{PASSWORD_VARIABLE}") as caught:
                    look_up(lookup.stage.pipeline, TEXTS, server.address)
                assert "shown" not in str(caught.value)
        finally:
            client.config_set("requirepass", PASSWORD)


@contextlib.contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[RedisAddress]:
    """A server that is not Redis: it gives one answer to whatever is sent."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while received := self.request.recv(1 << 16):
                self.request.sendall(answer(received))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield RedisAddress(host="127.0.0.1", port=listening.server_address[1])
        finally:
            listening.shutdown()
            thread.join(30)


@pytest.mark.parametrize(
    "answer",
    [
        lambda received: (
            b"-ERR unknown command `HELLO`, with args beginning with: `3`, `AUTH`, `default`, `not-to-be"
            b"-shown-4711`\r\n"
        ),
        lambda received: b"-ERR what is not-to-be-shown-4711?\r\n",
        lambda received: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        lambda received: b":no number\r\n",
        lambda received: received,
    ],
    ids=["old", "asking back", "http", "numbers", "echo"],
)
def test_what_is_not_a_redis_server_is_an_error_that_shows_no_password(
    lookup: Lookup, answer: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    with answering(answer) as address:
        with pytest.raises(SourceError, match=f"Redis at {address}: expected") as caught:
            look_up(lookup.stage.pipeline, ["a"], address)
        assert "shown-4711" not in str(caught.value)


def test_nobody_listening_is_an_error(lookup: Lookup) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connecting is refused
        address = RedisAddress(host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(SourceError, match=f"Redis at {address}: expected an answer, found ConnectionError"):
            look_up(lookup.stage.pipeline, ["a"], address)


def test_the_command_looks_in_redis_and_shows_no_password(
    server: Server, clean: Built, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORPUSMILL_RECIPE", str(clean.recipe))
    monkeypatch.setenv("CORPUSMILL_HOME", str(clean.home))

    def find(*arguments: str) -> tuple[int, str, str]:
        status = main(["find", *arguments])
        out, err = capfd.readouterr()
        assert "not-to-be-shown" not in out + err
        return status, out, err

    there = str(server.address)
    by_search = find("--json", NEAR)
    assert by_search[0] == 0
    assert num_inserted(server) == 0
    assert find("--json", NEAR, "--redis", there) == by_search
    built = num_inserted(server)
    assert built > 0
    monkeypatch.setenv(REDIS_VARIABLE, there)
    assert find(UNKNOWN)[0] == 1
    assert num_inserted(server) == built
    with server.client() as client:
        client.sadd(near_bucket(open_lookup(pipeline_of(clean))), b"\xff")
    status, out, err = find(NEAR)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"FormatError: Redis at {there}: index corpusmill:")
    assert find("--json", NEAR) == by_search
    monkeypatch.setenv(PASSWORD_VARIABLE, "also-not-to-be-shown")
    status, out, err = find(NEAR)
    assert (status, out) == (2, "")
    assert "AuthenticationError" in err
