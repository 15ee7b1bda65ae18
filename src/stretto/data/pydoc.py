"""English text that every CPython carries, the topics of `help()`, as next-token prediction by byte or by word."""

from stretto.data.dataset import Dataset
from stretto.data.passages import texts
from stretto.data.text import Level, language


def pydoc(*, level: Level = "byte", context: int = 64, vocabulary: int | None = None) -> Dataset:
    """The help topics of the running CPython, without repeated passages; the options are those of `language`.

    Sizes differ a little from one version of CPython to the next.
    """
    source = "CPython's help topics, split by topic after every repeated passage was taken out"
    return language("pydoc", texts(), source, level=level, context=context, vocabulary=vocabulary)
