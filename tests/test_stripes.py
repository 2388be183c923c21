"""How stages fan out: what the log says of progress, worked by hand, and that it is said at all."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import small_corpus
from hypothesis import given
from hypothesis import strategies as st
from small_corpus import Built

from pipeline_assets.flow import STAGES
from pipeline_assets.stripes import Stage, Task, build_each, progress_of, reported, time_in_words
from resources.artifact_store import ArtifactRef, Outcome
from training_io.errors import SourceError

MAPPED = ["raw_row_groups", "minhash_signatures", "lsh_clusters", "document_tokens", "split_documents", "token_shards"]


def unit(seconds: float, outcome: Outcome = "built", **counts: int) -> ArtifactRef:
    return ArtifactRef(
        asset="made_up", unit="u", identity="i", digest="d", counts=counts, outcome=outcome, seconds=seconds
    )


def test_progress_of_worked_examples() -> None:
    first = unit(4.0, documents=1_200, text_bytes=60_000_000)
    assert progress_of([first], 3, 4.5) == (
        "1 of 3 units (1 built), 1,200 documents in 4.5 s, 15.0 MB/s, about 8.0 s left"
    )
    second = unit(2.0, "rebuilt", documents=34, text_bytes=30_000_000)
    assert progress_of([first, second], 3, 6.5) == (
        "2 of 3 units (1 built, 1 rebuilt), 1,234 documents in 6.5 s, 15.0 MB/s, about 3.0 s left"
    )
    last = unit(0.5, "reused", documents=66, text_bytes=999_000_000)
    assert progress_of([first, second, last], 3, 7.2) == (
        "3 of 3 units (1 built, 1 reused, 1 rebuilt), 1,300 documents in 7.2 s, 15.0 MB/s"
    )


def test_time_left_is_that_of_units_that_take_work() -> None:
    found = [unit(0.1, "reused", documents=10, text_bytes=1_000_000)] * 10
    assert progress_of(found, 21, 1.0) == "10 of 21 units (10 reused), 100 documents in 1.0 s, about 1.1 s left"
    made = unit(30.0, documents=10, text_bytes=60_000_000)
    assert progress_of([*found, made], 21, 31.0).endswith("110 documents in 31 s, 2.0 MB/s, about 5 min left")


def test_progress_counts_what_there_is() -> None:
    assert progress_of([unit(1.0, band_keys=4_000)], 1, 1.0) == "1 of 1 units (1 built), 4,000 band keys in 1.0 s"
    assert progress_of([unit(1.0)], 2, 1.0) == "1 of 2 units (1 built), 1.0 s, about 1.0 s left"
    assert progress_of([unit(0.0, documents=0, text_bytes=0)], 2, 0.0) == (
        "1 of 2 units (1 built), 0 documents in 0.0 s, about 0.0 s left"
    )


def test_units_that_are_built_at_once_share_their_seconds() -> None:
    two = [unit(4.0, documents=1, text_bytes=45_000_000)] * 2
    assert progress_of(two, 6, 4.5) == "2 of 6 units (2 built), 2 documents in 4.5 s, 20.0 MB/s, about 9.0 s left"


@given(st.floats(0, 1e7))
def test_times_in_words_are_near_the_time(seconds: float) -> None:
    words = time_in_words(seconds).split()
    scale = {"s": 1, "min": 60, "h": 3600}
    said = sum(float(number.replace(",", "")) * scale[of] for number, of in zip(words[::2], words[1::2], strict=True))
    assert abs(said - seconds) <= (0.0501 if seconds < 10 else 0.501 if seconds < 100 else 30.001)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def said() -> list[tuple[float, str]]:
    return []


def stage_that_says(clean: Built, said: list[tuple[float, str]], clock: Clock) -> Stage:
    return replace(clean.stage, say=lambda line: said.append((clock.now, line)), clock=clock)


@given(pauses=st.lists(st.floats(0, 12), min_size=1, max_size=30))
def test_lines_come_first_last_and_at_most_every_five_seconds(clean: Built, pauses: Sequence[float]) -> None:
    said: list[tuple[float, str]] = []
    clock = Clock()
    stage = stage_that_says(clean, said, clock)
    ends: list[float] = []

    def build(pause: float) -> ArtifactRef:
        clock.now += pause
        ends.append(clock.now)
        return unit(pause, documents=1)

    refs = build_each(stage, Task(key="some_units", units=tuple(pauses)), build)
    assert [ref.seconds for ref in refs] == list(pauses)
    times = [time for time, _ in said]
    assert times == [ends[0], *_told_between(ends), *ends[1:][-1:]]
    assert all(line.startswith("made_up some_units: ") for _, line in said)
    assert said[-1][1].startswith(f"made_up some_units: {len(pauses)} of {len(pauses)} units")
    assert "left" not in said[-1][1]


def _told_between(ends: Sequence[float]) -> Iterator[float]:
    """Ends of units that are neither the first nor the last, each five seconds or more after the one told before."""
    last = ends[0]
    for end in ends[1:-1]:
        if end - last >= 5.0:
            last = end
            yield end


def test_no_unit_is_begun_after_one_that_failed_beside_another(clean: Built, said: list[tuple[float, str]]) -> None:
    begun: list[int] = []
    has_begun_another = threading.Event()

    def build(number: int) -> ArtifactRef:
        begun.append(number)
        if number == 1:
            raise SourceError("no such file")
        if number == 0:
            assert not has_begun_another.wait(1.0)  # in which it would begin
        else:
            has_begun_another.set()
        return unit(1.0)

    stage = stage_that_says(clean, said, Clock())
    with pytest.raises(SourceError, match="no such file"):
        build_each(stage, Task(key="some", units=tuple(range(9))), build, at_once=2)
    assert sorted(begun) == [0, 1]
    assert [line for _, line in said] == ["made_up some: 1 of 9 units (1 built), 0.0 s, about 0.0 s left"]


def test_an_interrupt_waits_for_no_unit_that_is_not_begun(clean: Built) -> None:
    begun: list[int] = []
    is_over = threading.Event()

    def build(number: int) -> ArtifactRef:
        begun.append(number)
        assert number == 0 or is_over.wait(20)
        return unit(1.0)

    def interrupt(line: str) -> None:
        is_over.set()
        raise KeyboardInterrupt

    stage = replace(clean.stage, say=interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_each(stage, Task(key="some", units=tuple(range(500))), build, at_once=2)
    assert len(begun) < 500


def test_the_first_error_ends_the_waits_of_the_others_and_is_the_one_that_is_told(
    clean: Built, said: list[tuple[float, str]]
) -> None:
    is_over = threading.Event()

    def build(number: int) -> ArtifactRef:
        if number == 1:
            raise SourceError("no such file")
        assert is_over.wait(20)
        raise SourceError("a wait was ended")

    stage = stage_that_says(clean, said, Clock())
    with pytest.raises(SourceError, match="no such file"):
        build_each(stage, Task(key="some", units=(0, 1)), build, at_once=2, end_waits=is_over.set)


def test_a_step_without_units_says_nothing(clean: Built, said: list[tuple[float, str]]) -> None:
    assert build_each(stage_that_says(clean, said, Clock()), Task(key="none", units=()), unit) == []
    assert said == []


def test_what_is_read_round_by_round_is_built_only_as_it_is_asked_for(
    clean: Built, said: list[tuple[float, str]]
) -> None:
    clock, asked = Clock(), []

    def read(number: int) -> ArtifactRef:
        asked.append(number)
        clock.now += 6.0
        return unit(6.0, documents=10, text_bytes=12_000_000)

    rounds = reported(stage_that_says(clean, said, clock), "rounds", map(read, range(4)), total=4)
    next(rounds)
    next(rounds)
    assert asked == [0, 1]
    assert [line for _, line in said] == [
        "made_up rounds: 1 of 4 units (1 built), 10 documents in 6.0 s, 2.0 MB/s, about 18 s left",
        "made_up rounds: 2 of 4 units (2 built), 20 documents in 12 s, 2.0 MB/s, about 12 s left",
    ]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a run's event log holds of our own lines."""
    folder = tmp_path_factory.mktemp("log")
    recipe = small_corpus.write_recipe(small_corpus.write_corpus(folder / "corpus"))
    with small_corpus.short_instance() as instance:
        result = small_corpus.materialize(recipe, folder / "home", instance=instance)
        assert result.success
        entries: list[Any] = list(instance.all_logs(result.run_id))
    return [entry.user_message for entry in entries if not entry.is_dagster_event]


