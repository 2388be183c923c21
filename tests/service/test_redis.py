"""The index of kept documents in a real Redis server: built once, reused, never half-built, its password never shown."""

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_corpus
from small_corpus import Built

from pipeline_assets.__main__ import main
from pipeline_assets.lookup import Lookup, find_texts, look_up, memory_index, open_lookup, redis_index
from pipeline_assets.recipe import load_recipe
from pipeline_assets.references import Pipeline
from resources.artifact_store import ArtifactStore
from resources.redis_index import PASSWORD_VARIABLE, REDIS_VARIABLE, RedisAddress, build_once
from training_io.errors import SourceError, StateMismatch

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
    index = redis_index(lookup, server.address)
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
    with pytest.raises(FileNotFoundError):
        redis_index(lookup, server.address)
    assert 0 < num_inserted(server) < 14 * num_signed_and_kept(open_lookup(pipeline_of(clean)))
    (tmp_path / "aside").rename(last)
    index = redis_index(lookup, server.address)
    assert find_texts(lookup, TEXTS, index) == find_texts(lookup, TEXTS)
    assert len(index.keys) == num_signed_and_kept(lookup)
    assert {len(bands) for bands in index.keys.getmany(*index.keys)} == {14}  # what the first one left is gone


def test_what_a_killed_builder_left_is_taken_over(server: Server, lookup: Lookup) -> None:
    name = f"corpusmill:{lookup.identity[:32]}".encode()
    with server.client() as client:
        client.set(b"lock_" + name, b"of a process that is gone", px=300)
        client.sadd(name + b"_bucket_\0\0stale", b"ff" * 32)
        client.hset(name + b"_keys", b"ff" * 32, b"stale")
        index = redis_index(lookup, server.address)
        assert not client.exists(name + b"_bucket_\0\0stale")
    assert len(index.keys) == num_signed_and_kept(lookup)
    assert find_texts(lookup, TEXTS, index) == find_texts(lookup, TEXTS)


def test_a_builder_that_was_silent_for_too_long_does_not_finish(server: Server) -> None:
    with server.client() as client:

        def build(still_here) -> int:
            client.set(b"lock_" + NAME, b"another one")
            return 3

        with pytest.raises(StateMismatch, match="expected to build it alone"):
            build_once(server.address, NAME, build)
        assert not client.exists(NAME + b"_complete")
        assert client.get(b"lock_" + NAME) == b"another one"


def test_a_builder_notices_while_it_builds(server: Server) -> None:
    with server.client() as client:

        def build(still_here) -> int:
            still_here()
            client.delete(b"lock_" + NAME)
            still_here()
            raise AssertionError("it went on")

        with pytest.raises(SourceError, match="Lock"):
            build_once(server.address, NAME, build)


def test_two_at_once_build_it_once(server: Server, lookup: Lookup) -> None:
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: look_up(lookup.stage.pipeline, TEXTS, server.address), range(4)))
    assert answers == [find_texts(lookup, TEXTS)] * 4
    assert num_inserted(server) == 14 * num_signed_and_kept(lookup)


def test_an_index_that_lost_its_keys_is_built_again(server: Server, lookup: Lookup) -> None:
    redis_index(lookup, server.address)
    with server.client() as client:
        client.delete(f"corpusmill:{lookup.identity[:32]}_keys")
    redis_index(lookup, server.address)
    assert num_inserted(server) == 2 * 14 * num_signed_and_kept(lookup)


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
    assert find_texts(lookup, TEXTS, redis_index(lookup, server.address)) == find_texts(lookup, TEXTS)


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
    monkeypatch.setenv(PASSWORD_VARIABLE, "also-not-to-be-shown")
    status, out, err = find(NEAR)
    assert (status, out) == (2, "")
    assert "AuthenticationError" in err
