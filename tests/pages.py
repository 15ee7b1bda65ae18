"""What pages of the documentation hold for tests to run."""

import re

FILE = re.compile(r"^`([\w.]+)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def write_files(page, folder):
    """Write the files that a page shows, each below its name, and return their names."""
    found = FILE.findall(page.read_text())
    for name, text in found:
        (folder / name).write_text(text)
    return [name for name, _ in found]
