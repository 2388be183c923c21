"""Names of a pool's files: globs as pathlib takes them, names of URLs, pages of the Hub's listing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.listings import matches, names_of_urls

NAMES = ("a.parquet", "b.csv", "x/a.parquet", "x/y/a.parquet", "x/y/b.parquet", "xy/.hidden.parquet", "x/[odd].parquet")
GLOBS = (
    "*", "*.parquet", "**/*.parquet", "x/*", "x/**/*.parquet", "*/*.parquet", "**/a.parquet", "**/y/*", "?.csv",
    "x/[[]odd].parquet", "x/y/[ab].parquet", "**/[!a]*.parquet", "x/**/y/**/a.parquet", "X/*", "nothing",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("glob", GLOBS)
def test_a_glob_means_elsewhere_what_it_means_in_a_folder(glob: str, folder: Path) -> None:
    local = {path.relative_to(folder).as_posix() for path in folder.glob(glob) if path.is_file()}
    assert {name for name in NAMES if matches(name, glob)} == local


@given(st.sets(st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.sampled_from("ef")), min_size=1))
def test_names_of_urls_tell_them_apart_and_are_ends_of_them(paths: set[tuple[str, ...]]) -> None:
    urls = [f"https://host/set/{'/'.join(path)}.parquet" for path in sorted(paths)]
    names = names_of_urls(urls)
    assert len(set(names)) == len(urls)
    assert all(url.endswith(f"/{name}") for url, name in zip(urls, names, strict=True))


def test_one_url_is_named_by_its_file_and_other_hosts_by_theirs() -> None:
    assert names_of_urls(["https://host/a/b%20c.parquet"]) == ["b c.parquet"]
    assert names_of_urls(["https://one/a.parquet", "https://two/a.parquet"]) == ["one/a.parquet", "two/a.parquet"]


@pytest.mark.parametrize(
    ("urls", "pair"),
    [
        (["https://host/b", "https://host/a%2Fx", "https://host/a/x"], "2 and 3"),
        (["http://host/sentinel", "https://other/sentinel", "https://host/sentinel"], "1 and 3"),
        (["https://host/sentinel", "https://host/%73entinel"], "1 and 2"),
    ],
)
def test_two_urls_of_one_name_are_refused_by_their_numbers(urls: list[str], pair: str) -> None:
    with pytest.raises(ValueError, match=f"one name for URLs {pair}, ") as caught:
        names_of_urls(urls)
    assert not any(url in str(caught.value) for url in urls)
