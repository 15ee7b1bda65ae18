"""These tests need lightning, which is no part of what Stretto itself needs."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lightning") is not None else ["test_*.py"]
