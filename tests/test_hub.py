"""Files of the Hub, from a server on loopback that redirects, fails, cuts and delays as the Hub and its stores do."""

import email.utils
import gc
import http.server
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from loopback import Answer, Server, answer, serving

from resources.hub import Hub, hub_of_environment, read_hub_file
from resources.web import Patience, Traffic
from training_io.errors import RecipeError, SourceError

REVISION = "0123456789abcdef0123456789abcdef01234567"
PATH = f"/someone/model/resolve/{REVISION}/tokenizer.json"
CONTENT = b"{} \x00\xff" * 1_000
TOKEN = "hf_veryverysecret"
SIGNATURE = "X-Signature=alsosecret"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one
    gc.collect()  # a socket left open is a warning, and so an error, of this test


def chunked(*chunks: bytes, is_whole: bool) -> Answer:
    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for chunk in chunks:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        handler.wfile.write(b"0\r\n\r\n" if is_whole else b"")

    return send


def without_length(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(CONTENT)


def hang_up(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.connection.close()


GOOD = answer(200, CONTENT)
CUT = answer(200, CONTENT[:-1], Content_Length=str(len(CONTENT)))
CUT_AS_IT_IS = answer(200, CONTENT[:-1], Content_Length=str(len(CONTENT)), Transfer_Encoding="identity")


def read(server: Server, waits: list[float] | None = None, **changes: object) -> bytes:
    token = str(changes.pop("token", ""))
    noted: list[float] = [] if waits is None else waits
    patience = Patience(sleep=lambda _, seconds: noted.append(seconds), jitter=lambda: 0.0, **changes)
    hub = Hub(endpoint=server.url, token=token, patience=patience)
    return read_hub_file(hub, repository="someone/model", revision=REVISION, name="tokenizer.json", max_bytes=10_000)


def refused(server: Server, **changes: object) -> str:
    with pytest.raises(SourceError) as caught:
        read(server, **changes)
    return str(caught.value)


def test_a_wait_leaves_the_shared_random_numbers_as_they_are() -> None:
    before = random.getstate()
    drawn = {Patience().jitter() for _ in range(100)}
    assert random.getstate() == before
    assert len(drawn) > 1
    assert all(0 <= share < 1 for share in drawn)


def test_a_file_is_asked_for_by_its_commit(server: Server) -> None:
    server.answers[PATH] = [GOOD]
    assert read(server) == CONTENT
    assert server.asked == [(PATH, None)]


def test_the_token_goes_to_the_hub_and_to_renamed_repositories_and_to_no_content_store(server: Server) -> None:
    renamed = PATH.replace("someone", "else")
    with serving() as store:
        server.answers[PATH] = [answer(307, Location=renamed)]
        server.answers[renamed] = [answer(302, Location=f"{store.url}/blob?{SIGNATURE}")]
        store.answers["/blob"] = [GOOD]
        assert read(server, token=TOKEN) == CONTENT
        assert server.asked == [(PATH, f"Bearer {TOKEN}"), (renamed, f"Bearer {TOKEN}")]
        assert store.asked == [(f"/blob?{SIGNATURE}", None)]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_overload_and_faults_of_the_server_are_tried_again_after_longer_and_longer_waits(
    server: Server, status: int
) -> None:
    waits: list[float] = []
    server.answers[PATH] = [answer(status), answer(status), answer(status), GOOD]
    assert read(server, waits) == CONTENT
    assert waits == [1, 2, 4]


@pytest.mark.parametrize("fault", [CUT, CUT_AS_IT_IS, hang_up, without_length, chunked(CONTENT[:9], is_whole=False)])
def test_a_body_that_may_not_be_whole_is_asked_for_again(server: Server, fault: Answer) -> None:
    server.answers[PATH] = [fault, GOOD]
    assert read(server) == CONTENT
    assert len(server.asked) == 2


def test_a_body_in_chunks_is_whole_when_its_last_chunk_came(server: Server) -> None:
    server.answers[PATH] = [chunked(CONTENT[:9], CONTENT[9:], is_whole=True)]
    assert read(server) == CONTENT
    assert len(server.asked) == 1


def test_retry_after_is_waited_for_in_seconds_or_until_a_date(server: Server) -> None:
    waits: list[float] = []
    server.answers[PATH] = [
        answer(429, Retry_After="17"),
        answer(503, Retry_After=email.utils.formatdate(time.time() + 100, usegmt=True)),
        answer(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        answer(503, Retry_After="soon"),
        GOOD,
    ]
    assert read(server, waits) == CONTENT
    assert waits[0] == 17
    assert 50 < waits[1] <= 100
    assert waits[2:] == [4, 8]


@pytest.mark.parametrize("retry_after", ["", "-5", "Wed, 21 Oct 99999 07:28:00 GMT", "Fri, 31 Dec 999999 23:59:59 GMT"])
def test_a_retry_after_that_cannot_be_read_asks_for_nothing(server: Server, retry_after: str) -> None:
    waits: list[float] = []
    server.answers[PATH] = [answer(503, Retry_After=retry_after), GOOD]
    assert read(server, waits) == CONTENT
    assert waits == [1]


def test_a_longer_wait_than_ours_is_said_instead_of_waited(server: Server) -> None:
    waits: list[float] = []
    server.answers[PATH] = [answer(429, Retry_After="3600")]
    message = refused(server, waits=waits)
    assert waits == []
    assert "HTTP 429 Too Many Requests, to be asked again in 3,600 s in one try" in message


def test_after_the_last_try_the_error_names_file_url_and_cause_and_no_secret(server: Server) -> None:
    warnings: list[str] = []
    with serving() as store:
        server.answers[PATH] = [answer(302, Location=f"{store.url}/blob?{SIGNATURE}")]
        store.answers["/blob"] = [answer(503, b"busy", X_Error_Message=SIGNATURE)]
        message = refused(server, token=TOKEN, num_tries=3, warn=warnings.append)
        assert len(store.asked) == 3
    assert message == (
        f"tokenizer.json of someone/model at 0123456789ab: expected the file at {server.url}{PATH}, found"
        " HTTP 503 Service Unavailable in 3 tries. Check the network and HF_ENDPOINT, or name a local copy in the"
        " recipe."
    )
    assert len(warnings) == 2
    assert "trying again in 2 s" in warnings[1]
    said = "\n".join([message, *warnings, repr(Hub(token=TOKEN))])
    assert TOKEN not in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("status", "name", "parts"),
    [
        (401, "RepoNotFound", ["HTTP 401 Unauthorized (RepoNotFound)", "HF_TOKEN"]),
        (403, "GatedRepo", ["HTTP 403 Forbidden (GatedRepo)", "Set HF_TOKEN"]),
        (404, "RevisionNotFound", ["HTTP 404 Not Found (RevisionNotFound)", "Mend the repository, the revision"]),
        (416, "", ["HTTP 416"]),
        (404, "<script>\x1b[2J", ["HTTP 404 Not Found in one try"]),
    ],
)
def test_what_another_try_would_not_change_is_said_at_once(
    server: Server, status: int, name: str, parts: list[str]
) -> None:
    server.answers[PATH] = [answer(status, X_Error_Code=name)]
    message = refused(server, num_tries=9)
    assert len(server.asked) == 1
    for part in parts:
        assert part in message
    assert message.isprintable()


def test_a_server_that_stays_silent_is_given_up(server: Server) -> None:
    is_over = threading.Event()
    server.answers[PATH] = [lambda _: is_over.wait(10)]
    message = refused(server, num_tries=2, timeout_seconds=0.1)
    is_over.set()
    assert "found no answer within 0.1 s in 2 tries" in message


def test_a_server_that_stops_within_the_body_is_given_up(server: Server) -> None:
    is_over = threading.Event()

    def stall(handler: http.server.BaseHTTPRequestHandler) -> None:
        CUT(handler)
        is_over.wait(10)

    server.answers[PATH] = [stall]
    message = refused(server, num_tries=1, timeout_seconds=0.1)
    is_over.set()
    assert "found no answer within 0.1 s in one try" in message


@pytest.mark.parametrize(
    ("location", "found"),
    [
        (PATH, "HTTP 302 Found"),
        ("file:///etc/passwd?secret", "HTTP 302 Found"),
        ("data:text/plain,secret", "HTTP 302 Found"),
        pytest.param(
            "http://[::1/blob?secret",
            "no connection that lasted (ValueError)",
            # The library leaves this answer's socket to the collector.
            marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        ),
        ("http://127.0.0.1:port/?secret", "no connection that lasted (InvalidURL)"),
    ],
)
def test_a_redirect_that_leads_nowhere_is_not_quoted(server: Server, location: str, found: str) -> None:
    server.answers[PATH] = [answer(302, Location=location)]
    message = refused(server, num_tries=1)
    assert f"found {found} in one try" in message
    assert "secret" not in message


def test_a_redirect_off_the_web_is_not_followed(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        server.answers[PATH] = [answer(302, Location=f"ftp://127.0.0.1:{elsewhere.getsockname()[1]}/secret")]
        assert "found HTTP 302 Found in one try" in refused(server)
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_the_body_of_a_redirect_is_not_read(server: Server) -> None:
    is_over = threading.Event()

    def redirect(handler: http.server.BaseHTTPRequestHandler) -> None:
        answer(302, Location="/blob", Content_Length="1000000000")(handler)
        is_over.wait(10)

    server.answers[PATH] = [redirect]
    server.answers["/blob"] = [GOOD]
    assert read(server, num_tries=1, timeout_seconds=1.0) == CONTENT
    is_over.set()


def test_a_part_of_a_file_is_not_taken_for_the_whole(server: Server) -> None:
    server.answers[PATH] = [answer(206, CONTENT[:9], Content_Range=f"bytes 0-8/{len(CONTENT)}")]
    assert "found HTTP 206 Partial Content in one try" in refused(server)


def test_nobody_listening() -> None:
    with serving() as gone:
        address = gone.url
    with pytest.raises(SourceError, match=r"no connection that lasted \(Connection refused\) in 2 tries"):
        read(Server(url=address), num_tries=2)


def test_a_body_without_an_end_is_not_read_to_it(server: Server) -> None:
    server.answers[PATH] = [answer(200, CONTENT + b"x" * 10_000)]
    assert "found more than 10,000 bytes in one try" in refused(server)
    server.answers[PATH] = [answer(200, b"x" * 10_000)]
    assert len(read(server)) == 10_000


def environment() -> Hub:
    return hub_of_environment(Patience(), Traffic())


def test_the_environment_names_endpoint_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert (environment().endpoint, environment().token) == ("https://huggingface.co", "")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\n")
    assert (environment().endpoint, environment().token) == ("https://mirror.example/hub", TOKEN)


@pytest.mark.parametrize("endpoint", ["file:///etc", "mirror", "https://", "https://me:secret@host", "http://h?secret"])
def test_an_endpoint_that_is_none_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(RecipeError, match="HF_ENDPOINT: expected the URL of a Hub") as caught:
        environment()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("token", ["hf_a secret", "secret\nHost: x", "sécret"])
def test_a_token_that_is_none_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(RecipeError, match="HF_TOKEN: expected an access token") as caught:
        environment()
    assert "cret" not in str(caught.value)
