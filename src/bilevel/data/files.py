"""The files of a data set: locating, downloading and verifying them."""

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

DATA_VARIABLE = "BILEVEL_DATA"
"""The environment variable that names a folder with data sets, as ``data_dir`` does."""

_SHA256 = re.compile("[0-9a-f]{64}")
_BLOCK = 1 << 20
_TIMEOUT = 30.0  # seconds without a byte before the next mirror is tried


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded, identified by its name and its SHA-256.

    Attributes:
        name: the name of the file.
        sha256: its checksum, 64 hexadecimal digits.
        addresses: where the file is available under another name; tried after the mirrors.
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
    """The files of one data set.

    Attributes:
        name: the name of the data set, and of its folder inside a folder with data sets.
        files: the files of the data set.
        mirrors: addresses of folders that hold these files, in the order in which they are tried.
        repacked: the same data in smaller files, which the user's folder may hold instead.
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
        """The paths of the files on this machine, each verified, and downloaded if necessary.

        Args:
            data_dir: a folder with the files, or with a folder of the data set's name that holds
                them; nothing is downloaded or written there. None: the folder named by the
                environment variable ``BILEVEL_DATA`` if that is set, otherwise the cache.

        Raises:
            MissingDataError: the folder lacks a file, or no mirror delivered it.
            CorruptDataError: the checksum of a file is wrong.
        """
        given = os.environ.get(DATA_VARIABLE) or None
        origin = DATA_VARIABLE
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
                f"there, or leave {origin} unset to have them downloaded"
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
            f"a network, put {names} into {folder}, or into any other folder that data_dir= or the "
            f"environment variable {DATA_VARIABLE} names"
        )


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be text, not {name!r}")
    if name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
        raise ArgumentError(f"name must be the name of a file without folders, not {name!r}")


def _check_addresses(name: str, addresses: tuple[str, ...]) -> None:
    if not isinstance(addresses, tuple) or not all(isinstance(each, str) for each in addresses):
        raise ArgumentTypeError(f"{name} must be a tuple of addresses, not {addresses!r}")
    for address in addresses:
        if not address.startswith(("https://", "http://", "file://")):
            raise ArgumentError(f"{name} must begin with https://, not {address!r}")


def existing_file(path: str | os.PathLike[str]) -> Path:
    """``path``, checked to be an existing file; its contents are not looked at."""
    file = checked_path("path", path)
    if not file.exists():
        raise MissingDataError(f"there is no file {str(file)!r} (path)")
    if not file.is_file():
        raise CorruptDataError(f"path={str(file)!r} is not a file")
    return file


def cache_folder() -> Path:
    """Where downloads are kept: the folder ``bilevel`` in the platform's cache folder.

    The platform's cache folder is ``$XDG_CACHE_HOME`` if that is an absolute path; otherwise
    ``~/Library/Caches`` on macOS, ``%LOCALAPPDATA%`` on Windows and ``~/.cache`` elsewhere.
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
    """Download into ``folder``; the file gets its final name only once it is verified."""
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
                f"the download ({part.stat().st_size} bytes) has the SHA-256 {found}, "
                f"not {file.sha256}, and was removed"
            )
        part.replace(folder / file.name)
    finally:
        part.unlink(missing_ok=True)


def _verified(path: Path, file: RemoteFile) -> Path:
    found = _sha256(path)
    if found != file.sha256:
        # Downloads were verified before they got this name, so the file may be the user's own.
        raise CorruptDataError(
            f"{path} ({path.stat().st_size} bytes) has the SHA-256 {found}, not {file.sha256}; it "
            f"is incomplete or a different file. It was not changed: replace it or remove it"
        )
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
