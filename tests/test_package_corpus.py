import base64
import hashlib
from importlib import metadata

import pyarrow.parquet as pq
import pytest

from resources.package_corpus import (
    POOLS,
    choose_texts,
    corpus_inputs,
    offered_texts,
    runtime_distributions,
    write_package_corpus,
)
from training_io.errors import SourceError

PLENTY = {"prose": 10**9, "code": 10**9}
FINEWEB_SCHEMA = [
    ("text", "string"), ("id", "string"), ("dump", "string"), ("url", "string"), ("date", "string"),
    ("file_path", "string"), ("language", "string"), ("language_score", "double"), ("token_count", "int64"),
]  # fmt: skip


def install(site, name, files, *, requires=(), description="", version="1.0"):
    """Lay out an installed distribution; a file's key may be any path, as a broken RECORD might have it."""
    records = []
    for member, content in files.items():
        path = site / member
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        records.append(f"{member},sha256={digest},{len(content)}")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n{description}")
    (info / "RECORD").write_text("\n".join([*records, f"{name}-{version}.dist-info/RECORD,,"]))


def text_of(seed, size=400):
    return (f"{seed} words of a text. " * size)[:size].encode()


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def distributions(site):
    install(
        site,
        "alpha",
        {
            "alpha/module.py": text_of("module"),
            "alpha/README": text_of("readme"),
            "alpha/guide.RST": text_of("guide"),
            "alpha/LICENSE.txt": text_of("licence"),
            "alpha/data.json": text_of("data"),
            "alpha/tiny.py": b"x = 1",
            "alpha/huge.py": text_of("huge", 70_000),
            "alpha/latin.py": "é".encode("latin-1") * 300,
        },
        description=text_of("description", 1_000).decode(),
    )
    install(site, "beta", {"beta/module.py": text_of("beta"), "beta/NOTICE.md": text_of("notice")})
    return [metadata.distribution(name) for name in ("alpha", "beta")]


def members(texts, pool):
    return [text.member for text in texts if text.pool == pool]


def test_prose_and_code_are_offered_by_distribution_and_member(distributions):
    texts = offered_texts(distributions)
    assert members(texts, "code") == ["alpha/latin.py", "alpha/module.py", "beta/module.py"]
    assert members(texts, "prose") == [
        "METADATA#description",
        "alpha/LICENSE.txt",
        "alpha/README",
        "alpha/guide.RST",
        "beta/NOTICE.md",
    ]


def test_a_member_outside_the_packages_is_never_read(site, tmp_path):
    outside = tmp_path / "secret.md"
    files = {
        "../secret.md": text_of("secret"),
        str(outside): text_of("secret"),
        "gamma/../../secret.md": text_of("secret"),
    }
    (site / "gamma").mkdir()
    install(site, "gamma", {"gamma/fine.md": text_of("fine"), **files})
    assert outside.is_file()
    assert members(offered_texts([metadata.distribution("gamma")]), "prose") == ["gamma/fine.md"]


def test_a_table_has_finewebs_schema_and_our_addresses(distributions, tmp_path):
    texts = choose_texts(offered_texts(distributions), PLENTY)
    counts = write_package_corpus(tmp_path, texts)
    assert sorted(counts) == sorted(POOLS)
    for pool in POOLS:
        table = pq.read_table(tmp_path / pool / "000_00000.parquet")
        assert [(field.name, str(field.type)) for field in table.schema] == FINEWEB_SCHEMA
        assert counts[pool]["documents"] == table.num_rows
        assert counts[pool]["bytes"] == sum(len(text.encode()) for text in table.column("text").to_pylist())
        assert len(set(table.column("id").to_pylist())) == table.num_rows
    rows = {row["url"]: row for row in pq.read_table(tmp_path / "prose" / "000_00000.parquet").to_pylist()}
    readme = rows["pkg:pypi/alpha@1.0#alpha/README"]
    assert readme["text"].encode() == text_of("readme")
    assert (readme["dump"], readme["file_path"], readme["date"]) == ("alpha-1.0", "alpha/alpha/README", None)
    assert rows["pkg:pypi/alpha@1.0#METADATA#description"]["text"].encode() == text_of("description", 1_000)


def test_a_file_that_is_not_utf8_is_left_out(distributions, tmp_path):
    texts = choose_texts(offered_texts(distributions), PLENTY)
    assert "alpha/latin.py" in members(texts, "code")
    write_package_corpus(tmp_path, texts)
    paths = pq.read_table(tmp_path / "code" / "000_00000.parquet").column("file_path").to_pylist()
    assert paths == ["alpha/alpha/module.py", "beta/beta/module.py"]


def test_the_same_packages_give_the_same_bytes(distributions, tmp_path):
    written = []
    for name, order in (("one", distributions), ("other", distributions[::-1])):
        folder = tmp_path / name
        folder.mkdir()
        texts = choose_texts(offered_texts(order), PLENTY)
        write_package_corpus(folder, texts)
        written.append((corpus_inputs(texts), [(folder / pool / "000_00000.parquet").read_bytes() for pool in POOLS]))
    assert written[0] == written[1]


@pytest.mark.parametrize("limit", [400, 999, 1_000, 1_300, 1_799, 2_599])
def test_byte_limits_hold_for_each_pool_descriptions_included(distributions, tmp_path, limit):
    offered = offered_texts(distributions)
    texts = choose_texts(offered, {"prose": limit, "code": 800})
    counts = write_package_corpus(tmp_path, texts)
    assert 0 < counts["prose"]["bytes"] <= limit
    assert 0 < counts["code"]["bytes"] <= 800
    assert len(members(texts, "prose")) < 5
    assert texts == [text for text in offered if text in texts]  # the order stays


def test_a_changed_file_changes_the_inputs(distributions):
    texts = offered_texts(distributions)
    assert corpus_inputs(texts) != corpus_inputs(texts[1:])
    before = corpus_inputs(texts)
    changed = next(text for text in texts if text.location is not None)
    changed.location.write_bytes(changed.location.read_bytes() + b"\n")  # after it was installed and recorded
    assert corpus_inputs(texts) != before


def test_row_groups_have_250_rows(site, tmp_path):
    files = {f"many/{number:03d}.py": text_of(number, 200) for number in range(260)}
    install(site, "many", {**files, "many/README.md": text_of("readme")})
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_package_corpus(folder, choose_texts(offered_texts([metadata.distribution("many")]), PLENTY))
    footer = pq.read_metadata(folder / "code" / "000_00000.parquet")
    assert [footer.row_group(number).num_rows for number in range(footer.num_row_groups)] == [250, 10]


def test_a_pool_without_texts_is_an_error(distributions, tmp_path):
    texts = choose_texts(offered_texts(distributions), {"prose": 10**6, "code": 1})
    with pytest.raises(SourceError, match=r"expected texts for the pool 'code' .* found none.*byte limit"):
        write_package_corpus(tmp_path, texts)


def test_runtime_distributions_follow_requirements_without_extras(site):
    install(site, "corpusmill", {}, requires=["alpha>=1", 'gone; extra == "dev"', 'gone; python_version < "3"'])
    install(site, "alpha", {}, requires=["Be.ta"])
    install(site, "be_ta", {}, requires=["alpha"])
    names = [distribution.metadata["Name"] for distribution in runtime_distributions()]
    assert names == ["alpha", "be_ta"]


def test_a_requirement_that_is_not_installed_is_one_error_that_names_it(site):
    install(site, "corpusmill", {}, requires=["not-installed-anywhere"])
    with pytest.raises(SourceError, match=r"the distribution 'not-installed-anywhere' to be installed.*make env"):
        runtime_distributions()
