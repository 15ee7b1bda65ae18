"""Checks SVG pictures, which go into the page as they are: a page must run and load nothing."""

from xml.etree import ElementTree

from stretto.errors import UsageError

_FORBIDDEN = {"script", "foreignobject", "iframe", "image", "use", "a", "audio", "video", "animate", "set", "style"}


def checked(svg: str, method: str) -> str:
    """Return the `<svg>` element of a picture. Raises UsageError if it could run or load something.

    The pictures come from `stretto.schedule.draw`, which writes shapes and text only; anything else is a mistake.
    """
    start = svg.find("<svg")
    body = svg[start:].strip() if start >= 0 else ""
    where = f"the schedule picture of {method!r}"
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise UsageError(f"{where} is no well-formed SVG ({error}); draw it again") from error
    for element in root.iter():
        name = str(element.tag).rpartition("}")[2].lower()
        if name in _FORBIDDEN:
            raise UsageError(f"{where} has a <{name}> element; a report takes shapes and text only")
        for key, value in element.attrib.items():
            attribute = key.rpartition("}")[2].lower()
            if attribute.startswith("on") or attribute in ("href", "src") or "url(" in value.replace("url(#", ""):
                raise UsageError(f"{where} has {attribute}={value!r} on <{name}>; a report loads and runs nothing")
    return body
