"""Where results go is proved before they are computed, for every kind of path. Tests run as root, who may write all."""

import os
import stat

import pytest

from stretto.errors import UsageError
from stretto.system import destinations
from stretto.system.destinations import check_file, check_folder, check_replaced, is_below, writing


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with one path of each kind, in which relative paths begin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".beside.partial").write_text("kept")
    for name, target in LINKS.items():
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


LINKS = {
    "to-file": "file", "to-folder": "folder", "dangling": "new/one", "loop": "loop", "through": "file/one",
    "to-full": "/dev/full", "to-null": "/dev/null",
}  # fmt: skip
LONG = "x" * 250
FILES = {  # why a file cannot be written; None if it can
    "new": None, "a/b": None, "file": None, "to-file": None, "dangling": None, "to-null": None, "pipe": None,
    "folder": "it is a folder", "to-folder": "it is a folder", "loop": "symbolic links", "through": "file is a file",
    "file/one": "file is a file", "to-full": "No space", "/dev/full": "No space", LONG: "too long",
    f"{LONG}{LONG}/a": "too long",
}  # fmt: skip
FOLDERS = {  # the same of a folder that is replaced by one beside it
    "new": None, "a/b": None, "folder": None, "to-folder": None, "dangling": None,
    "file": "it is a file", "to-file": "it is a file", "loop": "symbolic links", "through": "is a file",
    "file/one": "file is a file", "/dev/full": "it is a file", LONG: "too long", "..": "no name", "/": "no name",
    ".": "no name", "beside": ".beside.partial is a file",
}  # fmt: skip


def kinds(place):
    return {path.name: (path.is_symlink(), stat.S_IFMT(path.lstat().st_mode)) for path in place.iterdir()}


def refused_or_not(check, why):
    if why is None:
        check()
        return
    with pytest.raises(UsageError, match="cannot write to") as raised:
        check()
    assert why.lower() in str(raised.value).lower()


@pytest.mark.parametrize("name", FILES)
def test_a_file(place, name):
    before = kinds(place)
    refused_or_not(lambda: check_file(destinations.Path(name)), FILES[name])
    assert kinds(place) == before
    assert (place / "file").read_text() == "kept"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_replaced(place, name):
    before = kinds(place)
    refused_or_not(lambda: check_replaced(destinations.Path(name), "--out", "partial", "checkpoints"), FOLDERS[name])
    assert kinds(place) == before


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_written_into(place, name):
    why = {LONG: None, ".": None, "beside": None}.get(name, FOLDERS[name])
    refused_or_not(lambda: check_folder(destinations.Path(name)), "is a file" if why == "it is a file" else why)


def test_a_folder_on_which_something_is_mounted(place, monkeypatch):
    monkeypatch.setattr(destinations.os.path, "ismount", lambda path: path == place / "folder")
    with pytest.raises(UsageError, match="something is mounted there"):
        check_replaced(place / "to-folder", "--out")


def test_a_file_on_which_another_one_is_mounted(place, monkeypatch):
    """A container binds single files: a rename over one fails, after the work."""
    mounts = f"1 0 8:1 /a {str(place / 'file').replace('l', chr(92) + '154')} rw - ext4 /dev/sda rw"
    read = destinations.Path.read_text
    monkeypatch.setattr(
        destinations.Path, "read_text", lambda path, **how: mounts if path.name == "mountinfo" else read(path, **how)
    )
    with pytest.raises(UsageError, match="something is mounted there"):
        check_file(place / "file")
    check_file(place / "other")


def test_links_are_followed_and_devices_stay(place):
    for name, target in {"to-file": "file", "dangling": "new/one", "new": "new"}.items():
        if name == "new":
            name = target = "other"
        with writing(place / name) as path:
            path.write_text(name)
        assert (place / target).read_text() == name
        assert (place / name).is_symlink() is (name in LINKS)
    with writing(place / "to-null") as path:
        path.write_text("gone")
    assert destinations.Path("/dev/null").is_char_device()
    assert (place / "to-null").is_symlink()


def test_permissions_stay(place):
    (place / "file").chmod(0o600)
    with writing(place / "to-file") as path:
        path.write_text("new")
    assert stat.S_IMODE((place / "file").stat().st_mode) == 0o600


def test_what_lies_below_a_folder(place):
    (place / "folder" / "out").symlink_to(place)
    inside = {"folder/a": True, "folder/new/a": True, "folder": False, "folder/../a": False, "folder/out/a": False,
              "to-folder/a": True, "/etc/a": False, "folderx/a": False}  # fmt: skip
    assert {name: is_below(destinations.Path(name), place / "folder") for name in inside} == inside
