"""Every fault at every moment in every place that is not a folder.

The law: what passes is tried again and the tables are those of the local files; what stays is one SourceError that says
what was expected, what was found and what to do; nothing is half written, and when the fault is over, all is right.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import file_server
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from file_server import BUCKET, REPOSITORY, SIGNATURE, Answer, Fault, FileServer, serving_files

from resources.artifact_store import ArtifactStore
from resources.listings import Pool, PoolFolder, PoolInBucket, PoolOfUrls, PoolOnHub
from resources.readers import Network
from resources.row_group_source import list_files, read_row_groups
from resources.s3 import Bucket
from resources.web import Patience
from training_io.errors import SourceError

NAMES = ("a.parquet", "b.parquet", "c.parquet")
PLACES = ("hub", "web", "s3")
MOMENTS = ("listing", "footer", "data")
SECRETS = ("hf_sentineltoken", "SENTINELKEY", "sentinelsecret")
NUM_TRIES = 2
LISTED = {"hub": "/api/", "web": "bytes=-8", "s3": f"/{BUCKET}"}

PASSING: dict[str, Fault] = {
    "overload": file_server.status(429),
    "overload until": file_server.status(429, Retry_After="3"),
    "fault of the server": file_server.status(500),
    "not now": file_server.status(503),
    "reset": file_server.reset,
    "cut short": file_server.cut_short,
    "silence": file_server.silent(1.5),
    "one byte less": file_server.shorter,
    "another range": file_server.another_range,
    "no range": file_server.without_content_range,
}
STAYING: dict[str, Fault] = {
    "forbidden": file_server.status(403),
    "gone": file_server.status(404),
    "sent on to nowhere": file_server.status(301),
    "compressed": file_server.encoded,
    "page of a proxy": lambda _, answer: Answer(200, b"<html>please log in</html>", {"ETag": '"x"'}),
    "changed": file_server.changed,
}
# What a fault is none of: a listing is no range, and its own ETag is looked at by nobody.
NONE_OF_A_LISTING = ("another range", "no range", "changed")
# Those of no consequence: the last eight bytes are asked for to learn the size.
HARMLESS_FOR_A_SIZE = ("one byte less", "another range")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 100 kB with row groups of 100 rows: a footer's request ends with the file, no other one does."""
    for number, name in enumerate(NAMES):
        noise = random.Random(number)
        texts = [f"{name} {row} " + noise.randbytes(200).hex() for row in range(300)]
        path = tmp_path / "files" / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": texts}), path, row_group_size=100, compression="snappy")
    return tmp_path / "files"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving_files(folder) as one:
        one.secrets, one.is_private = {SECRETS[1]: SECRETS[2]}, True
        values = {"HF_ENDPOINT": one.url, "HF_TOKEN": SECRETS[0], "AWS_SESSION_TOKEN": ""}
        values |= {"AWS_ACCESS_KEY_ID": SECRETS[1], "AWS_SECRET_ACCESS_KEY": SECRETS[2]}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        yield one


def pool_at(place: str, server: FileServer) -> Pool:
    if place == "hub":
        return PoolOnHub(name="web", repository=REPOSITORY, revision="main", folder="set", glob="*.parquet")
    if place == "web":
        return PoolOfUrls(name="web", urls=tuple(f"{server.url}/files/set/{name}" for name in NAMES))
    bucket = Bucket(name=BUCKET, endpoint=server.url, region=file_server.REGION, is_anonymous=False)
    return PoolInBucket(name="web", bucket=bucket, prefix="set", glob="*.parquet")


def read(pool: Pool, network: Network) -> list[tuple[str, int, list[str]]]:
    return [
        (file.file, fetched.row_group, table.column("text").to_pylist())
        for file in list_files([pool], network)
        for fetched, table in read_row_groups(file, [0, 2], ["text"], network)
    ]


def aim_at(moment: str, place: str, fault: str, folder: Path) -> Callable[[str, str], bool]:
    """Which requests belong to a moment; on the Hub bytes come from the store, and what they are called from the Hub."""
    sizes = {name: (folder / "set" / name).stat().st_size for name in NAMES}
    prefix = {"hub": "/datasets/" if fault in ("changed", "sent on to nowhere") else "/store/", "s3": f"/{BUCKET}/"}

    def is_meant(path: str, asked: str) -> bool:
        if moment == "listing":
            return asked == LISTED["web"] if place == "web" else path.startswith(LISTED[place]) and not asked
        is_footer = asked.endswith(f"-{sizes.get(path.rpartition('/')[2], 0) - 1}")
        is_size = asked == LISTED["web"]
        return path.startswith(prefix.get(place, "/files/")) and not is_size and is_footer == (moment == "footer")

    return is_meant


CELLS = [
    pytest.param(place, moment, fault, id=f"{place}-{moment}-{fault}")
    for place in PLACES
    for moment in MOMENTS
    for fault in (*PASSING, *STAYING)
    if not (moment == "listing" and place != "web" and fault in NONE_OF_A_LISTING)
]


@pytest.mark.parametrize(("place", "moment", "name"), CELLS)
def test_a_fault_ends_in_the_right_tables_or_in_one_clear_error(
    place: str, moment: str, name: str, server: FileServer, folder: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    waits: list[float] = []
    patience = Patience(
        num_tries=NUM_TRIES,
        timeout_seconds=1.0,
        sleep=lambda _, seconds: waits.append(seconds),
        jitter=lambda: 0.0,
        warn=said.append,
    )
    network = Network(store=ArtifactStore(tmp_path / "home"), patience=patience)
    pool = pool_at(place, server)
    right = read(PoolFolder(name="web", folder=folder / "set", glob="*.parquet"), network)
    fault = (PASSING | STAYING)[name]
    server.aim = aim_at(moment, place, name, folder)
    is_size, is_page = moment == "listing" and place == "web", moment == "listing" and place != "web"
    is_harmless = is_size and name in HARMLESS_FOR_A_SIZE
    passes = name in PASSING and not (is_page and name == "one byte less")  # half a page says so at once

    server.faults = [fault] * 1_000
    if is_harmless:
        assert read(pool, network) == right
    else:
        with pytest.raises(SourceError) as caught:
            read(pool, network)
        message = str(caught.value)
        assert "expected" in message
        assert "found" in message
        assert f"in {NUM_TRIES} tries" in message or not passes
        assert message.rstrip().endswith(".")
        assert not any(secret in text for text in (message, *said) for secret in (*SECRETS, SIGNATURE))
        assert not said or passes
    assert not [path for path in (tmp_path / "home").rglob("*") if path.name.startswith(".tmp-")]
    if name == "overload until":
        assert set(waits) == {3.0}

    server.faults = [fault] * (NUM_TRIES - 1) if passes else []
    again = replace(network, store=ArtifactStore(tmp_path / "other"))
    assert read(pool, again) == right
    assert not server.faults
    assert read(pool, network) == right  # where it failed before
