"""What programs say of an error."""

from __future__ import annotations


def sentence(error: BaseException | str) -> str:
    """An error in one line. One of the system's begins with the file's name, not with a number."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__
