"""Signatures of S3 requests, against the example that AWS publishes, and what the bucket's errors become."""

from datetime import UTC, datetime

import pytest
from loopback import answer, serving

from resources.s3 import Bucket, Credentials, S3File, bucket_web, list_objects, object_url, signature_headers
from resources.web import Patience, Traffic
from training_io.errors import SourceError

# "Example: GET Object" of AWS's page on Signature Version 4 in the Authorization header.
EXAMPLE = Credentials(key="AKIAIOSFODNN7EXAMPLE", secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", session="")


def test_the_published_example_has_its_published_signature() -> None:
    headers = signature_headers(
        "https://examplebucket.s3.amazonaws.com/test.txt",
        {"Range": "bytes=0-9"},
        EXAMPLE,
        "us-east-1",
        datetime(2013, 5, 24, tzinfo=UTC),
    )
    assert headers == {
        "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "x-amz-date": "20130524T000000Z",
        "Authorization": (
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
            "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        ),
    }


def test_a_session_is_signed_and_sent() -> None:
    session = Credentials(key=EXAMPLE.key, secret=EXAMPLE.secret, session="once")
    headers = signature_headers("https://host/b/k", {}, session, "eu-west-1", datetime(2026, 1, 1, tzinfo=UTC))
    assert headers["x-amz-security-token"] == "once"
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token," in headers["Authorization"]


def test_credentials_are_not_shown() -> None:
    assert EXAMPLE.secret not in repr(EXAMPLE)
    assert EXAMPLE.key not in repr(EXAMPLE)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("a/b.parquet", "a/b.parquet"),
        ("dump=CC 1/ü+ä&.parquet", "dump%3DCC%201/%C3%BC%2B%C3%A4%26.parquet"),
        ("~tilde//double", "~tilde//double"),
    ],
)
def test_keys_are_written_as_the_signature_wants_them(key: str, path: str) -> None:
    bucket = Bucket(name="data", endpoint="https://s3.example/", region="us-east-1", is_anonymous=True)
    assert object_url(bucket, key) == f"https://s3.example/data/{path}"
    file = S3File(bucket=bucket, key=key, size_bytes=1, etag="x")
    assert file.url == object_url(bucket, key)
    assert file.place == f"s3://data/{key} at https://s3.example/"


def page(entries: str = "", is_cut: str = "false", token: str | None = None) -> str:
    next_token = "" if token is None else f"<NextContinuationToken>{token}</NextContinuationToken>"
    return f"<ListBucketResult><IsTruncated>{is_cut}</IsTruncated>{next_token}{entries}</ListBucketResult>"


ENTRY = "<Contents><Key>{key}</Key><ETag>&quot;e&quot;</ETag><Size>7</Size></Contents>"
PAGES = {  # of one page each
    "no XML": "<html><br></html>",
    "an encoding that nobody knows": '<?xml version="1.0" encoding="sentinel"?><ListBucketResult/>',
    "another document": "<Error><IsTruncated>false</IsTruncated></Error>",
    "an entry without an ETag": (
        "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key><Size>1</Size></Contents>"
        "</ListBucketResult>"
    ),
    "a size that is none": (
        "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key><ETag>e</ETag><Size>x</Size>"
        "</Contents></ListBucketResult>"
    ),
    "an empty ETag": page("<Contents><Key>a</Key><ETag>&quot;&quot;</ETag><Size>1</Size></Contents>"),
    **{
        f"a size of {size!r}": page(f"<Contents><Key>a</Key><ETag>e</ETag><Size>{size}</Size></Contents>")
        for size in ("-1", "+1", "1_0", "٣", "1.0", " 1", str(2**63), "1" * 5_000)
    },
    "not whether there is more": "<ListBucketResult></ListBucketResult>",
    **{f"more in the word {word!r}": page(is_cut=word) for word in ("yes", "1", "truefalse", " ")},
    "more without a token": "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    "more with an empty token": page(is_cut="true", token=""),
    "a token on the last page": page(is_cut="false", token="t"),
}


def listed(*pages: str) -> list[S3File]:
    with serving() as server:
        server.answers["/data"] = [answer(200, body.encode()) for body in pages]
        bucket = Bucket(name="data", endpoint=server.url, region="us-east-1", is_anonymous=True)
        return list_objects(bucket, "set", bucket_web(bucket, Patience(num_tries=1), Traffic()))


def test_a_listing_leaves_out_what_stands_for_a_folder_and_reads_keys_as_written() -> None:
    entries = "".join(ENTRY.format(key=key) for key in ("set/", "set/b&amp;ü 1", "set/a/", "set/a/x"))
    found = listed(f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>")
    assert [(file.key, file.size_bytes, file.etag) for file in found] == [("set/a/x", 7, "e"), ("set/b&ü 1", 7, "e")]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_no_list_of_objects_is_one_error(name: str) -> None:
    with pytest.raises(
        SourceError, match=r"the list of objects of s3://data/set/: expected a ListBucketResult .*found"
    ):
        listed(PAGES[name])


@pytest.mark.parametrize(("true", "false"), [("true", "false"), ("True", "False"), (" TRUE\n", "\tFALSE ")])
def test_a_page_with_a_token_is_followed_by_the_next(true: str, false: str) -> None:
    first, second = ENTRY.format(key="set/b"), ENTRY.format(key="set/a")
    found = listed(page(first, is_cut=true, token="t"), page(second, is_cut=false, token=""))
    assert [file.key for file in found] == ["set/a", "set/b"]


@pytest.mark.parametrize("tokens", ["tt", "tut"])
def test_a_token_that_was_given_before_is_refused_at_once(tokens: str) -> None:
    with serving() as server:
        server.answers["/data"] = [answer(200, page(is_cut="true", token=token).encode()) for token in tokens]
        bucket = Bucket(name="data", endpoint=server.url, region="us-east-1", is_anonymous=True)
        words = rf"expected a new continuation token on each page, found on page {len(tokens)} one of an earlier page"
        with pytest.raises(SourceError, match=words):
            list_objects(bucket, "set", bucket_web(bucket, Patience(num_tries=1), Traffic()))
        assert len(server.asked) == len(tokens)


@pytest.mark.parametrize("other", ["<ETag>f</ETag><Size>7</Size>", "<ETag>e</ETag><Size>8</Size>"])
def test_a_key_that_is_listed_as_two_objects_is_refused(other: str) -> None:
    entry, changed = ENTRY.format(key="set/a"), f"<Contents><Key>set/a</Key>{other}</Contents>"
    for pages in ([page(entry + changed)], [page(entry, is_cut="true", token="t"), page(changed)]):
        with pytest.raises(SourceError, match="expected each key with one ETag and size, found 'set/a' with ETag e"):
            listed(*pages)


def test_a_key_that_is_listed_twice_alike_is_one_object() -> None:
    entry = ENTRY.format(key="set/a")
    assert [file.key for file in listed(page(entry, is_cut="true", token="t"), page(entry))] == ["set/a"]