@pytest.mark.parametrize("asset", MAPPED)
def test_mapped_steps_say_how_far_they_are(asset: str, log: list[str]) -> None:
    lines = [line for line in log if line.startswith(f"{asset} ") and " units (" in line]
    firsts = [line for line in lines if ": 1 of " in line]
    lasts = [line for line in lines if _is_last(line)]
    assert firsts
    assert len(lasts) == len({line.split(":")[0] for line in lines})


def _is_last(line: str) -> bool:
    done, total = line.split(": ", 1)[1].split(" units")[0].split(" of ")
    return done == total


@pytest.mark.parametrize("asset", STAGES)
def test_every_asset_says_when_its_last_step_begins_and_ends(asset: str, log: list[str]) -> None:
    name = f"{asset} seal" if asset in MAPPED else asset
    begun, ended = log.index(f"{name}: begun"), [line for line in log if line.startswith(f"{name}: built in ")]
    assert len(ended) == 1
    assert begun < log.index(ended[0])
    assert log.count(f"{asset} plan: begun") == (asset in MAPPED)


def test_training_the_tokenizer_says_on_what(log: list[str]) -> None:
    assert [line for line in log if line.startswith("tokenizer: training 384 ids on 24 texts, 0.0 MB")]


def test_every_check_says_how_long_it_took(log: list[str]) -> None:
    for name in small_corpus.CHECK_NAMES:
        lines = [line for line in log if line.startswith(f"{name}: ")]
        assert len(lines) == 1, name
        assert lines[0].endswith(" s)"), name
