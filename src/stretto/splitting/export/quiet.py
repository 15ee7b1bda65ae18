"""What torch prints while it exports."""

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def output_held_back() -> Iterator[None]:
    """Keep back what is printed and what torch logs: written afterwards; of an exception it becomes a note.

    An export that fails prints the graph that it has come to.
    """
    handlers = torch_handlers()
    streams = [sys.stdout, sys.stderr, *(handler.stream for handler in handlers)]
    held: list[io.StringIO] = [io.StringIO() for _ in streams]
    try:
        with contextlib.redirect_stdout(held[0]), contextlib.redirect_stderr(held[1]):
            for handler, text in zip(handlers, held[2:], strict=True):
                handler.setStream(text)
            yield
    except Exception as error:
        if said := "\n".join(text.getvalue().strip() for text in held).strip():
            error.add_note(said)
        raise
    else:
        for stream, text in zip(streams, held, strict=True):
            if text.getvalue():
                stream.write(text.getvalue())
    finally:
        for handler, stream in zip(handlers, streams[2:], strict=True):
            handler.setStream(stream)


def torch_handlers() -> "list[logging.StreamHandler[Any]]":
    """The handlers of torch's loggers that write to a terminal (another kind writes traces to files), each once."""
    loggers = [each for name, each in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "torch"]
    handlers = [handler for each in loggers if isinstance(each, logging.Logger) for handler in each.handlers]
    return [handler for handler in dict.fromkeys(handlers) if type(handler) is logging.StreamHandler]
