"""Requests of every kind, sensible and not, as Hypothesis strategies."""

import grpc
import hypothesis.strategies as st

from serving.grpc import generate_pb2 as pb

# Accepted statuses of a refusal; UNKNOWN and INTERNAL are excluded.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.FAILED_PRECONDITION,
}

texts = st.text(max_size=30) | st.sampled_from(["Once upon a time", "<s>", "\0", "\N{SNOWMAN}" * 9])
ids = st.integers(0, 511) | st.integers(0, 2**32 - 1)
floats = st.floats(width=32)
counts = st.integers(0, 8) | st.integers(0, 2**32 - 1)

samplings = st.builds(
    pb.SamplingParams,
    temperature=st.none() | floats,
    top_p=st.none() | floats,
    top_k=st.none() | st.integers(-(2**31), 2**31 - 1),
    min_p=st.none() | floats,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | counts,
    min_tokens=st.none() | counts,
    n=st.integers(0, 3) | counts,
    stop=st.lists(texts, max_size=3),
    stop_token_ids=st.lists(ids, max_size=3),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(ids, floats, max_size=2),
    logprobs=st.none() | counts,
    prompt_logprobs=st.none() | counts,
    skip_special_tokens=st.none() | st.booleans(),
    include_stop_string=st.booleans(),
)
# Settings that are each likely to be refused would leave little that is served.
modest = st.builds(
    pb.SamplingParams,
    max_tokens=st.integers(1, 20),
    n=st.integers(0, 3),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 511), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.none() | st.booleans(),
    include_stop_string=st.booleans(),
)
messages = st.lists(
    st.builds(pb.ChatMessage, role=st.sampled_from(["user", "robot", ""]) | texts, content=texts), max_size=3
)
chats = st.builds(pb.Chat, messages=messages, continue_final_message=st.booleans())
prompts = st.one_of(
    st.just({}),
    st.builds(dict, text=texts),
    st.builds(dict, token_ids=st.builds(pb.TokenIds, ids=st.lists(st.integers(3, 511) | ids, max_size=20))),
    st.builds(dict, chat=chats),
)
requests = st.builds(
    lambda prompt, **more: pb.GenerateRequest(**prompt, **more),
    prompts,
    sampling=samplings | modest,
    request_id=texts,
    model=st.just("") | texts,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=texts,
    session=texts,
)
