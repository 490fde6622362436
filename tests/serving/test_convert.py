"""Settings from the wire: an unset field takes the checkpoint's value, then the proto's; refusals name the
path of the field.
"""

import math

import pytest

from jaxflow.config import ConfigError
from jaxflow.request import InvalidRequest, SamplingParams, StructuredOutputsParams
from serving.frontend.sampling_defaults import sampling_defaults
from serving.grpc import convert
from serving.grpc import generate_pb2 as pb


def test_unset_fields_take_the_defaults_of_the_proto():
    assert convert.sampling_params(pb.SamplingParams(), {}) == SamplingParams(max_tokens=None)


def test_the_generation_config_fills_only_unset_fields():
    defaults = sampling_defaults(
        {"temperature": 0.5, "top_k": 40, "top_p": None, "do_sample": True, "eos_token_id": 2}
    )
    assert defaults == {"temperature": 0.5, "top_k": 40}
    params = convert.sampling_params(pb.SamplingParams(temperature=0.0), defaults)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 40, 1.0)


@pytest.mark.parametrize("config", [{"temperature": -1.0}, {"top_p": 0.0}, {"temperature": "hot"}])
def test_an_invalid_generation_config_is_refused_at_start(config):
    with pytest.raises(ConfigError, match="generation_config"):
        sampling_defaults(config)


def test_every_setting_arrives():
    message = pb.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=5,
        min_p=0.125,
        seed=-9,
        max_tokens=30,
        min_tokens=2,
        n=3,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={7: 1.5},
        logprobs=0,
        prompt_logprobs=3,
        skip_special_tokens=False,
        include_stop_string=True,
        bad_words=["no", "never"],
        structured_outputs=pb.StructuredOutputs(regex="a+"),
    )
    expected = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=5,
        min_p=0.125,
        seed=-9,
        max_tokens=30,
        min_tokens=2,
        n=3,
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={7: 1.5},
        logprobs=0,
        prompt_logprobs=3,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        bad_words=("no", "never"),
        structured_outputs=StructuredOutputsParams(regex="a+"),
    )
    assert convert.sampling_params(message, {"temperature": 9.0}) == expected
    changed = [name for name, value in vars(SamplingParams()).items() if getattr(expected, name) == value]
    # Two settings contradict a form.
    assert changed == ["ignore_eos", "allowed_token_ids"], "a field that is not set cannot be seen to arrive"
    alone = convert.sampling_params(pb.SamplingParams(ignore_eos=True, allowed_token_ids=[7, 8]), {})
    assert (alone.ignore_eos, alone.allowed_token_ids) == (True, (7, 8))


@pytest.mark.parametrize(
    ("refused", "path"),
    [
        ("top_p", "sampling.top_p"),
        ("logit_bias[3]", "sampling.logit_bias[3]"),
        ("prompt", "token_ids.ids"),
        ("prompt_token_ids", "token_ids.ids"),
        ("prompt_logprobs", "sampling.prompt_logprobs"),
        ("messages[1].role", "chat.messages[1].role"),
        ("structured_outputs.json", "sampling.structured_outputs.json"),
        ("include_stop_str_in_output", "sampling.include_stop_string"),
        ("request_id", "request_id"),
    ],
)
def test_a_refused_field_is_named_by_its_path(refused, path):
    assert convert.path(refused, "token_ids") == path


@pytest.mark.parametrize("settings", [{"top_p": math.nan}, {"logit_bias": {3: math.inf}}, {"n": 65}])
def test_invalid_sampling_is_refused(settings):
    with pytest.raises(InvalidRequest) as refused:
        convert.sampling_params(pb.SamplingParams(**settings), {})
    assert refused.value.field.startswith(next(iter(settings)))


@pytest.mark.parametrize(
    ("message", "form"),
    [
        (pb.StructuredOutputs(json='{"type":"null"}'), {"json": {"type": "null"}}),
        (pb.StructuredOutputs(choice=pb.Choice(texts=["a", "b"])), {"choice": ["a", "b"]}),
        (pb.StructuredOutputs(grammar="start: x"), {"grammar": "start: x"}),
        (pb.StructuredOutputs(json_object=True), {"json_object": True}),
        (pb.StructuredOutputs(), None),
        (pb.StructuredOutputs(json_object=False), None),
        (pb.StructuredOutputs(choice=pb.Choice()), None),
        (pb.StructuredOutputs(choice=pb.Choice(texts=map(str, range(5000)))), None),
        (pb.StructuredOutputs(json="["), None),
    ],
)
def test_forms_of_answers(message, form):
    message = pb.SamplingParams(structured_outputs=message)
    if form is None:
        with pytest.raises(InvalidRequest, match="structured_outputs"):
            convert.sampling_params(message, {})
        return
    found = convert.sampling_params(message, {}).structured_outputs
    assert found is not None and found.text == StructuredOutputsParams(**form).text
