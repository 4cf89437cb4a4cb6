"""Structured output: converts an answer to an object of a Pydantic model.

The server needs the extra `grammar`: pip install 'cpmcu[server,grammar]'. OPENAI_BASE_URL and
OPENAI_API_KEY say where it is and what key it wants.
"""

import os
from typing import Annotated, Literal

import sentences  # noqa: F401  # errors are one sentence

# isort: split
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Function(BaseModel):
    """Properties of a function."""

    # JSON allows spaces, and a small model may repeat them without end; llguidance can forbid them.
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"x-guidance": {"whitespace_flexible": False}}
    )
    name: Annotated[str, Field(max_length=20)]
    arguments: Annotated[list[Annotated[str, Field(max_length=12)]], Field(max_length=3)]
    speed: Literal["constant", "linear", "quadratic"]


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
reply = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "def binary_search(values, wanted):"}],
    response_format=Function,
    max_completion_tokens=200,
    seed=1,
)
print(reply.choices[0].message.parsed)
