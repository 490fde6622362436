"""The fields that all parts of an answer share."""

import msgspec

from jaxflow.text.tool_calls import Form
from serving.http.logprobs import TokenNames


class Head(msgspec.Struct, frozen=True):
    """Fields of an answer that are known before its first token.

    `top`: candidates of a token that a chat answer lists. `with_logprobs`, `with_token_ids`: the caller asked
    for them. `usage_at_end`, `usage_in_chunks`: where a stream carries its usage. `tool_form`: of the tool
    calls in the text, if the request has tools. `most_calls`: of a choice; None for any number.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    names: TokenNames
    n: int
    top: int = 0
    with_logprobs: bool = False
    with_token_ids: bool = False
    with_prompt_logprobs: bool = False
    usage_at_end: bool = False
    usage_in_chunks: bool = False
    skip_special_tokens: bool = True
    tool_form: Form | None = None
    most_calls: int | None = None
