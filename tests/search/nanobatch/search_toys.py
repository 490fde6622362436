"""Toy profiles and settings for the tests of the search."""

import functools

import msgspec

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.plan import Plan
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.problem import SearchProblem
from search.profile.clock import shipped_card
from search.profile.modelled import modelled_profile
from search.profile.op_times import ATTENTION, OpTime, Profile
from search.profile.share_times import ShareTimes, product_shapes

FEW = (28, 40)  # SMs of attention; products get the rest
TOTAL = 132
CARD = shipped_card("H200")
assert CARD is not None
# Overlap has no cost on this card, so the search finds it.
FREE = msgspec.structs.replace(CARD, sm_bytes_per_cycle={"bfloat16": 63.0}, overlap_slowdown=1.0, nano_s=0.0)


def toy_profile(graph, times: dict[str, float], fixed: float = 0.0) -> Profile:
    """Return a profile: an op's seconds grow with tokens, plus `fixed` for each nano-op, and with fewer SMs.

    times: seconds of each op for 16 tokens on the whole device.
    """
    found = []
    for op in graph.layers[-1]:
        for sms in (
            (TOTAL, *FEW, *(TOTAL - few for few in FEW)) if op.kind in ("dense", "attention") else (TOTAL,)
        ):
            slower = max(1.0, TOTAL / (3 * sms)) if op.name == "decode_attention" else TOTAL / sms
            for tokens in (1, 16):
                for keys in (1, 1000) if op.name in ATTENTION else (0,):
                    found.append(
                        OpTime(op.name, tokens, keys, sms, (times[op.name] * tokens / 16 + fixed) * slower)
                    )
    return Profile("toy", {}, "toy", 1, "float32", "float32", TOTAL, "drawn", tuple(found))


def toy_setting(
    graph, times: dict[str, float], decodes: int = 8, fixed: float = 0.0, **rest
) -> SearchProblem:
    return SearchProblem(
        graph,
        ShareTimes(toy_profile(graph, times, fixed), graph),
        StepShape(16, decodes, 500.0, 500.0),
        step=8,
        **rest,
    )


@functools.cache
def llama_shares() -> ShareTimes:
    config = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    sms = (TOTAL, *FEW, *(TOTAL - few for few in FEW))
    made = modelled_profile("llama-3.1-8b", config, DEVICES["H200"], sms=sms, card=FREE)
    return ShareTimes(made, model_graph(config), product_shapes(config, 1), FREE)


def llama_setting(tokens: int, prompt: int, output: int, **rest) -> SearchProblem:
    shares = llama_shares()
    config = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    load = StepShape.steady_state(tokens, prompt, output)
    return SearchProblem(model_graph(config), shares, load, DEVICES["H200"], shipped_power("H200"), **rest)


def on_all_sms(plan: Plan) -> Plan:
    """Return the plan without shares of SMs.

    Copies hold no SMs, so the solver's shares gain nothing there.
    """
    return msgspec.structs.replace(
        plan, nano_ops=tuple(msgspec.structs.replace(nano, sms=None) for nano in plan.nano_ops)
    )
