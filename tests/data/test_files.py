"""Downloads, the cache and folders of the user's: what is fetched, kept, refused and left alone."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bilevel.data import DataSet, RemoteFile, cache_folder
from bilevel.data.files import DATA_VARIABLE
from bilevel.errors import ArgumentError, BilevelError, CorruptDataError, MissingDataError

CONTENT = {"a.gz": b"first" * 1000, "b.gz": b"second"}
UNREACHABLE = "http://127.0.0.1:9"  # the discard port: nothing listens there


@dataclass
class Mirror:
    """A server on this machine, what it serves, and what it was asked for."""

    url: str
    served: dict[str, bytes]
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def mirror() -> Iterator[Callable[..., Mirror]]:
    """A function that starts a server with these files."""
    servers = []

    def start(served: dict[str, bytes], announced: int | None = None) -> Mirror:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rsplit("/", 1)[-1]
                found.asked.append(name)
                if name not in served:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(announced or len(served[name])))
                self.end_headers()
                self.wfile.write(served[name])

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        found = Mirror(f"http://127.0.0.1:{server.server_port}/folder/", served)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return found

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no proxy between it and its server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    return tmp_path / "cache" / "bilevel" / "toy"


def toy(*mirrors: str) -> DataSet:
    files = tuple(RemoteFile(n, hashlib.sha256(c).hexdigest()) for n, c in CONTENT.items())
    return DataSet("toy", files, mirrors)


def fill(folder: Path, content: dict[str, bytes] = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def read(paths: list[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths}


def test_files_are_downloaded_once_and_then_come_from_the_cache(
    mirror: Callable[..., Mirror], cache: Path
) -> None:
    source = mirror(CONTENT)
    for _ in range(2):
        paths = toy(source.url).paths()
        assert read(paths) == CONTENT
        assert {path.parent for path in paths} == {cache}
    assert source.asked == ["a.gz", "b.gz"]
    assert sorted(path.name for path in cache.iterdir()) == ["a.gz", "b.gz"]


def test_only_what_is_missing_is_downloaded(mirror: Callable[..., Mirror], cache: Path) -> None:
    fill(cache, {"a.gz": CONTENT["a.gz"]})
    source = mirror(CONTENT)
    assert read(toy(source.url).paths()) == CONTENT
    assert source.asked == ["b.gz"]


@pytest.mark.parametrize("first", ["unreachable", "lacks it", "another file", "breaks off"])
def test_the_next_mirror_is_tried(first: str, mirror: Callable[..., Mirror], cache: Path) -> None:
    wrong = {
        "unreachable": lambda: UNREACHABLE,
        "lacks it": lambda: mirror({}).url,
        "another file": lambda: mirror(dict.fromkeys(CONTENT, b"<html>log in</html>")).url,
        "breaks off": lambda: mirror({n: c[:3] for n, c in CONTENT.items()}, announced=5000).url,
    }[first]()
    assert read(toy(wrong, mirror(CONTENT).url).paths()) == CONTENT
    assert sorted(path.name for path in cache.iterdir()) == ["a.gz", "b.gz"]


def test_without_a_network_the_error_says_which_files_to_put_where(cache: Path) -> None:
    with pytest.raises(MissingDataError) as caught:
        toy(UNREACHABLE, f"{UNREACHABLE}/second").paths()
    message = str(caught.value)
    for part in ("a.gz, b.gz", str(cache), "data_dir", DATA_VARIABLE, f"{UNREACHABLE}/second/a.gz"):
        assert part in message
    assert list(cache.iterdir()) == []


def test_a_wrong_download_is_named_removed_and_not_loaded(
    mirror: Callable[..., Mirror], cache: Path
) -> None:
    source = mirror({**CONTENT, "b.gz": b"something else"})
    found = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(MissingDataError, match=rf"b\.gz .*14 bytes.*{found}"):
        toy(source.url).paths()
    assert [path.name for path in cache.iterdir()] == ["a.gz"]


def test_a_cached_file_that_changed_is_refused_and_left_alone(
    mirror: Callable[..., Mirror], cache: Path
) -> None:
    fill(cache, {**CONTENT, "a.gz": b"damaged"})
    source = mirror(CONTENT)
    with pytest.raises(CorruptDataError, match=r"a\.gz .*7 bytes"):
        toy(source.url).paths()
    assert (cache / "a.gz").read_bytes() == b"damaged"
    assert source.asked == []


@pytest.mark.parametrize("inside", ["", "toy"])
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_folder_of_the_users_is_read_without_the_network(
    inside: str,
    by: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = tmp_path / "mine"
    folder = fill(given / inside)
    if by == "environment":
        monkeypatch.setenv(DATA_VARIABLE, str(given))
    paths = toy(UNREACHABLE).paths(given if by == "argument" else None)
    assert read(paths) == CONTENT
    assert {path.parent for path in paths} == {folder}
    assert not cache.exists()


def test_the_argument_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "elsewhere"))
    assert read(toy().paths(fill(tmp_path / "mine"))) == CONTENT


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"a.gz": CONTENT["a.gz"]}, MissingDataError, r"mine.* lacks b\.gz"),
        ({}, MissingDataError, r"mine.* lacks a\.gz, b\.gz"),
        ({**CONTENT, "b.gz": b"sec"}, CorruptDataError, r"mine.b\.gz \(3 bytes\)"),
        (None, ArgumentError, "data_dir"),
    ],
)
def test_what_a_folder_lacks_is_named_and_nothing_in_it_changes(
    content: dict[str, bytes] | None,
    error: type[BilevelError],
    message: str,
    tmp_path: Path,
    mirror: Callable[..., Mirror],
) -> None:
    folder = tmp_path / "mine"
    if content is not None:
        fill(folder, content)
    source = mirror(CONTENT)
    with pytest.raises(error, match=message):
        toy(source.url).paths(folder)
    assert source.asked == []
    if content is not None:
        assert read(list(folder.iterdir())) == content


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, "home/.cache/bilevel"),
        ("linux", {"XDG_CACHE_HOME": "not/absolute"}, "home/.cache/bilevel"),
        ("linux", {"XDG_CACHE_HOME": "/large"}, "/large/bilevel"),
        ("darwin", {}, "home/Library/Caches/bilevel"),
        ("win32", {}, "home/AppData/Local/bilevel"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/bilevel"),
    ],
)
def test_the_cache_is_where_the_platform_has_it(
    platform: str,
    environment: dict[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == tmp_path / expected


def test_a_file_may_lie_elsewhere_under_another_name(mirror: Callable[..., Mirror]) -> None:
    source = mirror({"5975967": b"content"})
    file = RemoteFile("a.gz", hashlib.sha256(b"content").hexdigest(), (f"{source.url}5975967",))
    assert read(DataSet("toy", (file,), (UNREACHABLE,)).paths()) == {"a.gz": b"content"}


def test_a_folder_may_hold_the_same_in_another_form(tmp_path: Path) -> None:
    smaller = RemoteFile("ab.xz", hashlib.sha256(b"both").hexdigest())
    data = DataSet("toy", toy().files, (), repacked=(smaller,))
    folder = fill(tmp_path / "own")
    assert read(data.paths(folder)) == CONTENT
    fill(folder, {"ab.xz": b"both"})
    assert read(data.paths(folder)) == {"ab.xz": b"both"}
    fill(folder, {"ab.xz": b"neither"})
    with pytest.raises(CorruptDataError, match=r"ab\.xz"):
        data.paths(folder)
