"""Row groups over the network, from a loopback server that fails as the Hub, web servers, S3 and what is between do.

The law: whatever happens on the way, the tables are those of the local files, or there is one SourceError.
"""

import hashlib
import json
import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import file_server
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_server import BUCKET, COMMIT, REPOSITORY, SIGNATURE, Fault, FileServer, serving_files

import resources.web
from resources.artifact_store import ArtifactStore
from resources.listings import Pool, PoolFolder, PoolInBucket, PoolOfUrls, PoolOnHub
from resources.readers import Network
from resources.row_group_source import SourceFile, list_files, list_with_cost, listing_fingerprint, read_row_groups
from resources.s3 import Bucket
from resources.web import End, Patience
from training_io.errors import RecipeError, SourceError

COLUMNS = ("text", "id", "url", "score")
NAMES = ("a.parquet", "c.parquet", "deep/b.parquet")
PLACES = ("hub", "web", "s3")
SECRETS = ("hf_sentineltoken", "SENTINELKEY", "sentinelsecret", "sentinelsession")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files with row groups of 100 rows, below a folder `set`."""
    for number, name in enumerate(NAMES):
        rows = range(1_000 * number, 1_000 * number + 500)
        noise = random.Random(number)
        table = pa.table(
            {
                "text": [f"{name} {row} " + noise.randbytes(200).hex() for row in rows],
                "id": [str(row) for row in rows],
                "file_path": [noise.randbytes(100).hex() for _ in rows],
                "url": [f"https://example/{row}" for row in rows],
            }
        )
        path = tmp_path / "files" / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=100, compression="snappy")
    (tmp_path / "files" / "set" / "readme.md").write_text("no data")
    return tmp_path / "files"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving_files(folder) as one:
        one.secrets, one.is_private = {SECRETS[1]: SECRETS[2]}, True
        monkeypatch.setenv("HF_ENDPOINT", one.url)
        monkeypatch.setenv("HF_TOKEN", SECRETS[0])
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        for name, value in zip(names, SECRETS[1:], strict=True):
            monkeypatch.setenv(name, value)
        yield one


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def network(tmp_path: Path, waits: list[float], said: list[str]) -> Network:
    patience = Patience(
        sleep=lambda _, seconds: waits.append(seconds), jitter=lambda: 0.0, warn=said.append, timeout_seconds=1.0
    )
    return Network(store=ArtifactStore(tmp_path / "home"), patience=patience)


def pool_at(place: str, server: FileServer, *, is_anonymous: bool = False) -> Pool:
    if place == "hub":
        return PoolOnHub(name="web", repository=REPOSITORY, revision="main", folder="set", glob="**/*.parquet")
    if place == "web":
        return PoolOfUrls(name="web", urls=tuple(f"{server.url}/files/set/{name}" for name in reversed(NAMES)))
    bucket = Bucket(name=BUCKET, endpoint=server.url, region="us-east-1", is_anonymous=is_anonymous)
    return PoolInBucket(name="web", bucket=bucket, prefix="set", glob="**/*.parquet")


def local_pool(folder: Path) -> PoolFolder:
    return PoolFolder(name="web", folder=folder / "set", glob="**/*.parquet")


Read = list[tuple[str, int, dict[str, object]]]


def read(files: Sequence[SourceFile], network: Network, row_groups: Sequence[int] = (3, 1)) -> Read:
    return [
        (file.file, fetched.row_group, table.to_pydict())
        for file in files
        for fetched, table in read_row_groups(file, row_groups, COLUMNS, network)
    ]


def refused(files: Sequence[SourceFile], network: Network) -> str:
    with pytest.raises(SourceError) as caught:
        read(files, network)
    return str(caught.value)


def no_secret_in(*texts: str) -> None:
    for text in texts:
        assert not any(secret in text for secret in (*SECRETS, SIGNATURE)), text


def test_what_ends_the_whole_ends_its_parts_and_none_ends_the_whole() -> None:
    whole = End()
    first, second = whole.part(), whole.part()
    first.set()
    assert (whole.is_set(), second.is_set()) == (False, False)
    whole.set()
    assert (second.is_set(), whole.part().is_set()) == (True, True)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_gives_the_tables_and_facts_of_the_local_files(
    place: str, server: FileServer, folder: Path, network: Network
) -> None:
    files, local = list_files([pool_at(place, server)], network), list_files([local_pool(folder)], network)
    assert [(file.file, file.size_bytes, file.footer_sha256, file.row_groups) for file in files] == [
        (file.file, file.size_bytes, file.footer_sha256, file.row_groups) for file in local
    ]
    assert [file.file for file in files] == list(NAMES)
    assert {file.commit for file in files} == {COMMIT if place == "hub" else ""}
    found = read(files, network)
    assert found == read(local, network)
    assert all(set(table) == {"text", "id", "url"} for _, _, table in found)


@pytest.mark.parametrize("place", PLACES)
def test_requests_and_bytes_are_counted_as_the_server_sees_them(
    place: str, server: FileServer, network: Network
) -> None:
    server.faults = [file_server.status(503), file_server.cut_short]
    read(list_files([pool_at(place, server)], network), network)
    assert not server.faults
    assert network.traffic.num_requests == len(server.log)
    assert network.traffic.num_bytes == sum(one.sent for one in server.log)
    assert network.traffic.num_tries == len(server.log) - sum(one.status == 302 for one in server.log)


@pytest.mark.parametrize("place", PLACES)
def test_listings_footers_and_row_groups_are_counted_apart(place: str, server: FileServer, network: Network) -> None:
    files, cost = list_with_cost([pool_at(place, server)], network)
    is_footer = [one.range != "bytes=-8" and bool(one.range) for one in server.log]
    for traffic, wanted in ((cost.names, False), (cost.footers, True)):
        own = [one for one, footer in zip(server.log, is_footer, strict=True) if footer is wanted]
        assert own
        assert (traffic.num_requests, traffic.num_bytes) == (len(own), sum(one.sent for one in own))
    server.log.clear()
    fetched = [one for one, _ in read_row_groups(files[0], [3, 0, 1], COLUMNS, network)]
    assert [one.row_group for one in fetched] == [3, 0, 1]
    for one in fetched:
        assert one.traffic.num_tries == len(one.ranges) > 0
        assert one.traffic.num_bytes == sum(end - start for start, end in one.ranges)
    assert sum(one.traffic.num_requests for one in fetched) == len(server.log)
    again = list_with_cost([pool_at(place, server)], network)[1]
    assert again.footers.num_requests == 0
    assert again.names.num_requests == cost.names.num_requests
    records = [
        json.loads(path.read_text())["source"] for path in network.store.root.glob("source_footers/*/*/run.json")
    ]
    assert sum(record["requests"] for record in records) == cost.footers.num_requests
    assert sum(record["bytes_fetched"] for record in records) == cost.footers.num_bytes


@pytest.mark.parametrize("place", PLACES)
def test_only_the_chosen_columns_cross_the_network_and_each_footer_once(
    place: str, server: FileServer, folder: Path, network: Network
) -> None:
    files = list_files([pool_at(place, server)], network)
    server.log.clear()
    assert list_files([pool_at(place, server)], network) == files
    assert sum(one.sent for one in server.data()) <= 8 * len(files)  # a new listing, the footers that are known
    server.log.clear()
    list(read_row_groups(files[0], [2], COLUMNS, network))
    chunks = [pq.read_metadata(folder / "set" / NAMES[0]).row_group(2).column(number) for number in range(4)]
    wanted = sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in COLUMNS)
    fetched = sum(one.sent for one in server.data())
    assert wanted <= fetched <= 1.05 * wanted
    assert wanted < 0.8 * sum(chunk.total_compressed_size for chunk in chunks)


PASSING: dict[str, Fault] = {
    "overload": file_server.status(429),
    "fault of the server": file_server.status(500),
    "not now": file_server.status(503),
    "cut short": file_server.cut_short,
    "reset": file_server.reset,
    "one byte less": file_server.shorter,
    "another range": file_server.another_range,
    "no range": file_server.without_content_range,
    "silence": file_server.silent(1.5),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_tried_again_and_the_tables_are_right(
    name: str, place: str, server: FileServer, folder: Path, network: Network, waits: list[float], said: list[str]
) -> None:
    files = list_files([pool_at(place, server)], network)
    server.faults = [PASSING[name]] * 2
    assert read(files, network) == read(list_files([local_pool(folder)], network), network)
    assert not server.faults
    assert len(waits) == len(said) == 2
    assert all("trying again in" in text for text in said)
    no_secret_in(*said)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [name for name in PASSING if name != "silence"])
def test_what_does_not_pass_is_one_error_that_names_file_range_and_cause(
    name: str, place: str, server: FileServer, network: Network, said: list[str]
) -> None:
    files = list_files([pool_at(place, server)], network)
    server.faults = [PASSING[name]] * 100
    message = refused(files, network)
    assert NAMES[0] in message
    assert "expected bytes " in message
    assert "in 5 tries" in message
    assert "Check the network" in message
    cause = {"overload": "429", "fault of the server": "500", "not now": "503"}.get(name, "found ")
    assert cause in message
    no_secret_in(message, *said, repr(network), repr(network.hub), repr(files))


def test_a_server_that_stays_silent_is_given_up(server: FileServer, network: Network) -> None:
    files = list_files([pool_at("web", server)], network)
    server.faults = [file_server.silent(1.5)] * 5 * len(files) * 2
    assert "found no answer within 1 s in 5 tries" in refused(files[:1], network)


def test_a_server_that_sends_a_little_at_a_time_is_given_up(
    server: FileServer, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list_files([pool_at("web", server)], network)
    monkeypatch.setattr(resources.web, "MIN_BYTES_PER_SECOND", 10**9)
    hasty = replace(network, patience=replace(network.patience, num_tries=1))
    server.faults = [file_server.dripping] * 100
    assert "bytes after so long a time that it was given up in one try" in refused(files[:1], hasty)


PAGE_OF_A_PROXY = file_server.Answer(200, b"<html>please log in</html>", {})
LISTINGS: dict[str, tuple[Fault, str]] = {
    "overload": (
        file_server.status(503),
        "found HTTP 503 Service Unavailable in 5 tries. Check the network and HF_ENDPOINT",
    ),
    "another page": (lambda *_: PAGE_OF_A_PROXY, "expected JSON, found b'<html>please log in</html>'"),
    "other entries": (
        lambda *_: file_server.Answer(200, b'[{"type": "file", "path": "a", "size": 1, "oid": "x"}]', {}),
        "expected entries with path, size and oid, found ",
    ),
    "gated": (
        file_server.status(403, X_Error_Code="GatedRepo"),
        "HTTP 403 Forbidden (GatedRepo) in one try. Set HF_TOKEN",
    ),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_a_listing_that_the_hub_does_not_give_is_one_error(name: str, server: FileServer, network: Network) -> None:
    fault, part = LISTINGS[name]
    server.lasting = {f"/tree/{COMMIT}/set": fault}
    with pytest.raises(SourceError) as caught:
        list_files([pool_at("hub", server)], network)
    assert part in str(caught.value)
    no_secret_in(str(caught.value))


AT_ONCE: dict[str, tuple[Fault, str]] = {
    "whole file": (lambda _, answer: file_server.Answer(200, b"", {"ETag": '"x"'}), "HTTP 200 OK, the whole file"),
    "changed": (file_server.changed, "found one with ETag 'other'"),
    "compressed": (file_server.encoded, "Content-Encoding 'gzip'"),
    "forbidden": (file_server.status(403), "HTTP 403 Forbidden"),
    "gone": (file_server.status(404), "HTTP 404 Not Found"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_another_try_would_not_change_is_said_at_once(
    name: str, server: FileServer, network: Network, waits: list[float]
) -> None:
    files = list_files([pool_at("web", server)], network)
    fault, part = AT_ONCE[name]
    server.faults = [fault] * 100
    assert part in refused(files, network)
    assert not waits


def test_retry_after_and_the_window_of_the_hub_are_waited_for(
    server: FileServer, network: Network, waits: list[float]
) -> None:
    files = list_files([pool_at("hub", server)], network)
    asked = [{"Retry-After": "17"}, {"RateLimit": '"resolvers";r=0;t=57'}]
    server.faults = [lambda _, answer, headers=headers: file_server.Answer(429, b"", headers) for headers in asked]
    list(read_row_groups(files[0], [0], COLUMNS, network))
    assert waits == [17, 57]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_longer", [False, True])
def test_a_file_that_changes_after_the_listing_is_refused(
    place: str, is_longer: bool, server: FileServer, folder: Path, network: Network, waits: list[float]
) -> None:
    files = list_files([pool_at(place, server)], network)
    path = folder / "set" / NAMES[0]
    content = path.read_bytes()
    path.write_bytes(content + b"more" if is_longer else content[:100] + b"other" + content[105:])
    message = refused(files, network)
    assert NAMES[0] in message
    if is_longer:
        assert "another range" in message or "with ETag" in message
    else:
        assert "It changed during the run; materialize raw_row_groups again." in message
        assert not waits


def test_bytes_that_are_no_parquet_are_one_error(server: FileServer, network: Network) -> None:
    files = list_files([pool_at("s3", server)], network)
    server.faults = [lambda _, answer: file_server.Answer(206, bytes(len(answer.body)), answer.headers)]
    assert "expected readable row groups, found" in refused(files, network)


@pytest.mark.parametrize("place", PLACES)
def test_a_listed_file_may_go_to_another_process_and_takes_no_secret_along(
    place: str, server: FileServer, network: Network
) -> None:
    files = list_files([pool_at(place, server)], network)
    packed = pickle.dumps(files)
    no_secret_in(packed.decode("latin-1"))
    assert read(pickle.loads(packed), network) == read(files, network)


def test_the_token_goes_to_the_hub_alone(server: FileServer, network: Network) -> None:
    read(list_files([pool_at("hub", server)], network), network)
    asked = {(one.path.split("/")[1], one.authorization) for one in server.log}
    assert asked == {("api", f"Bearer {SECRETS[0]}"), ("datasets", f"Bearer {SECRETS[0]}"), ("store", "")}
    server.log.clear()
    read(list_files([pool_at("web", server)], network), network)
    assert {one.authorization for one in server.log} == {""}


def test_a_bucket_is_read_with_credentials_of_the_environment_or_with_none(
    server: FileServer, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(list_files([pool_at("s3", server)], network), network)
    assert all(f"Credential={SECRETS[1]}/" in one.authorization for one in server.log)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(RecipeError, match="expected credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        list_files([pool_at("s3", server)], network)
    server.log.clear()
    with pytest.raises(SourceError, match=r"the list of objects of s3://bucket/set/.*HTTP 403 Forbidden in one try"):
        list_files([pool_at("s3", server, is_anonymous=True)], network)
    server.is_private = False
    read(list_files([pool_at("s3", server, is_anonymous=True)], network), network)
    assert {one.authorization for one in server.log} == {""}


@pytest.mark.parametrize(
    ("changes", "secret", "parts"),
    [
        ({"name": "another"}, SECRETS[2], ("HTTP 404 Not Found in one try", "Mend the bucket, the prefix")),
        ({"region": "eu-west-1"}, SECRETS[2], ("HTTP 403 Forbidden in one try", "Set AWS_ACCESS_KEY_ID")),
        ({}, "anothersecret", ("HTTP 403 Forbidden in one try", "Set AWS_ACCESS_KEY_ID")),
    ],
)
def test_what_a_bucket_refuses_is_said_at_once(
    changes: dict[str, str], secret: str, parts: tuple[str, ...], server: FileServer, network: Network,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pool = pool_at("s3", server)
    assert isinstance(pool, PoolInBucket)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(SourceError) as caught:
        list_files([replace(pool, bucket=replace(pool.bucket, **changes))], network)
    for part in parts:
        assert part in str(caught.value)
    no_secret_in(str(caught.value))
    assert secret not in str(caught.value)


def test_a_failed_connection_ends_the_waits_of_the_others(server: FileServer, tmp_path: Path) -> None:
    waiting = threading.Event()
    network = Network(store=ArtifactStore(tmp_path / "home"), patience=Patience(warn=lambda _: waiting.set()))
    files = list_files([pool_at("web", server)], network)
    server.faults = [
        file_server.status(503, Retry_After="200"),
        lambda handler, answer: waiting.wait(10) and file_server.Answer(404, b"", {}),
    ] * 2
    assert "HTTP 404" in refused(files, network)


def test_a_server_that_gives_no_ranges_or_no_etag_is_told_when_it_is_listed(
    server: FileServer, network: Network
) -> None:
    server.faults = [AT_ONCE["whole file"][0]]
    with pytest.raises(SourceError, match="The server gives no ranges: download the files and read a local folder"):
        list_files([pool_at("web", server)], network)
    server.faults = [
        lambda _, answer: file_server.Answer(206, answer.body, {"Content-Range": answer.headers["Content-Range"]})
    ]
    with pytest.raises(SourceError, match="found neither ETag nor Last-Modified in one try"):
        list_files([pool_at("web", server)], network)


@pytest.mark.parametrize("place", PLACES)
def test_a_footer_that_comes_damaged_is_one_error_and_not_kept(
    place: str, server: FileServer, network: Network
) -> None:
    damaged = [lambda _, answer: file_server.Answer(206, b"x" * len(answer.body), answer.headers)] * 3
    server.faults = ([file_server.none] * 3 if place == "web" else []) + damaged
    with pytest.raises(SourceError, match=r"expected the Parquet end mark b'PAR1', found b'xxxx'"):
        list_files([pool_at(place, server)], network)
    server.faults = []
    assert len(list_files([pool_at(place, server)], network)) == 3


def test_the_same_bytes_at_a_new_commit_have_the_fingerprint_of_the_old_one(
    server: FileServer, folder: Path, network: Network
) -> None:
    before = list_files([pool_at("hub", server)], network)
    server.commits = {"main": "f" * 40}
    after = list_files([pool_at("hub", server)], network)
    assert {file.commit for file in after} == {"f" * 40}
    assert [file.provenance for file in after] == [file.provenance for file in before]
    assert listing_fingerprint(after) == listing_fingerprint(before)
    path = folder / "set" / NAMES[0]
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"other" + content[105:])  # same size, same footer
    changed = list_files([pool_at("hub", server)], network)
    assert [file.file for file in changed] == [file.file for file in after]
    assert [one != other for one, other in zip(changed, after, strict=True)] == [True, False, False]
    assert listing_fingerprint(changed) != listing_fingerprint(after)


def test_whole_files_on_disk_serve_their_row_groups(
    server: FileServer, folder: Path, network: Network, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    for name in NAMES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((folder / "set" / name).read_bytes())
    content = (copy / NAMES[1]).read_bytes()
    (copy / NAMES[1]).write_bytes(content[:-1])  # cut short
    (copy / NAMES[2]).write_bytes(b"x" + content[1:])  # other bytes
    pool = PoolOnHub(
        name="web", repository=REPOSITORY, revision="main", folder="set", glob="**/*.parquet", local_folder=copy
    )
    files = list_files([pool], network)
    assert [isinstance(file.location, Path) for file in files] == [True, False, False]
    everywhere = list_files([pool_at("hub", server)], network)
    assert [file.provenance for file in files] == [file.provenance for file in everywhere]
    server.log.clear()
    found = read(files, network)
    assert all(NAMES[0] not in one.path for one in server.log)
    assert found == read(everywhere, network)


def test_a_revision_that_is_a_commit_is_not_asked_for(server: FileServer, network: Network) -> None:
    pool = PoolOnHub(name="web", repository=REPOSITORY, revision=COMMIT, folder="", glob="set/*.parquet")
    assert [file.file for file in list_files([pool], network)] == ["set/a.parquet", "set/c.parquet"]
    assert not [one for one in server.log if "/revision/" in one.path]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"revision": "gone"}, ("the commit of gone", "HTTP 404 Not Found (RevisionNotFound)", "Mend the repository")),
        ({"folder": "gone"}, ("the files of someone/corpus at 0123456789ab", "HTTP 404", "Mend the repository")),
        ({"glob": "*.csv"}, ("pool web", "matching '*.csv' in someone/corpus/set", "none among 4 files", "Mend")),
    ],
)
def test_what_the_hub_does_not_have_is_one_error(
    changes: dict[str, str], parts: tuple[str, ...], server: FileServer, network: Network
) -> None:
    asked = {"repository": REPOSITORY, "revision": "main", "folder": "set", "glob": "**/*.parquet", **changes}
    with pytest.raises(SourceError) as caught:
        list_files([PoolOnHub(name="web", **asked)], network)
    for part in parts:
        assert part in str(caught.value)


def test_a_prefix_without_objects_is_one_error(server: FileServer, network: Network) -> None:
    bucket = Bucket(name=BUCKET, endpoint=server.url, region="us-east-1", is_anonymous=False)
    with pytest.raises(SourceError, match="Mend the bucket, the prefix"):
        list_files([PoolInBucket(name="web", bucket=bucket, prefix="gone", glob="**/*.parquet")], network)


@pytest.mark.parametrize("place", PLACES)
def test_a_file_of_fewer_bytes_than_a_footer_is_one_error(
    place: str, server: FileServer, folder: Path, network: Network
) -> None:
    (folder / "set" / NAMES[0]).write_bytes(b"PAR1PAR1")
    with pytest.raises(SourceError, match=r"a\.parquet.*expected a Parquet file of at least 12 bytes, found 8"):
        list_files([pool_at(place, server)], network)


FINEWEB = ("text", "id", "dump", "url", "date", "file_path", "language", "language_score", "token_count")
FINEWEB_READ = ("text", "id", "dump", "url", "language", "language_score", "score")


@pytest.fixture(scope="module")
def fineweb_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in FineWeb's layout: row groups of 1,000 rows and about 3 MB in snappy, 97 % of it text."""
    noise = random.Random(7)
    words = ["".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=noise.randint(2, 9))) for _ in range(30_000)]
    folder = tmp_path_factory.mktemp("fineweb") / "files"
    folder.mkdir()
    schema = pa.schema(
        [(name, {"language_score": pa.float64(), "token_count": pa.int64()}.get(name, pa.string())) for name in FINEWEB]
    )
    with pq.ParquetWriter(folder / "000_00000.parquet", schema, compression="snappy") as writer:
        for group in range(8):
            rows = [
                {
                    "text": " ".join(noise.choices(words, k=460)),
                    "id": f"<urn:uuid:{noise.randbytes(16).hex()}>",
                    "dump": "CC-MAIN-2013-20",
                    "url": f"http://{noise.choice(words)}.com/{noise.choice(words)}/{row}",
                    "date": f"2013-05-{row % 28 + 1:02d}T{row % 24:02d}:00:00Z",
                    "file_path": f"s3://commoncrawl/crawl-data/CC-MAIN-2013-20/segments/{noise.randrange(10**13)}/warc/{group}",
                    "language": "en",
                    "language_score": noise.random(),
                    "token_count": 700 + row,
                }
                for row in range(1_000)
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=1_000)
    return folder / "000_00000.parquet"


