"""A file appears whole or not at all, with the permissions that its writer's other files have."""

import os
import stat

import pytest

from stretto.system.destinations import write_whole


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_those_of_any_new_file(tmp_path, umask, mode):
    former = os.umask(umask)
    try:
        write_whole(tmp_path / "new" / "file.json", "{}")
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "new" / "file.json").stat().st_mode) == mode


def test_what_fails_leaves_the_former_file_and_nothing_beside_it(tmp_path):
    file = tmp_path / "file.txt"
    write_whole(file, "former")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "half \ud800")
    assert file.read_text() == "former"
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]
