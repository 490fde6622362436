"""The form of a chat's answer, which begins after the reasoning."""

import dataclasses

from jaxflow.request import Amount, InvalidRequest, Reasoning, SamplingParams
from jaxflow.text.reasoning import Begin
from jaxflow.text.tokenizer import Tokenizer
from serving.frontend.answer_reader import reading_of


def after_reasoning(
    sampling: SamplingParams, parser: str, tokenizer: Tokenizer, continued: str
) -> SamplingParams:
    """Return the sampling parameters of a chat, whose form begins after the reasoning of the answer.

    Args:
      parser: see `reading_of`.
      continued: the text of the message that the answer continues, or "".

    Raises:
      InvalidRequest: the model writes messages that have no form.
    """
    form = sampling.structured_outputs
    assert form is not None
    reading = reading_of(parser, tokenizer.chat_template or "")
    if reading.harmony:
        accepted = "null: the messages of harmony have no form"
        raise InvalidRequest("structured_outputs", Amount(form.form), accepted)
    if reading.marks is None:
        return sampling
    reasoning = Reasoning(*reading.marks, reading.begin is Begin.REASONING, continued)
    return dataclasses.replace(sampling, structured_outputs=dataclasses.replace(form, reasoning=reasoning))