@pytest.mark.parametrize("place", PLACES)
def test_a_stripe_of_four_moves_the_chosen_chunks_and_no_more_than_a_tenth_beside(
    place: str, fineweb_file: Path, server: FileServer, network: Network
) -> None:
    metadata = pq.read_metadata(fineweb_file)
    stripe = range(1, metadata.num_row_groups, 4)
    chunks = [metadata.row_group(group).column(number) for group in stripe for number in range(len(FINEWEB))]
    sizes = {name: sum(c.total_compressed_size for c in chunks if c.path_in_schema == name) for name in FINEWEB}
    assert 2_500_000 < sum(sizes.values()) / len(stripe) < 4_500_000
    assert sizes["text"] > 0.9 * sum(sizes.values())
    server.folder = fineweb_file.parent
    pool = {
        "hub": PoolOnHub(name="web", repository=REPOSITORY, revision="main", folder="", glob="*.parquet"),
        "web": PoolOfUrls(name="web", urls=(f"{server.url}/files/{fineweb_file.name}",)),
        "s3": PoolInBucket(name="web", bucket=pool_at("s3", server).bucket, prefix="", glob="*.parquet"),
    }[place]
    [file] = list_files([pool], network)
    tables = [table for _, table in read_row_groups(file, stripe, FINEWEB_READ, network)]
    assert sum(table.num_rows for table in tables) == 1_000 * len(stripe)
    wanted = sum(sizes[name] for name in FINEWEB_READ if name in sizes)
    footer = int.from_bytes(fineweb_file.read_bytes()[-8:-4], "little")
    sent = sum(one.sent for one in server.data())
    assert sent <= 1.1 * wanted + max(footer, 65_536) + 8
    assert sent < 0.3 * fineweb_file.stat().st_size
    assert len(server.data()) <= 2 * (2 * len(stripe) + 3)  # a redirect each, and no request a column
    with pq.ParquetFile(fineweb_file) as parquet:
        columns = [name for name in FINEWEB_READ if name in FINEWEB]
        for group, table in zip(stripe, tables, strict=True):
            assert table.select(columns).equals(parquet.read_row_group(group, columns=columns))


def test_every_answer_is_asked_of_the_pinned_commit(server: FileServer, folder: Path, network: Network) -> None:
    read(list_files([pool_at("hub", server)], network), network)
    resolved = [one.path for one in server.log if one.path.startswith("/datasets/")]
    assert resolved
    assert all(f"/resolve/{COMMIT}/" in path for path in resolved)
    hashes = {hashlib.sha256((folder / "set" / name).read_bytes()).hexdigest() for name in NAMES}
    assert {file.content for file in list_files([pool_at("hub", server)], network)} == {f"sha256:{h}" for h in hashes}
