"""One way to read ranges of files that are elsewhere: on the Hub, behind a URL, in a bucket.

`open_reader(file, network)` gives a reader with `read(start, end)`, for several threads at once. The promise: all bytes
are of the file as it was listed, with that size and that ETag, or SourceError. What describes a file is picklable and
holds no secret; whoever opens it takes tokens and credentials from the environment.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

from resources.artifact_store import ArtifactStore
from resources.hub import Hub, HubFile, hub_of_environment
from resources.s3 import Bucket, S3File, bucket_web
from resources.web import Advice, Answer, End, ETagged, Patience, Traffic, Web, get_range
from training_io.errors import SourceError

WEB_ADVICE = Advice(
    network="Check the network and the URL in the recipe.",
    forbidden="Only files that everyone may read are read by URL: download it and read it from a local folder.",
    missing="Mend the URL in the recipe.",
)


@dataclass(frozen=True, kw_only=True)
class WebFile(ETagged):
    """A file behind a URL as it was listed."""

    url: str

    @property
    def place(self) -> str:
        """Where it is."""
        return self.url

    def __str__(self) -> str:
        return self.url.rpartition("/")[2]


RemoteFile = HubFile | WebFile | S3File


@dataclass(frozen=True, kw_only=True)
class Network:
    """How what is elsewhere is reached, and the store that keeps footers so that each is read once a file."""

    store: ArtifactStore
    patience: Patience = field(default_factory=Patience)
    traffic: Traffic = field(default_factory=Traffic)  # what it was asked for and gave so far

    @property
    def hub(self) -> Hub:
        """The environment's Hub."""
        return hub_of_environment(self.patience, self.traffic)

    @property
    def web(self) -> Web:
        """Anyone's server: no token goes there."""
        return Web(advice=WEB_ADVICE, patience=self.patience, traffic=self.traffic)

    def bucket_web(self, bucket: Bucket) -> Web:
        """A bucket, which the environment's credentials open."""
        return bucket_web(bucket, self.patience, self.traffic)


class RangeReader(Protocol):
    """Ranges of one file that stays as it was listed; for several threads at once."""

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end)."""


@dataclass(frozen=True)
class WebReader:
    """Ranges of a file behind a URL; every answer must come with the listed ETag."""

    file: WebFile | S3File
    web: Web

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end)."""
        answer = get_range(self.web, self.file.url, str(self.file), start, end, self.file.size_bytes)
        if answer.etag != self.file.etag:
            raise _changed(self.file, start, end, self.file.etag, answer)
        return answer.content


@dataclass(frozen=True)
class HubReader:
    """Ranges of a file at a commit of the Hub."""

    file: HubFile
    hub: Hub

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end). A content store's own ETag says nothing of the listed hash, the Hub's is it."""
        file = self.file
        answer = get_range(self.hub.web, file.url(self.hub), str(file), start, end, file.size_bytes)
        if answer.etag != file.content_hash and not answer.is_of_store:
            raise _changed(file, start, end, file.content_hash, answer)
        return answer.content


def _changed(file: RemoteFile, start: int, end: int, etag: str, answer: Answer) -> SourceError:
    return SourceError(
        f"{file}: expected bytes {start:,} to {end:,} of the file with ETag {etag[:64]!a} that was listed, found one"
        f" with ETag {answer.etag[:64]!a}. It changed during the run; materialize raw_row_groups again."
    )


def open_reader(file: RemoteFile, network: Network) -> RangeReader:
    """A reader of the file, whose requests are counted in the network's traffic."""
    if isinstance(file, HubFile):
        return HubReader(file, network.hub)
    web = network.bucket_web(file.bucket) if isinstance(file, S3File) else network.web
    return WebReader(file, web)


def apart(network: Network) -> Network:
    """The same network with traffic of its own, which counts in the given one's too."""
    return replace(network, traffic=Traffic(part_of=network.traffic))


def until(network: Network, is_over: End) -> Network:
    """The same network, on which nobody waits for another try once an event is set."""
    return replace(network, patience=replace(network.patience, is_over=is_over))
