"""Files of a data set: where they lie, how they come there, whether they are the right ones."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bilevel.errors import ArgumentError, ArgumentTypeError, CorruptDataError, MissingDataError
from bilevel.errors.checks import checked_path

VARIABLE = "BILEVEL_DATA"
"""The environment variable that names a folder with data, as ``data_dir`` does."""

_SHA256 = re.compile("[0-9a-f]{64}")
_BLOCK = 1 << 20
_TIMEOUT = 30.0  # seconds without a byte before the next mirror is tried


@dataclass(frozen=True)
class RemoteFile:
    """A file known by its name and its SHA-256.

    Attributes:
        name, sha256: of the file.
        addresses: where it is to be had under another name, tried after the mirrors.
    """

    name: str
    sha256: str
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not isinstance(self.sha256, str) or not _SHA256.fullmatch(self.sha256):
            raise ArgumentError(f"sha256 must be 64 hexadecimal digits, not {self.sha256!r}")
        _check_addresses("addresses", self.addresses)


@dataclass(frozen=True)
class DataSet:
    """A few files that belong together.

    Attributes:
        name: of the data set, and of its folder inside a folder with data.
        files: what it consists of.
        mirrors: addresses of folders that hold these files, in the order in which they are tried.
        repacked: the same data in smaller files, which a folder of the user's may hold instead.
    """

    name: str
    files: tuple[RemoteFile, ...]
    mirrors: tuple[str, ...]
    repacked: tuple[RemoteFile, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.name)
        for name in ("files", "repacked"):
            files = getattr(self, name)
            if not isinstance(files, tuple) or not all(isinstance(f, RemoteFile) for f in files):
                raise ArgumentTypeError(f"{name} must be a tuple of RemoteFile, not {files!r}")
        _check_addresses("mirrors", self.mirrors)

    def paths(self, data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
        """The files on this machine, each verified; downloaded where they have to be.

        Args:
            data_dir: a folder with the files, or with a folder of the data set's name that holds
                them; it is read only, and nothing is downloaded. None: the folder named by the
                environment variable ``BILEVEL_DATA``; where that is not set either, the cache.

        Raises:
            MissingDataError: the folder lacks a file, or no mirror gave one.
            CorruptDataError: a file has not the checksum it should have.
        """
        given = os.environ.get(VARIABLE) or None
        origin = VARIABLE
        if data_dir is not None:
            given, origin = str(checked_path("data_dir", data_dir)), "data_dir"
        if given is not None:
            return self._offline(Path(given).expanduser(), origin)
        folder = cache_folder() / self.name
        for file in self.files:
            if not (folder / file.name).is_file():
                self._download(file, folder)
        return [_verified(folder / file.name, file) for file in self.files]

    def _offline(self, given: Path, origin: str) -> list[Path]:
        if not given.is_dir():
            raise ArgumentError(f"{origin} must be a folder that exists, not {str(given)!r}")
        inside = given / self.name
        folder = inside if inside.is_dir() else given
        if self.repacked and all((folder / file.name).is_file() for file in self.repacked):
            return [_verified(folder / file.name, file) for file in self.repacked]
        missing = [file.name for file in self.files if not (folder / file.name).is_file()]
        if missing:
            raise MissingDataError(
                f"{folder}, found by {origin}={str(given)!r}, lacks {', '.join(missing)}. Put them "
                f"there; or give no {origin}, to have them downloaded"
            )
        return [_verified(folder / file.name, file) for file in self.files]

    def _download(self, file: RemoteFile, folder: Path) -> None:
        failures = []
        named = [f"{mirror.rstrip('/')}/{file.name}" for mirror in self.mirrors]
        for url in (*named, *file.addresses):
            try:
                _fetch(url, file, folder)
            except (OSError, http.client.HTTPException, CorruptDataError) as error:
                failures.append(f"{url}: {error or type(error).__name__}")
            else:
                return
        names = ", ".join(file.name for file in self.files)
        raise MissingDataError(
            f"{file.name} of {self.name} could not be downloaded ({'; '.join(failures)}). Without "
            f"a network, put {names} into {folder}, or into any other folder and name that by "
            f"data_dir= or the environment variable {VARIABLE}"
        )


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be text, not {name!r}")
    if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
        raise ArgumentError(f"name must be that of a file, without folders, not {name!r}")


def _check_addresses(name: str, addresses: tuple[str, ...]) -> None:
    if not isinstance(addresses, tuple) or not all(isinstance(each, str) for each in addresses):
        raise ArgumentTypeError(f"{name} must be a tuple of addresses, not {addresses!r}")
    for address in addresses:
        if not address.startswith(("https://", "http://", "file://")):
            raise ArgumentError(f"{name} must begin with https://, not {address!r}")


def readable(path: str | os.PathLike[str]) -> Path:
    """The path of a file that is there; what is in it, its reader has to see."""
    file = checked_path("path", path)
    if not file.exists():
        raise MissingDataError(f"there is no file {str(file)!r} (path)")
    if not file.is_file():
        raise CorruptDataError(f"path={str(file)!r} is not a file")
    return file


def cache_folder() -> Path:
    """Where downloads are kept: the folder ``bilevel`` in the platform's cache folder.

    That is ``$XDG_CACHE_HOME``, where it is an absolute path; otherwise ``~/Library/Caches`` on
    macOS, ``%LOCALAPPDATA%`` on Windows and ``~/.cache`` elsewhere.
    """
    wanted = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if wanted.is_absolute():
        return wanted / "bilevel"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bilevel"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "bilevel"
    return Path.home() / ".cache" / "bilevel"


def _fetch(url: str, file: RemoteFile, folder: Path) -> None:
    """Download into ``folder``; under its own name only once it is whole and verified."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=folder)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out, urllib.request.urlopen(url, timeout=_TIMEOUT) as r:
            while block := r.read(_BLOCK):
                out.write(block)
        found = _sha256(part)
        if found != file.sha256:
            raise CorruptDataError(
                f"what came ({part.stat().st_size} bytes) has the SHA-256 {found}, "
                f"not {file.sha256}, and was removed"
            )
        part.replace(folder / file.name)
    finally:
        part.unlink(missing_ok=True)


def _verified(path: Path, file: RemoteFile) -> Path:
    found = _sha256(path)
    if found != file.sha256:
        # what lies under its final name was verified when it came: a wrong one may be the user's
        raise CorruptDataError(
            f"{path} ({path.stat().st_size} bytes) has the SHA-256 {found}, not {file.sha256}; it "
            f"is incomplete or another file. It was left as it is: replace it, or remove it"
        )
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
