"""Which tests run in the same process of pytest: those of a file, and of all files that import or start the same."""

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parent.parent
# What is in a file of tests, by what its process then has, which takes seconds: modules, processes that wait for work
TOGETHER = {
    "processes": re.compile(r"\b(nursery|worlds)\b|runtime(\.| import )processes"),
    "commands on processes": re.compile(r"[\"]--workers[\"]|fork_server"),
    "other trainers": re.compile(r"transformers|lightning|hugging_face"),
}


@functools.cache
def companions(file):
    """What the tests of a file are distributed by."""
    text = (ROOT / file).read_text()
    return next((name for name, words in TOGETHER.items() if words.search(text)), file)


class TogetherScheduling(LoadFileScheduling):
    """As --dist loadfile, with such files as one."""

    def _split_scope(self, nodeid):
        return companions(super()._split_scope(nodeid))
