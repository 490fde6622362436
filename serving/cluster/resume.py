"""The rest of an answer whose replica was lost.

A draw is a function of the request's seed, the position and the token id. So a request whose
prompt is the old prompt and the tokens so far draws the tokens that the lost replica would have
drawn, to the rounding of its logits.
"""

import dataclasses
from collections.abc import Sequence

from jaxflow.request import Request


def rest_of(request: Request, token_ids: Sequence[int]) -> Request | None:
    """Return the request for the rest of an answer; None if the rest would be another one.

    Some settings depend on the output alone: presence and frequency penalties, stop strings, bad words and
    structured outputs. With one of them the tokens so far cannot become a prompt. Neither can those of
    several sequences.

    Args:
      request: with a seed and a limit.
      token_ids: the tokens of the answer so far. Without one the whole request is the rest.
    """
    sampling, limit = request.sampling, request.limit
    assert limit is not None and sampling.seed is not None
    if not token_ids:
        return request
    prompt = (*request.prompt_token_ids, *token_ids)
    looks_at_output = bool(sampling.presence_penalty or sampling.frequency_penalty)
    looks_at_output = looks_at_output or bool(sampling.stop or sampling.bad_words)
    if sampling.n > 1 or looks_at_output or sampling.structured_outputs or limit <= len(prompt):
        return None
    return dataclasses.replace(
        request,
        prompt_token_ids=prompt,
        sampling=dataclasses.replace(
            sampling,
            max_tokens=limit - len(prompt),
            min_tokens=max(0, sampling.min_tokens - len(token_ids)),
            prompt_logprobs=None,
        ),
    )
