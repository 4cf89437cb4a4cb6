"""Errors of the examples as one sentence, and --help. CPMCU_DEBUG=1 shows the traceback.

An example imports this module first, since a missing package is such an error, too.
"""

import os
import sys
from pathlib import Path

TO_INSTALL = {"cpmcu": "pip install . at the root of the repository"}
EXPECTED = (ImportError, OSError, ValueError, RuntimeError, MemoryError)


def sentence(error: BaseException) -> str | None:
    """What went wrong and what to do; None for an error that deserves a traceback."""
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        what_to_do = TO_INSTALL.get(error.name, f"pip install {error.name}")
        return f"the package {error.name!r} is missing: {what_to_do}"
    if type(error).__module__.startswith("openai"):
        return _of_the_client(error)
    if isinstance(error, EXPECTED):
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _of_the_client(error: BaseException) -> str:
    if type(error).__name__ in ("APIConnectionError", "APITimeoutError"):
        return (
            f"no server answers at {error.request.url}: start one with `cpmcu serve`, or set "
            "OPENAI_BASE_URL"
        )
    body = getattr(error, "body", None)
    message = body.get("message") if isinstance(body, dict) else None
    hint = " (OPENAI_API_KEY is sent as the key)" if getattr(error, "status_code", 0) == 401 else ""
    return f"the server answers: {message or error}{hint}"


def _hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
    text = None if os.environ.get("CPMCU_DEBUG") else sentence(error)
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {text}\n")


sys.excepthook = _hook
if {"-h", "--help"} & set(sys.argv[1:]):  # the text at the top of the example
    print((sys.modules["__main__"].__doc__ or "").strip())
    sys.exit()
